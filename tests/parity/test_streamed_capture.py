"""Capture of a streamed model records what capture of the resident one records, and says that it was streamed."""

import mlx.core as mx
import numpy as np
import pytest
from streamed_cases import checkpoint, streamed

from moelab import models
from moelab.errors import ArtifactError, ContractError, IdentityError, StoreError
from moelab.flywheel.engine import LiveEngine, follow, opened
from moelab.flywheel.plan import Plan
from moelab.models import runtime_identity
from moelab.routes import DECODED, PREFILLED
from moelab.streaming import StreamedModel, write_pack
from moelab.streaming.memory.forward import Forward

PLAN = Plan(
    sequence="s",
    thread="t",
    owner="o",
    tokens=np.random.default_rng(0).integers(5, 250, 52).astype(np.int32),
    phase=np.array([PREFILLED] * 19 + [DECODED] * 20 + [PREFILLED] * 5 + [DECODED] * 8, np.uint8),
    message_start=np.zeros(1, np.int32),
    role=np.ones(1, np.uint8),
)
FIELDS = ("ids", "weights", "margin")


def recorded(loaded, **taps):
    with LiveEngine(loaded, **taps) as engine:
        tape, record = follow(engine, PLAN, 8)
        logits = np.array(engine.feed(PLAN.tokens[:1], DECODED))
    return tape, record, logits


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "gpt_oss"])
def test_every_row_equals_the_resident_capture(name, tmp_path):
    model = checkpoint(name, tmp_path)
    tape, want, logits = recorded(models.load(model))
    for size in ({"cycles": 1}, {"layers": 2}):  # one token's experts; two of eight layers
        with streamed(model, **size) as loaded:
            again, got, streamed_logits = recorded(loaded)
            assert loaded.waited_s > 0 and loaded.bytes_read > 0
        assert (again.tokens, again.phase) == (tape.tokens, tape.phase)
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field))
        np.testing.assert_array_equal(streamed_logits, logits)


def test_features_taken_live_are_those_of_the_resident_model(tmp_path):
    model = checkpoint("deepseek_v3", tmp_path)
    kinds = ("pre_attention", "moe_input")
    want = recorded(models.load(model), features=kinds)[1]
    with streamed(model, cycles=1.5) as loaded:
        got = recorded(loaded, features=kinds)[1]
    for kind in kinds:
        np.testing.assert_array_equal(got.features[kind], want.features[kind])


def test_the_phase_of_every_pass_is_the_plans(tmp_path, monkeypatch):
    """Also of prompts that are fed one token at a time, which sizes would take for decode."""
    begin, told = Forward.begin, []
    monkeypatch.setattr(Forward, "begin", lambda self, phase: told.append(phase) or begin(self, phase))
    with streamed(checkpoint("gpt_oss", tmp_path), cycles=2) as loaded, LiveEngine(loaded) as engine:
        follow(engine, PLAN, 1)
    assert told == PLAN.phase.tolist()


def test_a_streamed_model_runs_in_its_turn_only(tmp_path):
    with streamed(checkpoint("gpt_oss", tmp_path), cycles=1) as loaded:
        with pytest.raises(ContractError, match="runs inside decoding"):
            loaded.run(mx.array([[1]]), loaded.make_cache(), PREFILLED)
        with LiveEngine(loaded), pytest.raises(ContractError, match="in use"), loaded.holding(0):
            pass
    words = r"experts of one token.*got: '\d+ bytes', expected: >= \d+ bytes"
    with (
        streamed(checkpoint("gpt_oss", tmp_path), cycles=0.99) as loaded,
        pytest.raises(ContractError, match=words),
        LiveEngine(loaded),
    ):
        pass


def test_known_answers_are_asked_of_the_streamed_experts():
    with streamed("softmax", layers=1) as loaded:
        found = models.self_test(loaded)
        assert found["answers"] == 3 and found == models.self_test(models.load("softmax"))
        read_into = loaded.store.read_into

        def wrong(layer, expert, out):
            done = read_into(layer, expert, out)
            out.view(np.float32)[:] *= 1.5  # kernels still compute right with what they are given
            return done

        loaded.store.read_into = wrong
        with pytest.raises(IdentityError, match="known answer"):
            models.self_test(loaded)


def test_kernels_are_checked_on_streamed_experts(tmp_path, monkeypatch):
    with streamed(checkpoint("gpt_oss", tmp_path), layers=1) as loaded:
        assert 0 < models.self_test(loaded)["kernel_error"] < 1e-5, "0 would mean that nothing was compared"
        monkeypatch.setattr(models.known_answers, "_dense", lambda product, expert, x: np.arange(product.output_dims))
        with pytest.raises(IdentityError, match="expert products are wrong"):
            models.self_test(loaded)


# ---------------------------------------------------------------- identity


def test_a_name_with_a_budget_opens_the_model_streamed(tmp_path):
    model = checkpoint("gpt_oss", tmp_path)
    with opened(str(model)) as resident, opened(f"{model}@64GiB") as loaded:
        assert isinstance(loaded, StreamedModel) and loaded.memory_budget_bytes == 64 << 30
        assert loaded.digests == resident.digests and loaded.geometry == resident.geometry
        identities = [runtime_identity(m.precision, m.residency) for m in (resident, loaded)]
        assert [identity.pop("residency") for identity in identities] == ["resident", "streamed"]
        assert identities[0] == identities[1]
    with pytest.raises(StoreError, match="closed"), loaded.decoding():
        loaded.run(mx.array([[1]]), loaded.make_cache(), PREFILLED)


def test_a_pack_is_the_model_that_it_was_made_of(tmp_path):
    model = checkpoint("gpt_oss", tmp_path / "stock")
    resident = models.load(model)
    want = recorded(resident)[1]
    for precision in ("stored", "float32"):
        write_pack(model, tmp_path / precision, precision=precision)
        with streamed(tmp_path / precision, cycles=1) as loaded:
            assert loaded.digests == resident.digests
            got = recorded(loaded)[1]
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field))


def test_a_pack_that_lost_precision_or_was_altered_is_not(tmp_path):
    model = checkpoint("gpt_oss", tmp_path / "stock")
    write_pack(model, tmp_path / "half", precision="bfloat16")
    with streamed(tmp_path / "half", cycles=1) as loaded:
        assert loaded.digests["model"] != models.load(model).digests["model"]
    write_pack(model, tmp_path / "pack")
    weights = tmp_path / "pack" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match="altered"), streamed(tmp_path / "pack", cycles=1):
        pass
