"""Capture: what is fed is what is written, token for token, however a sequence ends; and nothing half.

All on a tiny random model whose tokens are bytes.
"""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import flywheel_world
import numpy as np
import pytest

from moelab import artifacts, models
from moelab.errors import RecordError, VaultError
from moelab.flywheel import capture as capturing
from moelab.flywheel import observations, plan, split
from moelab.flywheel.capture import Study, capture_model
from moelab.flywheel.engine import LiveEngine, Tape, follow
from moelab.flywheel.observe import from_bytes
from moelab.flywheel.vault import Vault, record_name
from moelab.routes import DECODED, PREFILLED
from moelab.threads import read, render_sequences, stop_ids

pytestmark = pytest.mark.usefixtures("inside")


def written(folder, vault):
    return {p.name: from_bytes(vault.open(p), file=p) for p in sorted(Path(folder).glob("*.age"))}


@pytest.fixture
def threads(world):
    return read(world.threads)


@pytest.fixture
def study(world, loaded, threads):
    with LiveEngine(loaded) as engine:
        yield Study(loaded, engine, threads, world.capture_options(sampled=1))


def scripted(study, *ids):
    """Make the sampler draw these ids in every turn, the last one for ever."""
    state = iter(())
    drawn = []

    def key(seed):
        nonlocal state
        state = iter([*ids, *[ids[-1]] * 100])

    def draw(logits, _):
        drawn.append(next(state))
        return drawn[-1], None

    study.sampler._key, study.sampler._draw = key, draw
    return drawn


# ---------------------------------------------------------------- rows are the tokens fed


def test_every_record_of_a_capture_has_a_row_for_every_token_fed(records, loaded, threads):
    """Forced, sampled and edge sequences alike; forced ones hold the very ids of the renderer."""
    found = list(records.open(records.index, loaded, purpose="evaluate"))
    by_uid = {t.uid: t for t in threads}
    L, K = loaded.geometry.layers, loaded.geometry.top_k
    for entry, o in zip(records.index, found, strict=True):
        T = len(o.token_ids)
        assert T == o.header.tokens_fed == entry["tokens"] and o.ids.shape == o.weights.shape == (T, L, K)
        assert o.margin.shape == (T, L) and o.weights.min() > 0
        if entry["sequence"] == "forced-0":
            ids = render_sequences(by_uid[entry["thread"]], loaded.tokenizer)[0].token_ids
            assert min(flywheel_world.CONTEXT, len(ids)) == T and entry["beyond"] == len(ids) - T
            np.testing.assert_array_equal(o.token_ids, ids[:T])
    assert {e["mode"] for e in records.index} == {"forced", "sampled"}
    first, one = next((o, e) for o, e in zip(found, records.index, strict=True) if e["sequence"] == "edge-prompt-1")
    assert first.phase.tolist() == [PREFILLED] + [DECODED] * 3 and one["tokens"] == 4, "a prompt of one token"


def test_a_turn_that_ends_by_a_stop_token_holds_what_was_fed_before_it(study, threads):
    stop = min(stop_ids(study.loaded.tokenizer))
    scripted(study, 70, 71, stop)
    plan, tape, record, turns = study.sampler.sample(threads[0])
    assert [plan.tokens[t.start : t.end].tolist() for t in turns] == [[70, 71]] * 2
    assert len(record.ids) == len(tape.tokens) == len(plan.tokens)
    assert stop not in [int(t) for s in turns for t in plan.tokens[s.start : s.end]]
    assert (plan.phase == DECODED).sum() == 4


def test_a_turn_that_stops_at_once_has_no_row(study, threads):
    scripted(study, min(stop_ids(study.loaded.tokenizer)))
    plan, _, record, turns = study.sampler.sample(threads[0])
    assert [t.end - t.start for t in turns] == [0, 0] and (plan.phase == PREFILLED).all()
    assert len(record.ids) == len(plan.tokens)


def test_a_turn_that_ends_by_max_new_holds_exactly_so_many(study, threads):
    drawn = scripted(study, 70)
    plan, _, record, turns = study.sampler.sample(threads[0])
    assert [t.end - t.start for t in turns] == [study.options.max_new] * 2 and len(drawn) == 2 * study.options.max_new
    assert len(record.ids) == len(plan.tokens) == len(plan.phase)


def test_a_turn_that_fills_the_context_stops_there(world, loaded, threads):
    with LiveEngine(loaded) as engine:
        study = Study(loaded, engine, threads, world.capture_options(sampled=1, context=34, max_new=40))
        scripted(study, 70)
        plan, _, record, turns = study.sampler.sample(threads[0])
    assert len(plan.tokens) == len(record.ids) == 34 and len(turns) == 1


def test_sampled_ids_are_carried_and_never_encoded_again(study, threads, tmp_path):
    """Two halves of different letters: decoding and encoding them would give other ids, and more."""
    tokenizer = study.loaded.tokenizer
    lead, tail = (tokenizer.convert_tokens_to_ids(c) for c in ("Ã", "©"))  # bytes c3 and a9
    answer = [lead, lead, tail, tail, lead]
    assert tokenizer.encode(tokenizer.decode(answer)) != answer
    scripted(study, *answer)
    study.sampler.options = replace(study.options, max_new=len(answer))
    vault = Vault(tmp_path / "vault")
    uid = next(u for u in study.threads if study.sets[u] == "train")
    o = study._one(tmp_path, vault, 0, uid)
    o = from_bytes(vault.open(tmp_path / record_name(uid, "sampled-0")))
    assert [o.token_ids[t.start : t.end].tolist() for t in o.header.turns] == [answer, answer]
    assert o.header.turns[0].seed != o.header.turns[1].seed and len(o.ids) == len(o.token_ids)


def test_a_forced_decode_encodes_nothing(study, monkeypatch, tmp_path):
    from moelab.threads.template import Codec

    def refuse(*_):
        raise AssertionError("text was encoded again")

    monkeypatch.setattr(Codec, "text", refuse)
    planned = next(p for p in study.plans() if p.decoded)
    o = study._one(tmp_path, Vault(tmp_path / "vault"), 0, planned)
    np.testing.assert_array_equal(o.token_ids, planned.tokens)
    np.testing.assert_array_equal(o.phase, planned.phase)


class Faulty(LiveEngine):
    """An engine that raises at its n-th step, or loses the last row of what it routed."""

    def __init__(self, loaded, *, raises=None, at=0, loses=False):
        super().__init__(loaded)
        self.raises, self.left, self.loses = raises, at, loses

    def feed(self, tokens, phase, **wanted):
        self.left -= 1
        if self.raises and self.left == 0:
            raise self.raises
        return super().feed(tokens, phase, **wanted)

    def take(self):
        record = super().take()
        if not self.loses:
            return record
        return replace(record, ids=record.ids[:-1], weights=record.weights[:-1], margin=record.margin[:-1])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the engine stopped")])
def test_a_sequence_broken_off_leaves_no_file_and_the_rest_is_captured_later(world, loaded, captured, error, tmp_path):
    """Ctrl-C in the middle of the third sequence; the next capture ends with the digest of an unbroken one."""
    with world.entered(tmp_path):
        threads, vault, folder = capturing.select(read(world.threads), None), Vault(), tmp_path / "records"
        folder.mkdir()
        with Faulty(loaded, raises=error, at=60) as engine:
            study = Study(loaded, engine, threads, world.capture_options())
            names = [record_name(p.thread, p.sequence) for p in study.plans()]
            with pytest.raises(type(error)):
                study.write(folder, vault)
        done = written(folder, vault)
        assert 0 < len(done) < len(names) and set(done) == set(names[: len(done)])
        assert [p.name for p in folder.iterdir() if p.suffix != ".age"] == [], "no index either"
        with LiveEngine(loaded) as engine:
            counts = Study(loaded, engine, threads, world.capture_options()).write(folder, vault)
    assert counts["content"] == artifacts.open_artifact(captured).content


def test_a_lost_row_is_no_record(world, loaded, threads, tmp_path):
    with Faulty(loaded, loses=True) as engine:
        study = Study(loaded, engine, threads, world.capture_options())
        with pytest.raises(RecordError):
            study.write(tmp_path, Vault(tmp_path / "vault"))
    assert list(tmp_path.glob("*.age")) == []


def test_what_a_broken_sequence_left_in_an_engine_never_enters_the_next_one(world, loaded, threads, tmp_path):
    with Faulty(loaded, raises=RuntimeError("x"), at=3) as engine:
        study = Study(loaded, engine, threads, world.capture_options())
        with pytest.raises(RuntimeError):
            study.write(tmp_path, Vault(tmp_path / "vault"))
        with pytest.raises(RecordError):  # rows beyond the tokens fed
            study.write(tmp_path, Vault(tmp_path / "vault"))
    assert list(tmp_path.glob("*.age")) == []


def test_tape_and_follow(loaded):
    made = plan.Plan(
        sequence="s",
        thread="t",
        owner="o",
        tokens=np.arange(10, 30, dtype=np.int32),
        phase=np.array([0] * 7 + [1] * 4 + [0] * 3 + [1] * 6, np.uint8),
        message_start=np.zeros(1, np.int32),
        role=np.ones(1, np.uint8),
    )
    with LiveEngine(loaded) as engine:
        tape, record = follow(engine, made, 4)
    assert tape.tokens == made.tokens.tolist() and tape.phase == made.phase.tolist()
    assert len(tape.wall_ns) == 20 == len(record.ids) and record.features == {}
    with LiveEngine(loaded, taps=False) as engine:
        engine.start()
        assert engine.feed(made.tokens, PREFILLED).shape == Tape().feed(engine, made.tokens[:1], PREFILLED).shape


def test_routes_and_what_follows_do_not_depend_on_who_asks_for_logits(loaded):
    tokens, found = np.arange(10, 40, dtype=np.int32), []
    for wanted in (True, False):
        with LiveEngine(loaded) as engine:
            engine.start()
            for phase, piece in [(PREFILLED, tokens[:20]), *((DECODED, tokens[i : i + 1]) for i in range(20, 29))]:
                assert (engine.feed(piece, phase, logits=wanted) is None) is not wanted
            last = np.array(engine.feed(tokens[29:], DECODED))
            found.append((engine.take(), last))
    (record, last), (again, after) = found
    np.testing.assert_array_equal(last, after)
    for name in ("ids", "weights", "margin"):
        np.testing.assert_array_equal(getattr(record, name), getattr(again, name))


# ---------------------------------------------------------------- killed


def test_a_capture_killed_at_any_moment_leaves_whole_records_and_resumes_to_the_same_digest(world, captured, tmp_path):
    rng = random.Random()
    support = str(Path(flywheel_world.__file__).parent)
    environment = {**os.environ, "MOELAB_ARTIFACTS": str(tmp_path), "PYTHONPATH": support}
    code = f"import flywheel_world; flywheel_world.capture_job({str(world.root)!r})"
    seen = 0
    for least in (1, 6):
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(tmp_path.glob("observations/*.partial/*.age"))) < seen + least:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
        with world.entered(tmp_path):
            (partial,) = tmp_path.glob("observations/*.partial")
            done = written(partial, Vault())  # each opens, and passes every check of a reader
        assert seen + least <= len(done) < 30 and not (partial / "manifest.json").exists()
        seen = len(done)
    with world.entered(tmp_path):
        before = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.age")}
        built = artifacts.open_artifact(capture_model(world.model, world.capture_options()))
    expected = artifacts.open_artifact(captured)
    assert built.content == expected.content and set(built.manifest.files) == set(expected.manifest.files)
    assert {p.name: p.stat().st_mtime_ns for p in built.path.glob("*.age") if p.name in before} == before
    assert not list(built.path.glob(".*")), "nothing half is left lying"


# ---------------------------------------------------------------- sampled turns


def same_question(world_root):
    """Threads that ask the same: only their names tell them apart."""
    lines = [
        flywheel_world.conversation(f"o{i}", f"s{i}", 1, *[("user", "ask"), ("assistant", "say")] * 2) for i in range(4)
    ]
    root = world_root / "same"
    root.mkdir(exist_ok=True)
    flywheel_world.write(root / "threads.jsonl", lines)
    if not (root / "model").exists():
        (root / "model").symlink_to(world_root / "model")
    return str(root)


def test_a_sampled_turn_depends_on_thread_and_turn_alone(world):
    """Turns in another order, after others, and in processes of their own: equal per turn, distinct between."""
    root, names = same_question(world.root), ["s0", "s1", "s2"]
    forward = flywheel_world.sampled_job(root, names, [0, 1, 2])
    assert flywheel_world.sampled_job(root, names, [2, 0, 1]) == forward
    fresh = models.run_workers(
        flywheel_world.sampled_job, [{"root": root, "names": names, "order": order} for order in ([2, 0], [1])]
    )
    assert fresh[0] | fresh[1] == forward
    for top_p in (1.0, 0.9):  # with and without a nucleus
        turns = [turn for (_, p), made in forward.items() if p == top_p for turn in made]
        assert len(turns) == 6 and len({seed for seed, _ in turns}) == 6
        assert len({tuple(tokens) for _, tokens in turns}) == 6, "no two turns drew alike"


def test_nothing_global_decides_or_is_moved(study, threads):
    import mlx.core as mx

    drawn = []
    for seed in (1, 2):
        mx.random.seed(seed)
        before = np.array(mx.random.state[0])
        drawn.append(study.sampler.sample(threads[0])[0].tokens.tolist())
        np.testing.assert_array_equal(np.array(mx.random.state[0]), before)
    assert drawn[0] == drawn[1]


def test_the_nucleus_is_kept(study):
    """Of probabilities .5, .3, .2 a nucleus of .6 keeps two; 1 keeps all."""
    import mlx.core as mx

    logits = mx.log(mx.array([0.5, 0.3, 0.2]))
    for top_p, expected in ((0.6, {0, 1}), (1.0, {0, 1, 2})):
        study.sampler.options = replace(study.options, top_p=top_p, temperature=1.0)
        key, seen = study.sampler._key(0), set()
        for _ in range(60):
            token, key = study.sampler._draw(logits, key)
            seen.add(token)
        assert seen == expected


# ---------------------------------------------------------------- what is captured


def test_speakers_are_training_threads_that_can_answer(records, world, loaded, threads):
    """A thread that ends with a question, or whose first question fills the context, has no answer to give."""
    spoken = [e for e in records.index if e["mode"] == "sampled"]
    assert len(spoken) == 2 and {e["set"] for e in spoken} == {"train"}
    talk = [("user", "a"), ("assistant", "b"), ("user", "c")]
    mute = [("user", "only a question")]
    full = [("user", "x" * 200), ("assistant", "y")]
    path = world.root / "odd.jsonl"
    lines = [flywheel_world.conversation(f"o{i}", f"t{i}", 1, *(mute, full)[i % 2]) for i in range(6)]
    lines.append(flywheel_world.conversation("o9", "fine", 1, *talk))
    flywheel_world.write(path, lines)
    with LiveEngine(loaded) as engine:
        study = Study(loaded, engine, read(path), world.capture_options())
        able = [t.id for t in read(path) if study.sampler.can_answer(t)]
    assert able == ["fine"]


def test_facts_are_the_threads_own_and_in_one_time_zone(loaded, tmp_path):
    message = {"domain": "code", "reasoning": None}
    lines = [
        flywheel_world.conversation("o", "late", 1, ("user", "a"), ("assistant", "b"), **message),
        flywheel_world.conversation("o", "early", 1, ("user", "a"), ("assistant", "b"), lang="de"),
    ]
    for line, ts in zip(lines, ("2026-03-01T20:00:00-05:00", "2026-03-02T00:30:00+09:00"), strict=True):
        for one in line:
            one["ts"] = ts
    late, early = read(flywheel_world.write(tmp_path / "t.jsonl", lines))
    a, b = (capturing.facts(t, loaded.tokenizer, 100) for t in (late, early))
    assert late.started > early.started and a.started > b.started, "texts sort as the times they mean"
    assert (a.domain, a.language, b.language, a.tool_calls, a.reasoning_tokens) == ("code", "en", "de", 0, 0)


def test_which_threads_are_taken_does_not_depend_on_their_order(threads):
    taken = capturing.select(threads, 5)
    assert capturing.select(threads[::-1], 5) == taken and len(taken) == 5
    assert capturing.select(threads, None) == sorted(threads, key=lambda t: t.uid)


def test_one_owner_spelled_two_ways_is_in_one_set(records, threads):
    """`owner 0` and `Owner 0 ` are one person: the split, the index and Gate 2 know one."""
    same = [e for e in records.index if e["name"] in ("c1",) or e["owner"] == "owner 0"]
    assert {e["owner"] for e in same} == {"owner 0"} and {e["name"] for e in same} == {"t0", "t1", "c1"}
    assert len({e["set"] for e in same}) == 1


@pytest.mark.parametrize("spelling", ["Zoë ", "ZOË", "zoe\u0308", " Zoe\u0308"])
def test_spellings_of_an_owner_fall_into_one_set(tmp_path, loaded, spelling):
    import unicodedata

    lines = [flywheel_world.conversation(f"o{i}", f"t{i}", 1, ("user", "a"), ("assistant", "b")) for i in range(8)]
    lines += [flywheel_world.conversation(o, "z" + o, 1, ("user", "a"), ("assistant", "b")) for o in ("zoë", spelling)]
    threads = read(flywheel_world.write(tmp_path / "t.jsonl", lines))
    facts = [capturing.facts(t, loaded.tokenizer, 100) for t in threads]
    assert len({f.owner for f in facts}) == 9 and facts[-1].owner == unicodedata.normalize("NFC", "zoë")
    for seed in range(20):
        sets = split.assign(facts, seed=seed)
        sides = {sets[f.thread].replace("temporal", "train") for f in facts[-2:]}
        assert len(sides) == 1


def test_forgotten_threads_are_left_out_and_named(world, threads, tmp_path):
    vault = Vault(tmp_path)
    assert capturing.living(threads, vault) == (threads, [])
    vault.destroy(threads[3].uid)
    alive, gone = capturing.living(threads, vault)
    assert gone == [threads[3].uid] and len(alive) == len(threads) - 1 and threads[3] not in alive
    with pytest.raises(VaultError):
        vault.key(threads[3].uid, create=True)


def test_no_thread_long_enough_for_the_edges(world, loaded, threads):
    with LiveEngine(loaded) as engine:
        study = Study(loaded, engine, threads, world.capture_options(chunk=95))
        with pytest.raises(RecordError, match="long enough for the edge sequences"):
            study.plans()


def test_a_machine_that_computes_wrongly_captures_nothing(world, monkeypatch, tmp_path):
    """The known answers come first."""
    from moelab.errors import IdentityError

    def wrong(_):
        raise IdentityError("this machine does not give the known answer")

    monkeypatch.setattr(models, "self_test", wrong)
    with world.entered(tmp_path), pytest.raises(IdentityError):
        capture_model(world.model, world.capture_options())
    assert not list(tmp_path.rglob("*.age"))


# ---------------------------------------------------------------- records


def test_capture_again_is_no_work(captured, world, monkeypatch):
    monkeypatch.setattr(Study, "write", lambda *_: pytest.fail("captured again"))
    assert capture_model(world.model, world.capture_options()) == captured


def test_measuring_the_cost_is_no_part_of_the_identity(world):
    options = world.capture_options()
    assert "cost_steps" not in options.recorded() and options.recorded()["context"] == flywheel_world.CONTEXT
    assert world.capture_options(cost_steps=99).recorded() == options.recorded()


def test_the_runtime_holdout_opens_for_evaluation_only(records, loaded):
    from moelab.errors import OwnershipError

    held = [e for e in records.index if e["set"] == "runtime"]
    assert held and records.holdout == {e["payload"] for e in held}
    assert {e["set"] for e in records.replayable()} == {"train", "validation", "temporal", "stress"}
    for purpose in ("replay", "train"):
        disguised = {**held[0], "set": "train"}  # by digest, whatever the entry says
        with pytest.raises(OwnershipError, match="the runtime holdout is never replayed") as caught:
            list(records.open([disguised], loaded, purpose=purpose))
        assert (caught.value.field, caught.value.got, caught.value.expected) == ("payload", purpose, "evaluate")
    (opened,) = records.open(held[:1], loaded, purpose="evaluate")
    assert opened.header.authorisation.purposes == ("evaluate",)


def test_a_grant_that_ended_is_refused(records, loaded, monkeypatch):
    from datetime import date

    from moelab.errors import OwnershipError

    class Later(date):
        @classmethod
        def today(cls):
            return date(2031, 1, 1)

    monkeypatch.setattr(observations, "date", Later)
    with pytest.raises(OwnershipError, match="kept longer than allowed"):
        list(records.open(records.replayable()[:1], loaded, purpose="replay"))


def test_records_of_another_model_are_refused(records, world):
    from moelab.errors import MoelabError

    other = models.load(world.sigmoid)
    with pytest.raises(MoelabError) as caught:
        next(records.open(records.replayable()[:1], other, purpose="replay"))
    assert caught.value.field == "model"
