"""Options of the streamed layer: which paths it takes, and the profiles of the source project by name.

Names, defaults and profiles are the source project's. There an expert is assembled from a cache into a stack;
here a cached expert *is* a slot that the kernel reads, so some options mean less work than they did, and one
table says what each does here:

| option | here |
|---|---|
| `staged` | Decode passes run on staged slots, where a set is staged. |
| `staged_replace` | The staged set is the route: the layer may be called without indices. |
| `staged_n` | Slots of a set. More ids than slots: kept by weight, refused without weights. |
| `staged_trigger` | Indices of one staged token (K). The pass's phase decides what is staged, never a count; \
checked against `staged_n`. |
| `staged_sync` | True: `stage` returns when the slots are filled. False: the readers fill them, and a turn waits for \
what is left. |
| `asm_cache` | Assembled stacks are kept. They always are (slots): False is refused. |
| `incr_stack` | True: `staged_n` slots, changed in place between passes. False: twice as many, the next set is filled \
beside the active one. Either way only rows that change are written. Needs `staged_sync`. |
| `incr_writeback` | True: what is staged enters the cache when it leaves its slot. False: when it is read. |
| `history_prefetch` | True: a set stays in service until the next one (only with `on_missing="exact"`: else ids \
that it lacks would be lost). False: a set serves one pass. |
| `hot_per_layer` | > 0: the cache's policy is hot-pin with so many pins a layer. |
| `hot_update_interval`, `hot_decay`, `pin_bonus` | Of hot-pin, for `hot_per_layer` and `prefill_hot`. |
| `cache_slots` | Size of the expert cache, where no byte budget is given. |
| `load_threads` | Reader threads. |
| `prefetch_threads`, `prefetch_cap` | Reads ahead of demand (prefetch, windows, `staged_sync=False`) in progress at \
the same time; the smaller of the two. |
| `use_compile` | mlx-lm's own compiled activations run, always: False is refused (set MLX_DISABLE_COMPILE). |
| `top_k` | Experts a token in prefill and decode; None = the model's own K. Any other number makes it another \
model, which `EngineOptions(change_top_k=True)` says is meant. |
| `full_layer_prefill` | A prefill pass reads whole layers, one ahead of the computation. |
| `prefill_full_layers` | How many layers, from the first; 0 = all. |
| `prefill_hot` | > 0: a prefill pass has the hottest experts of each layer read one layer ahead; others are exact. |
| `warm_willneed` | True: all reads of a fill are asked for at once. False: a synchronous fill reads one by one. |
| `on_missing` | A decoded id that is not staged (or, without `staged`, not resident: `late`): "exact" waits and \
computes it on the exact path, "raise" raises, "zero" gives nothing (the source's, counted), so that its share falls \
out and a shared expert goes on by itself, "anchor" lets the shared expert stand in with the id's weight. These are \
`policies.degrade(mass="keep")` with the lost weight left out, and with it given to the anchor. |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...errors import ParameterError
from ...params import known_names

__all__ = ["MOST_THREADS", "ON_MISSING", "PROFILES", "LayerOptions", "profile"]

MOST_THREADS = 256
"""No disk gains from more reads in progress, and each thread takes a stack and a buffer."""

ON_MISSING = ("exact", "raise", "zero", "anchor")
_LEAST = {
    "staged_n": 1, "staged_trigger": 1, "hot_per_layer": 0, "hot_update_interval": 1, "cache_slots": 1,
    "prefetch_cap": 1, "load_threads": 1, "prefetch_threads": 1, "prefill_full_layers": 0, "prefill_hot": 0,
}  # fmt: skip
_MOST = {"load_threads": MOST_THREADS, "prefetch_threads": MOST_THREADS}
_ALWAYS = {
    "asm_cache": "slots are assembled stacks, and stay",
    "use_compile": "the layer runs mlx-lm's own module",
}


@known_names
@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """See the table in the module text.

    Raises:
        ParameterError: an unknown name, a wrong type or range, or options that contradict each other.
    """

    staged: bool = False
    staged_replace: bool = False
    staged_n: int = 8
    staged_trigger: int = 8
    staged_sync: bool = True
    asm_cache: bool = True
    incr_stack: bool = False
    incr_writeback: bool = False
    history_prefetch: bool = True
    hot_per_layer: int = 0
    hot_update_interval: int = 4
    hot_decay: float = 0.75
    pin_bonus: float = 2.0
    cache_slots: int = 64
    prefetch_cap: int = 48
    load_threads: int = 8
    prefetch_threads: int = 4
    use_compile: bool = True
    top_k: int | None = None
    full_layer_prefill: bool = False
    prefill_full_layers: int = 0
    prefill_hot: int = 0
    warm_willneed: bool = False
    on_missing: str = "exact"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            self._check_type(field.name, field.type)
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ParameterError("out of range", field=name, got=getattr(self, name), expected=f">= {least}")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ParameterError("out of range", field=name, got=getattr(self, name), expected=f"<= {most}")
        if (
            not 0 <= self.hot_decay <= 1
            or not 0 <= self.pin_bonus < math.inf
            or (self.top_k is not None and self.top_k < 1)
        ):
            raise ParameterError(
                "out of range", field="hot_decay, pin_bonus, top_k",
                got=(self.hot_decay, self.pin_bonus, self.top_k), expected="in [0, 1], >= 0, >= 1 or None",
            )  # fmt: skip
        if self.on_missing not in ON_MISSING:
            raise ParameterError("unknown choice", field="on_missing", got=self.on_missing, expected=ON_MISSING)
        for name, why in _ALWAYS.items():
            if not getattr(self, name):
                raise ParameterError(f"cannot be switched off: {why}", field=name, got=False, expected=True)
        for wrong, problem, name, expected in (
            (self.incr_stack and not self.staged_sync, "a stack changed in place is filled by its caller",
             "staged_sync", "True with incr_stack"),
            (self.staged_replace and not self.staged, "a set that is the route has to be staged", "staged",
             "True with staged_replace"),
            (self.staged and self.staged_trigger > self.staged_n, "one token does not fit the staged slots",
             "staged_n", f">= staged_trigger, {self.staged_trigger}"),
            (self.prefill_full_layers and not self.full_layer_prefill, "no layer is read whole",
             "prefill_full_layers", "0 without full_layer_prefill"),
        ):  # fmt: skip
            if wrong:
                raise ParameterError(problem, field=name, got=getattr(self, name), expected=expected)

    def _check_type(self, name: str, kind: str) -> None:
        value = getattr(self, name)
        types = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,), "int | None": (int, type(None))}
        if type(value) not in types[kind]:  # a boolean is no integer
            raise ParameterError("wrong type", field=name, got=value, expected=kind)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From a mapping; absent fields take their defaults. Raises ParameterError for an unknown field."""
        return cls(**{str(name): value for name, value in values.items()})

    def overrides(self, **values: Any) -> Self:
        """The same with other values. Raises ParameterError for an unknown field."""
        return dataclasses.replace(self, **values)


PROFILES: dict[str, dict[str, Any]] = {
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
"""Name → the fields that it sets; the rest are defaults. As the source project ships them: `staged_k4` for the 35b
tier, `prod_k8` for the 8b tier, `staged_k8` for eight experts a token with history. They name the K of their tier: for
a model with another, `profile(name, top_k=None)` keeps the model's."""


def profile(name: str, **overrides: Any) -> LayerOptions:
    """A profile, with other values where wanted. Raises ParameterError for an unknown profile or field."""
    if name not in PROFILES:
        raise ParameterError("unknown profile", field="profile", got=name, expected=sorted(PROFILES))
    return LayerOptions(**{**PROFILES[name], **overrides})
