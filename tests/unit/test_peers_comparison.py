"""Arms in processes of their own: one that runs, the same under two names, one that fails, one that was warm."""

import pytest

from moelab import artifacts
from moelab.lab.peers import cold, comparison, generated, stage
from moelab.lab.peers.comparison import REFERENCE, RIVAL, VARIANT, Arm, compare
from moelab.lab.peers.judge import judge

SHAPE = generated.Shape(layers=1, experts=4, top_k=2, hidden=64, expert_width=32, heads=2, kv_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Runs of a comparison in which much is wrong on purpose, and the refusal of its cap."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOELAB_ARTIFACTS", str(tmp_path_factory.mktemp("peers")))
        folder = generated.build(SHAPE, tokenizer=artifacts.root() / "artifacts" / "models" / "softmax").path

        def reread(files, **_):  # as a flag would that only asks for uncached reads
            for file in files:
                file.read_bytes()

        patch.setattr(cold, "drop", reread)
        arms = [
            Arm(name="reference", kind="resident", weights=folder, role=REFERENCE, settings={"routes": True}),
            Arm(name="second name", kind="resident", weights=folder, role=VARIANT),
            Arm(name="no GGUF", kind="neurostream", weights=folder, role=RIVAL, settings={"arena_bytes": 1}),
            Arm(name="not installed", kind="accelerate", weights=folder, role=RIVAL, error="accelerate: not installed"),
        ]
        return compare(arms, [[3, 1, 4]], tokens=3, cap_bytes=1 << 30, groups=folder / "none")


def of(found, arm):
    return [run for run in found[0] if run.arm == arm]


def test_rounds_are_rotated_and_give_every_arm_the_same_prompt(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(comparison, "run_arm", lambda arm, number, prompt, *_, **__: seen.append((arm.name, prompt)))
    arms = [Arm(name=name, kind="resident", weights=tmp_path, role=VARIANT) for name in "abc"]
    compare(arms, [[1], [2]], tokens=3, cap_bytes=1 << 30, groups=tmp_path)
    assert seen == [("a", [1]), ("b", [1]), ("c", [1]), ("b", [2]), ("c", [2]), ("a", [2])]


def test_one_process_an_arm_gives_the_same_tokens(found):
    (reference,), (other,) = of(found, "reference"), of(found, "second name")
    assert reference.answer.tokens == other.answer.tokens and reference.answer.decoded == 3


def test_the_reference_says_how_many_experts_its_text_needed(found):
    assert all(2 <= run.answer.report["distinct_experts"] <= 4 for run in of(found, "reference"))


def test_an_arm_that_fails_shows_its_error_and_stops_nobody(found):
    assert [run.error for run in of(found, "not installed")] == ["accelerate: not installed"]
    for run in of(found, "no GGUF"):
        assert run.answer is None and "Error" in run.error


def test_no_cap_the_same_arm_twice_and_a_warm_start_are_all_seen(found):
    runs, refusal = found
    reasons = judge(runs, shape=SHAPE, model_bytes=2 << 30, cap_bytes=1 << 30, refusal=refusal).reasons
    assert "no enforced memory cap: no memory controller is mounted" in reasons
    assert "reference and second name ran with the same options: they are one arm" in reasons
    if of(found, "second name")[0].cached_before is not None:
        assert "second name, round 1: 100% of the weights were in memory before it began" in reasons


def test_a_run_that_does_not_end_is_ended(tmp_path):
    assert comparison._execute(["sleep", "60"], 1, 0.2) == "no end within 0 s"
    assert comparison._execute(["false"], 1, 5) == "exit status 1, and no word"


def test_a_missing_library_becomes_an_arm_with_an_error(tmp_path, monkeypatch):
    def absent(checkpoint):
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(stage.convert, "gguf", absent)
    monkeypatch.setenv("MOELAB_ARTIFACTS", str(tmp_path))
    options = stage.PeersOptions(arms=["neurostream"])
    arm = stage.list_arms(options, stage.build_model(options))[-1]
    assert (arm.name, arm.error) == ("neurostream", "gguf: not installed here: `make peers` brings it")
