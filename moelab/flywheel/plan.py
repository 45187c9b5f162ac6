"""What a capture feeds to the model: one plan per thread, before any model runs.

A plan is a list of segments over known text (prefilled or decoded) and of segments still to be sampled.
`forced` decodes the thread's own assistant turns, one cached step at a time; `sampled` lets the model
write them; `edge` sequences put a decode where implementations go wrong: after prompts of one token, two,
a chunk, a chunk plus or minus one, and across an end-of-text token in mid-turn.

A plan never re-encodes text: ids come from the renderer once and are carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..artifacts import digest_json
from ..errors import ContractError

PREFILL, DECODE, SAMPLE = "prefill", "decode", "sample"


@dataclass(frozen=True)
class Segment:
    """`tokens` i32[n] to feed as `how`; for `sample`, no tokens and at most `limit` new ones."""

    how: str
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    limit: int = 0
    turn: int = 0
    role: int = 0
    starts_message: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One sequence to capture. `beyond` counts the thread's tokens that do not fit the context."""

    sequence: str
    thread: str
    owner: str
    mode: str
    segments: tuple[Segment, ...]
    beyond: int = 0

    @property
    def known(self) -> int:
        """Tokens whose ids the plan already knows."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def decoded(self) -> int:
        """Tokens to decode, counting samples at their limit."""
        return sum(len(s.tokens) if s.how == DECODE else s.limit for s in self.segments if s.how != PREFILL)


def turn_seed(seed: int, thread: str, turn: int) -> int:
    """Seed of one sampled turn: a function of thread and turn only, so captures may run in any order."""
    return int(digest_json([seed, thread, turn])[:8], 16)


def follow(
    sequence: str,
    *,
    thread: str,
    owner: str,
    messages: Sequence[tuple[int, np.ndarray, int]],
    mode: str,
    context: int,
    max_new: int = 0,
    decode: bool = True,
) -> Plan:
    """Plan a thread up to `context` tokens.

    Args:
        messages: `(role, token ids i32[n], header)` of each message in order; `header` counts the leading
            tokens that introduce the turn and are always prompt. Assistant bodies are decoded
            (`forced`, when `decode`), sampled (`sampled`), or prefilled like everything else.
    """
    from ..threads import ASSISTANT

    if mode not in ("forced", "sampled"):
        raise ContractError("unknown capture mode", field="mode", got=mode, expected="forced or sampled")
    segments: list[Segment] = []
    room = context
    total = sum(len(ids) for _, ids, _ in messages)
    for turn, (role, ids, header) in enumerate(messages):
        head, body = ids[:header], ids[header:]
        parts = [(PREFILL, head)]
        if role != ASSISTANT or (mode == "forced" and not decode):
            parts = [(PREFILL, ids)]
        elif mode == "forced":
            parts.append((DECODE, body))
        first = True
        for how, tokens in parts:
            if room and len(tokens):
                tokens = np.asarray(tokens[:room], np.int32)
                segments.append(Segment(how, tokens, turn=turn, role=role, starts_message=first))
                room -= len(tokens)
                first = False
        if mode == "sampled" and role == ASSISTANT and room:
            limit = min(max_new, room)
            segments.append(Segment(SAMPLE, limit=limit, turn=turn, role=role))
            room -= limit
    plan = Plan(sequence=sequence, thread=thread, owner=owner, mode=mode, segments=tuple(segments))
    return replace(plan, beyond=max(0, total - plan.known)) if mode == "forced" else plan


def edges(text: np.ndarray, *, thread: str, owner: str, chunk: int, steps: int, end_of_text: int) -> list[Plan]:
    """Sequences over `text` i32 [n ≥ chunk + 1 + steps]: prompts of 1, 2, chunk - 1, chunk, chunk + 1, then `steps`
    decoded tokens; and one with an end-of-text token in the middle of its decoded part."""
    if len(text) < chunk + 1 + steps:
        raise ContractError("text too short for the edge sequences", got=len(text), expected=f">= {chunk + 1 + steps}")
    plans = []
    for prompt in sorted({1, 2, max(1, chunk - 1), chunk, chunk + 1}):
        body = text[prompt : prompt + steps]
        plans.append(_edge(f"prompt-{prompt}", text[:prompt], body, thread, owner))
    body = text[chunk : chunk + steps].copy()
    body[steps // 2] = end_of_text
    plans.append(_edge("end-of-text", text[:chunk], body, thread, owner))
    return plans


def _edge(name: str, prompt: np.ndarray, body: np.ndarray, thread: str, owner: str) -> Plan:
    segments = (
        Segment(PREFILL, np.asarray(prompt, np.int32), starts_message=True),
        Segment(DECODE, np.asarray(body, np.int32)),
    )
    return Plan(sequence=f"{thread}#{name}", thread=thread, owner=owner, mode="edge", segments=segments)
