"""The studies of notebook 80 on a tiny random model: figures agree with each other and with their bounds."""

import numpy as np
import pytest

from moelab import models
from moelab.errors import ContractError, ParameterError, RecordError, StoreError
from moelab.flywheel.residency import Visits, replay
from moelab.models import tiny
from moelab.pages import aligned
from moelab.routes import DECODED, PREFILLED, Routes
from moelab.streaming import ExpertStore, Passes, open_store, write_pack
from moelab.streaming.store.checkpoint import CheckpointSource
from moelab.streaming.store.pack import PackSource
from moelab.studies import streaming_claims, streaming_rates, streaming_reads, streaming_stand_in, streaming_study
from moelab.studies.streaming_study import StreamingOptions

OPTIONS = StreamingOptions(
    prompt=12, tokens=10, made_up_mb=[1], reads=12, read_repeats=2, disk_seconds=0.01, budgets=[0.3, 0.6],
    policies=["lru", "recent-lfu"], ratios=[1.0], overlap_tokens=6, overlap_repeats=2, memory_tokens=4,
)  # fmt: skip
PROMPTS = [list(range(20, 32)), list(range(60, 72))]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3_moe", folder, seed=1)
    return models.load(folder)


def made_up(geometry, tokens=40, threads=4, prompt=4):
    rng = np.random.default_rng(0)
    shape = (tokens, geometry.layers, geometry.experts)
    ids = rng.random(shape).argsort(-1)[..., : geometry.top_k].astype(np.uint16)
    position = np.arange(tokens) % (tokens // threads)
    return Routes(
        ids=ids, weights=None, margin=None, phase=np.where(position < prompt, PREFILLED, DECODED).astype(np.uint8),
        thread=(np.arange(tokens) // (tokens // threads)).astype(np.int32), position=position.astype(np.int32),
        experts=geometry.experts, layer_ids=tuple(range(geometry.layers)),
        expert_bytes=np.array(geometry.layer_expert_bytes, np.int64),
    )  # fmt: skip


@pytest.fixture(scope="module")
def figures(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artefact")
    found = streaming_study.study(loaded, made_up(loaded.geometry), PROMPTS, OPTIONS, folder)
    assert not list(folder.iterdir())  # packs are scratch
    return found


def test_sizes_add_up(loaded, figures):
    from mlx.utils import tree_flatten

    sizes = figures["sizes"]
    assert sizes["other_bytes"] + sizes["all_expert_bytes"] == sum(
        array.nbytes for _, array in tree_flatten(loaded.model.parameters())
    )
    assert sizes["other_bytes"] > 0
    assert sizes["full_bytes"] * sizes["top_k"] == sizes["cycle_bytes"] * sizes["experts"]
    assert [place["place"] for place in sizes["places"]] == ["in place", "pack"]


def test_every_answer_is_equal_to_the_last_bit(figures):
    rows = figures["equality"]["rows"]
    # in place at the smallest budget alone; the pack at two, and a second request at the smallest
    assert len(rows) == 1 + 3
    assert all(row["tokens_equal"] == row["logits_equal"] == row["n"] == OPTIONS.tokens for row in rows)
    packed = [row for row in rows if row["place"] == "pack"]
    smaller, larger = (next(r for r in packed if r["cycles"] == c) for c in sorted({r["cycles"] for r in rows}))
    assert smaller["read_bytes"] >= larger["read_bytes"] > 0


def test_a_wrong_token_would_be_seen(loaded):
    from moelab.studies.streaming_equality import _compared, resident_tokens

    want = resident_tokens(loaded, PROMPTS[0], 4)
    logits = want[1].copy()
    logits[2, 5] = np.nextafter(logits[2, 5], np.float32(np.inf))
    found = _compared((want[0], logits, 0.0), want)
    assert (found["tokens_equal"], found["logits_equal"], found["n"]) == (4, 3, 4)
    assert 0 < found["largest"] < 1e-5  # one unit in the last place of a log-probability
    other = [want[0][0] + 1, *want[0][1:]]
    found = _compared((other, want[1], 0.0), want)
    assert found["tokens_equal"] == 3 and found["largest"] is None  # what follows is of another text


def test_the_probe_reads_what_the_store_reads(loaded, tmp_path):
    write_pack(loaded.path, tmp_path / "pack", precision="float32")
    source = PackSource(tmp_path / "pack", "float32")
    probe = streaming_rates.RawProbe(source)
    with open_store(tmp_path / "pack") as store:
        size = store.layouts[1].slot_bytes
        ours, theirs = aligned(size), aligned(size)
        for expert in (0, store.experts - 1):
            asked = store.read_into(1, expert, theirs)
            probe.read(1, expert, ours)
            np.testing.assert_array_equal(ours, theirs)
            assert sum(read.length for read in probe.plan(1, expert)) == asked
    probe.close()


def test_a_cut_file_stops_the_probe(loaded, tmp_path):
    write_pack(loaded.path, tmp_path / "pack", precision="float32")
    source = PackSource(tmp_path / "pack", "float32")
    probe = streaming_rates.RawProbe(source)
    source.files[0].write_bytes(b"")
    with pytest.raises(StoreError, match="ended early"):
        probe.read(0, 0, np.frombuffer(bytearray(1 << 16), np.uint8))


def test_rates_stand_beside_their_spread(figures):
    rows = figures["reads"]["throughput"]
    assert [(row["place"], row["depth"]) for row in rows] == [
        (place, depth) for place in ("in place", "pack") for depth in OPTIONS.depths
    ]
    for row in rows:
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert row["direct"] == (row["place"] == "pack")  # tensors of a few kilobytes are copied to their place
        assert (row["filled"] is None) == (row["direct"] == 1) and (row["filled"] or 1) > 0
        assert row["raw"] > 0 and row["store"] > 0 and row["n"] == OPTIONS.read_repeats


def test_a_probe_that_copies_and_converts_fills_the_slots_of_the_store(tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=1)
    for precision in ("float16", "stored"):
        source = CheckpointSource(tmp_path, precision)
        probe = streaming_rates.RawProbe(source)
        with ExpertStore(source) as store:
            slots = [aligned(store.layouts[1].slot_bytes) for _ in range(2)]
            for expert in (0, store.experts - 1):
                store.read_into(1, expert, slots[0])
                probe.fill(1, expert, slots[1])
                for ours, theirs in zip(*(store.layouts[1].arrays(slot).values() for slot in slots), strict=True):
                    np.testing.assert_array_equal(ours, theirs)
        probe.close()


def test_amplification_is_at_least_one(figures):
    rows = figures["reads"]["amplification"]
    assert {(row["place"], row["reader"] == "mmap") for row in rows} == {
        (place, mapped) for place in ("in place", "pack") for mapped in (False, True)
    }
    assert all(row["asked"] >= 1 for row in rows)


def test_bytes_through_the_real_cache_are_those_of_the_replay(loaded, tmp_path):
    write_pack(loaded.path, tmp_path / "pack", precision="float32")
    routes = made_up(loaded.geometry, prompt=1)  # a visit that fits: then cache and replay agree to the read
    with open_store(tmp_path / "pack") as store:
        slots = np.array([layout.slot_bytes for layout in store.layouts], np.int64)
        budget = int(slots.sum()) * (loaded.geometry.top_k + 1)
        read, cold = streaming_reads.replay_through(store, routes, budget=budget, name="lru")
        visits = Visits.of(routes.ids, routes.experts, routes.thread, prefilled=routes.phase == PREFILLED)
        want = replay(visits, slots, budget=budget)
        np.testing.assert_array_equal(read, want.read_bytes // slots[0] * store.nbytes(0))
        assert read.sum() == store.payload_bytes
        assert 0 <= cold <= read.sum()


def test_rows_are_booked_where_passes_begin():
    phase = np.array([0, 0, 1, 1, 0, 0, 1], np.uint8)
    thread = np.array([0, 0, 0, 0, 1, 1, 1])
    routes = Routes(
        ids=np.zeros((7, 1, 1), np.uint16), weights=None, margin=None, phase=phase, thread=thread.astype(np.int32),
        position=np.arange(7, dtype=np.int32), experts=2, layer_ids=(0,), expert_bytes=np.ones(1, np.int64),
    )  # fmt: skip
    rows = streaming_reads._first_rows(routes)
    assert rows.tolist() == [0, 2, 3, 4, 6]
    assert len(rows) == len(Passes.of(routes.ids, experts=2, thread=thread, phase=phase))


def test_policies_stand_between_opt_and_everything(figures):
    cache = figures["cache"]
    assert len(cache["rows"]) == len(OPTIONS.budgets) * len(OPTIONS.policies)
    for row in cache["rows"]:
        assert 0 <= row["cold"] <= row["opt"] <= row["value"] <= cache["demand_bytes"]
        assert row["less"] == pytest.approx(row["value"] - row["lru"])
        assert row["n"] == cache["tokens"] == 24
    lru = [row["value"] for row in cache["rows"] if row["policy"] == "lru"]
    assert lru == sorted(lru, reverse=True)


def test_overlap_rows_stand_between_bound_and_sum(figures):
    found = figures["overlap"]
    rows = {row["arm"]: row for row in found["rows"]}
    off = rows["off"]
    assert off["share"] is None and off["simulated_share"] is None
    assert off["io"] == pytest.approx(off["nbytes"] / off["bytes_per_s"], rel=0.5)  # the first token is not in both
    for row in rows.values():
        assert row["least"] <= row["seconds"] <= row["greatest"]
        assert row["n"] == streaming_stand_in.SHORT * OPTIONS.overlap_repeats
        assert row["simulated_bound"] <= row["simulated"] * 1.5
    # the machine may be slow, but the declared disk is never faster than it says
    assert off["greatest"] >= off["nbytes"] / off["bytes_per_s"]
    # the oracle reads nothing that off would not read, but for its own evictions
    assert rows["in_forward, 1 layer ahead"]["simulated_share"] > rows["step_boundary"]["simulated_share"]


def test_the_picture_is_one_token_in_order(figures):
    rows = figures["overlap"]["picture"]
    assert {row["arm"] for row in rows} == {"off", "in_forward, 1 layer ahead"}
    for row in rows:
        assert row["issue"] <= row["ready"] <= row["consume"]
    off = [row for row in rows if row["arm"] == "off"]
    assert off[0]["issue"] == 0.0
    assert [row["layer"] for row in off] == list(range(figures["sizes"]["layers"]))
    assert all(a["consume"] == pytest.approx(b["issue"]) for a, b in zip(off, off[1:], strict=False))


def test_memory_is_watched_in_a_process_of_its_own(figures):
    memory = figures["memory"]
    assert memory["base"] < memory["peak"]
    assert memory["high_water"] is None or memory["high_water"] >= memory["peak"] * 0.99
    assert memory["cache"] <= memory["budget"] - memory["base"] - (OPTIONS.reserve_mb << 20)
    assert memory["tokens"] == 2 * OPTIONS.memory_tokens and memory["looks"] > 5
    assert memory["imports"] < 130 << 20  # without torch, which alone would be more than that
    assert 0 <= memory["shared"] <= 1


def test_claims_follow_their_figures(figures):
    rows = {row["claim"]: row for row in figures["claims"]}
    assert rows["a second request equals the same request cold, bit for bit"]["holds"] is True
    assert rows["a second request equals the same request cold, bit for bit"]["n"] == OPTIONS.tokens
    lru = next(row for row in figures["cache"]["rows"] if row["policy"] == "recent-lfu" and row["share"] == 0.3)
    claim = rows["fewer bytes than a global LRU at 0.3 of all experts, by the default policy, recent-lfu"]
    assert claim["measured"] == lru["value"] / lru["lru"] and claim["holds"] == (lru["less"] < 0)
    assert len(rows) == 2 + 2 * len(OPTIONS.depths) + 1 + len(OPTIONS.budgets) + 4 * len(OPTIONS.ratios) + 2


def test_times_of_the_stand_in_are_judged_by_the_same_claims(tmp_path):
    options = StreamingOptions(
        made_up_mb=[1], reads=8, read_repeats=2, ratios=[1.0], overlap_tokens=4, stand_in_hidden=128
    )
    found = streaming_stand_in.measure(options, tmp_path)
    assert not list(tmp_path.iterdir())  # model and packs are scratch
    rates = found["reads"]["throughput"]
    assert [(row["place"], row["depth"]) for row in rates] == [
        (place, depth) for place in ("pack", "in place", "made up, 1 MiB") for depth in options.depths
    ]
    assert [row["nbytes"] for row in rates] == [found["expert_bytes"]] * 4 + [1 << 20] * 2
    assert [row["arm"] for row in found["overlap"]["rows"]] == list(streaming_stand_in.ARMS)
    assert found["claims"] == streaming_claims.claims(found)
    assert len(found["claims"]) == len(rates) + 4 * len(options.ratios)


def test_a_stand_in_that_cannot_be_quantised_is_refused():
    with pytest.raises(ParameterError, match="stand_in_hidden; got: 192, expected: a multiple of 128"):
        StreamingOptions(stand_in_hidden=192)  # before a kernel starts


def test_a_claim_without_evidence_is_neither_held_nor_broken(figures):
    changed = {**figures, "reads": {**figures["reads"], "amplification": [
        {**row, "device": None} for row in figures["reads"]["amplification"]
    ]}}  # fmt: skip
    wrong = [{**row, "logits_equal": row["n"] - 1} for row in figures["equality"]["rows"]]
    changed["equality"] = {"rows": wrong + [{**row, "blas": "openblas"} for row in wrong]}
    changed["memory"] = {**figures["memory"], "budget": figures["memory"]["peak"] - 1}
    best = [{**row, "policy": "layer-lfu", "less": -1.0} for row in figures["cache"]["rows"]]  # asked of no policy
    changed["cache"] = {**figures["cache"], "rows": best}
    rows = {row["claim"]: row for row in streaming_claims.claims(changed)}
    assert rows["a pack is read without amplification"]["holds"] is None
    assert rows["a second request equals the same request cold, bit for bit"]["holds"] is False
    assert rows["tokens equal the resident model's under OpenBLAS"]["holds"] is True  # its tokens are, its bits not
    assert rows["peak memory ÷ memory budget"]["holds"] is False
    assert rows["fewer bytes than a global LRU by the default policy, recent-lfu"]["holds"] is None


def test_waiting_that_compute_cannot_cover_is_not_asked_for():
    off = {"arm": "off", "ratio": 1.0, "exposed": 12.0, "compute": 8.0, "bound": 10.0}
    other = off | {"ratio": 2.0, "exposed": 99.0}  # reads of 10: two of them stay whatever is predicted
    assert streaming_claims.waiting_hidden([other, off], {"ratio": 1.0, "exposed": 2.0}) == 1.0
    assert streaming_claims.waiting_hidden([other, off], {"ratio": 1.0, "exposed": 3.0}) == 0.9
    assert streaming_claims.waiting_hidden([off | {"exposed": 0.0}], {"ratio": 1.0, "exposed": 0.0}) is None


def test_an_arm_that_changes_the_answer_is_refused(loaded, monkeypatch):
    from moelab.studies import streaming_overlap

    real = streaming_overlap.answer

    def answer(engine, prompt, tokens, issuer=None):
        got = real(engine, prompt, tokens, issuer)
        if issuer is not None:
            got.tokens[-1] += 1
        return got

    monkeypatch.setattr(streaming_overlap, "answer", answer)
    with pytest.raises(ContractError, match="changed the answer"):
        streaming_overlap.overlap(
            loaded.path, PROMPTS[0], tokens=4, repeats=1, ratios=[1.0], cycles=1.0, policy_name="lru", readers=1,
            precision="float32",
        )  # fmt: skip


def test_the_resident_model_is_needed(tmp_path):
    with pytest.raises(ParameterError, match="compared with the resident"):
        streaming_study.streaming_model("softmax@8GiB", OPTIONS, tmp_path)


def test_prompts_are_of_two_owners():
    class Header:
        def __init__(self, owner):
            self.owner = owner

    class Record:
        def __init__(self, owner, n):
            self.header, self.token_ids = Header(owner), np.arange(n)

    records = [Record("a", 9), Record("a", 9), Record("b", 3), Record("c", 9)]
    assert streaming_study.prompts(records, 5) == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(RecordError, match="two owners"):
        streaming_study.prompts(records[:3], 5)


def test_prefixes_end_at_a_decoded_token(loaded):
    routes = made_up(loaded.geometry)  # 4 prompt and 6 decoded tokens a thread
    cut = streaming_study.prefixes(routes, 2, 3)
    assert np.unique(cut.thread).tolist() == [0, 1]
    assert (cut.phase == DECODED).sum() == 6 and cut.tokens == 2 * 7
    assert streaming_study.prefixes(routes, 9, 99).tokens == routes.tokens
