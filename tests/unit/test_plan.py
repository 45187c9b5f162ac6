"""What a capture feeds: phases, pieces, cuts and edges."""

import numpy as np
import pytest

from moelab.errors import ContractError
from moelab.flywheel import plan as plans
from moelab.routes import DECODED, PREFILLED
from moelab.threads import Rendered


def rendered(length=30, answers=((6, 10), (18, 30)), **changes):
    fields = dict(
        token_ids=np.arange(100, 100 + length, dtype=np.int32),
        message_start=np.array([0, 5, 12, 17], np.int32),
        role=np.array([1, 2, 1, 2], np.uint8),
        message=np.arange(4, dtype=np.int32),
        answer=np.array(answers, np.int32),
        turn=np.arange(len(answers), dtype=np.int32),
    )
    return Rendered(**fields | changes)


def forced(context=100, decode=True, **changes):
    return plans.forced(rendered(**changes), thread="t", owner="o", context=context, decode=decode)


def test_answers_are_decoded_and_everything_else_is_prefilled():
    plan = forced()
    expected = [DECODED if 6 <= i < 10 or i >= 18 else PREFILLED for i in range(30)]
    assert plan.phase.tolist() == expected and plan.decoded == 16 and plan.beyond == 0
    assert [(t.index, t.start, t.end, t.seed) for t in plan.turns] == [(0, 6, 10, None), (1, 18, 30, None)]
    assert plan.sequence == "forced-0" and plan.began is None


def test_without_decode_all_is_prompt():
    plan = forced(decode=False)
    assert plan.decoded == 0 and plan.turns == () and plan.message_start.tolist() == [0, 5, 12, 17]


@pytest.mark.parametrize(
    "context, turns, starts",
    [(30, [(6, 10), (18, 30)], 4), (20, [(6, 10), (18, 20)], 4), (18, [(6, 10)], 4), (6, [], 2), (5, [], 1)],
)
def test_the_cut_counts_what_lies_beyond(context, turns, starts):
    plan = forced(context)
    assert len(plan.tokens) == len(plan.phase) == context and plan.beyond == 30 - context
    assert [(t.start, t.end) for t in plan.turns] == turns
    assert len(plan.message_start) == len(plan.role) == starts and plan.message_start.max() < context


def test_why_a_sequence_began_is_carried():
    plan = forced(sequence=2, began="the template rewrote history")
    assert plan.sequence == "forced-2" and plan.began == "the template rewrote history"


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 100])
def test_pieces_are_the_tokens_in_order_prompts_in_chunks_answers_one_by_one(chunk):
    plan = forced()
    pieces = list(plan.pieces(chunk))
    assert np.concatenate([tokens for _, tokens in pieces]).tolist() == plan.tokens.tolist()
    phases = [phase for phase, tokens in pieces for _ in tokens]
    assert phases == plan.phase.tolist()
    for phase, tokens in pieces:
        assert 1 <= len(tokens) <= (chunk if phase == PREFILLED else 1)
    # no piece is smaller than it must be: 6 + 8 prompt tokens in runs of their own, 16 steps
    assert len(pieces) == -(-6 // chunk) + -(-8 // chunk) + 16


def test_edges_have_the_awkward_lengths():
    source = forced()
    made = {p.sequence: p for p in plans.edges(source, chunk=8, steps=4, end_of_text=7)}
    assert sorted(made) == [
        "edge-end-of-text", "edge-prompt-1", "edge-prompt-2", "edge-prompt-7", "edge-prompt-8", "edge-prompt-9",
    ]  # fmt: skip
    for prompt in (1, 2, 7, 8, 9):
        plan = made[f"edge-prompt-{prompt}"]
        assert plan.phase.tolist() == [PREFILLED] * prompt + [DECODED] * 4
        assert plan.tokens.tolist() == source.tokens[: prompt + 4].tolist()
    ended = made["edge-end-of-text"]
    at = np.flatnonzero(ended.tokens == 7).tolist()
    assert at == [10] and ended.phase[9:12].tolist() == [DECODED] * 3, "in mid-turn, with decoded tokens around it"
    assert 7 not in source.tokens, "the text itself is not touched"


def test_edges_of_a_chunk_of_two_repeat_no_length():
    names = [p.sequence for p in plans.edges(forced(), chunk=2, steps=2, end_of_text=0)]
    assert names == ["edge-prompt-1", "edge-prompt-2", "edge-prompt-3", "edge-end-of-text"]


def test_edges_need_enough_text():
    with pytest.raises(ContractError, match="too short") as caught:
        plans.edges(forced(12), chunk=8, steps=4, end_of_text=7)
    assert (caught.value.field, caught.value.got, caught.value.expected) == ("tokens", 12, ">= 13")


def test_a_seed_is_a_function_of_thread_and_turn():
    seeds = {(s, t, n): plans.turn_seed(s, t, n) for s in (0, 1) for t in ("a", "b") for n in (0, 1, 11)}
    assert len(set(seeds.values())) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds.values())
    assert plans.turn_seed(0, "a", 1) == seeds[0, "a", 1]
