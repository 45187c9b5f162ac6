"""Layer options: the source project's fields, defaults and profiles, and nothing that is silently inert."""

import dataclasses

import pytest

from moelab.errors import ParameterError
from moelab.streaming.layer import options as module
from moelab.streaming.layer.options import PROFILES, LayerOptions, profile

DEFAULTS = {
    "staged": False, "staged_replace": False, "staged_n": 8, "staged_trigger": 8, "staged_sync": True,
    "asm_cache": True, "incr_stack": False, "incr_writeback": False, "history_prefetch": True, "hot_per_layer": 0,
    "hot_update_interval": 4, "hot_decay": 0.75, "pin_bonus": 2.0, "cache_slots": 64, "prefetch_cap": 48,
    "load_threads": 8, "prefetch_threads": 4, "use_compile": True, "top_k": None, "full_layer_prefill": False,
    "prefill_full_layers": 0, "prefill_hot": 0, "warm_willneed": False,
}  # fmt: skip
TABLE = {
    "staged_k4": {
        "staged": True, "staged_n": 4, "staged_trigger": 4, "staged_sync": True, "incr_stack": True,
        "incr_writeback": True, "warm_willneed": True, "hot_per_layer": 0, "full_layer_prefill": False,
        "prefill_full_layers": 0, "prefill_hot": 32, "history_prefetch": True, "cache_slots": 64, "top_k": 4,
    },
    "prod_k8": {
        "staged": True, "staged_n": 8, "staged_trigger": 8, "staged_sync": True, "incr_stack": False,
        "incr_writeback": False, "warm_willneed": False, "hot_per_layer": 0, "full_layer_prefill": True,
        "prefill_full_layers": 0, "prefill_hot": 0, "history_prefetch": False, "cache_slots": 64, "top_k": 8,
    },
    "staged_k8": {
        "staged": True, "staged_n": 8, "staged_trigger": 8, "staged_sync": True, "incr_stack": False,
        "incr_writeback": False, "warm_willneed": False, "hot_per_layer": 0, "full_layer_prefill": True,
        "prefill_full_layers": 0, "prefill_hot": 0, "history_prefetch": True, "cache_slots": 64, "top_k": 8,
    },
}  # fmt: skip


def test_fields_and_defaults_are_the_source_projects_and_one_more():
    assert dataclasses.asdict(LayerOptions()) == {**DEFAULTS, "on_missing": "exact"}


@pytest.mark.parametrize("name", TABLE)
def test_profiles_have_the_shipped_numbers(name):
    got = dataclasses.asdict(profile(name))
    assert got == {**DEFAULTS, "on_missing": "exact", **TABLE[name]}
    assert sorted(PROFILES) == sorted(TABLE)


def test_overrides_change_what_they_name_and_no_more():
    got = profile("staged_k4", cache_slots=900, on_missing="raise")
    assert got == profile("staged_k4").overrides(cache_slots=900, on_missing="raise")
    changed = {k for k, v in dataclasses.asdict(got).items() if v != getattr(profile("staged_k4"), k)}
    assert changed == {"cache_slots", "on_missing"}
    assert LayerOptions.from_dict(dataclasses.asdict(got)) == got


@pytest.mark.parametrize("make", [
    lambda: LayerOptions.from_dict({"staged_m": 4}),
    lambda: LayerOptions().overrides(staged_m=4),
    lambda: profile("staged_k4", staged_m=4),
])  # fmt: skip
def test_an_unknown_field_is_refused_and_the_known_ones_listed(make):
    with pytest.raises(ParameterError, match="staged_n") as caught:
        make()
    assert caught.value.field == "staged_m" and caught.value.expected == sorted([*DEFAULTS, "on_missing"])


def test_an_unknown_profile_is_refused_by_name():
    with pytest.raises(ParameterError, match=r"staged_k5.*prod_k8"):
        profile("staged_k5")


@pytest.mark.parametrize("values, field", [
    ({"staged": 1}, "staged"),
    ({"staged_n": True}, "staged_n"),
    ({"staged_n": 4.0}, "staged_n"),
    ({"staged_n": 0}, "staged_n"),
    ({"hot_per_layer": -1}, "hot_per_layer"),
    ({"hot_update_interval": 0}, "hot_update_interval"),
    ({"hot_decay": 1.5}, "hot_decay, pin_bonus, top_k"),
    ({"hot_decay": float("nan")}, "hot_decay, pin_bonus, top_k"),
    ({"pin_bonus": -0.5}, "hot_decay, pin_bonus, top_k"),
    ({"pin_bonus": float("nan")}, "hot_decay, pin_bonus, top_k"),
    ({"top_k": 0}, "hot_decay, pin_bonus, top_k"),
    ({"cache_slots": 0}, "cache_slots"),  # the source's "unbounded"
    ({"load_threads": 0}, "load_threads"),
    ({"on_missing": "drop"}, "on_missing"),
    ({"asm_cache": False}, "asm_cache"),
    ({"use_compile": False}, "use_compile"),
    ({"staged": True, "incr_stack": True, "staged_sync": False}, "staged_sync"),
    ({"staged_replace": True}, "staged"),
    ({"staged": True, "staged_n": 4}, "staged_n"),  # the default trigger is 8
    ({"prefill_full_layers": 3}, "prefill_full_layers"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(values, field):
    with pytest.raises(ParameterError) as caught:
        LayerOptions(**values)
    assert caught.value.field == field


def test_the_table_says_what_every_option_does():
    rows = [line for line in module.__doc__.splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for row in rows for name in row.split("|")[1].split(",")}
    assert named == set(LayerOptions.names())
