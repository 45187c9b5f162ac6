"""The stages of the flywheel on a model that is larger than its memory: the same artefacts, labelled as streamed."""

import numpy as np
import pytest
from streamed_cases import expert_bytes, streamed

from moelab import artifacts
from moelab.flywheel import capture, qualification, replay
from moelab.flywheel.capture import capture_model
from moelab.flywheel.dataset import open_dataset
from moelab.flywheel.examples import regenerate
from moelab.flywheel.observations import Records
from moelab.flywheel.qualification import COUNTS, qualify_model, verdict
from moelab.flywheel.replay import read_routes, replay_model
from moelab.flywheel.snapshot import snapshot_model
from moelab.models import load

KINDS = ("resident", "streamed")


@pytest.fixture(scope="module")
def home(world, tmp_path_factory):
    with world.entered(tmp_path_factory.mktemp("streamed")):
        yield world


@pytest.fixture(scope="module")
def observed(home):
    """Residency → observations, the streamed ones with slots for the experts of one token."""
    options = home.capture_options(max_threads=9, sampled=1, edge_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        plain = capture_model(home.model, options)
        patch.setattr(capture, "opened", lambda model: streamed(model, layers=1))
        return {"resident": plain, "streamed": capture_model(home.model, options)}


@pytest.fixture
def small(monkeypatch):
    """Every stage opens the model with slots for one layer's experts; the opened models are collected."""
    opened = []

    def small(model):
        opened.append(streamed(model, layers=1))
        return opened[-1]

    for module in (capture, qualification, replay):
        monkeypatch.setattr(module, "opened", small)
    return opened


def records(home, folder):
    found = Records(artifacts.open_artifact(folder))
    return {entry["file"]: o for entry, o in zip(found.index, everything(home, found), strict=True)}


def everything(home, found):
    return found.open(found.index, load(home.model), purpose="evaluate")


def test_capture_records_the_same_rows_and_says_how(home, observed):
    assert observed["resident"] != observed["streamed"]
    plain, stream = (records(home, observed[kind]) for kind in KINDS)
    assert plain.keys() == stream.keys() and {o.header.mode for o in plain.values()} == {"forced", "sampled"}
    for name, o in plain.items():
        for field in ("token_ids", "phase", "ordinal", "counter", "ids", "weights", "margin"):
            np.testing.assert_array_equal(getattr(stream[name], field), getattr(o, field))
        assert (o.header.runtime["residency"], stream[name].header.runtime["residency"]) == KINDS
        assert o.header.model == stream[name].header.model
    for kind in KINDS:
        manifest = artifacts.open_artifact(observed[kind]).manifest
        assert manifest.params["runtime"]["residency"] == kind


def test_shards_have_the_same_bytes_and_cost_the_model_once_each(home, observed, small):
    options = home.replay_options(shard_sequences=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "opened", resident)
        plain = artifacts.open_artifact(replay_model(home.model, options, observed["resident"], True))
    stream = artifacts.open_artifact(replay_model(home.model, options, observed["streamed"], True))
    shards = {name: digest for name, digest in plain.manifest.files.items() if name.startswith("shard")}
    assert shards.items() <= stream.manifest.files.items() and len(shards) == plain.counts["shards"] > 2
    assert stream.counts["expert_bytes_read"] == len(shards) * expert_bytes(small[-1])
    assert plain.counts["expert_bytes_read"] == 0
    assert plain.manifest.params["runtime"]["residency"] == "resident" != stream.manifest.params["runtime"]["residency"]
    np.testing.assert_array_equal(read_routes(plain)[0].ids, read_routes(stream)[0].ids)


class resident:
    """What `opened` gives for a name without a budget."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        return load(self.model)

    def __exit__(self, *details):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_gate_1_holds_streamed_replay_against_streamed_decode(home, observed, small, kind):
    """A resident capture is no evidence about the streamed runtime: its tokens are decoded again, streamed."""
    options = home.replay_options(chunks=[24] if kind == "resident" else [1, 24])
    found = artifacts.read_json(qualify_model(home.model, options, observed[kind]) / "parity.json")
    assert found["recorded"] is (kind == "streamed") and found["runtime"]["residency"] == "streamed"
    assert all(found[name] == 0 for name in COUNTS) and found["largest_exact_chunk"] == 24
    assert found["diagnostic"]["stored_equal"] and found["diagnostic"]["live_difference"] <= 1e-6
    assert min(map(min, found["speeds"].values())) > 0 and small[-1].waited_s > 0
    assert verdict("m", {"reference": found}, options).status == "pass"


def test_features_of_a_snapshot_are_those_of_the_resident_model(home, observed):
    routes = replay_model(home.model, home.replay_options(), observed["resident"], True)
    snapped = snapshot_model(home.model, home.snapshot_options(smallest_train_tokens=1), observed["resident"], routes)
    dataset = open_dataset(artifacts.open_artifact(snapped), artifacts.open_artifact(routes))
    found, kinds = Records(artifacts.open_artifact(observed["resident"])), ("pre_attention", "moe_input")
    want = regenerate(load(home.model), dataset, found, kinds, home.replay_options().shape)
    with streamed(home.model, layers=2) as loaded:
        got = regenerate(loaded, dataset, found, kinds, home.replay_options().shape)
        assert loaded.bytes_read == expert_bytes(loaded), "one group: every expert is read once for the whole snapshot"
    for name in kinds:
        np.testing.assert_array_equal(got[name], want[name])


def test_a_name_with_a_budget_goes_through_the_stages(home, observed):
    """No model is patched here: the name alone says that it is streamed, and in how much memory."""
    name, options = f"{home.model}@4096MiB", home.replay_options()
    found = artifacts.open_artifact(replay_model(name, options, observed["streamed"], True))
    assert found.manifest.params["runtime"]["residency"] == "streamed" and found.counts["expert_bytes_read"] > 0
