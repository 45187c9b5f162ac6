"""What a capture feeds to the model, decided before any model runs.

A plan is a token sequence and, for every token, how it is fed: prefilled with its neighbours or decoded
alone. *Forced* plans decode a thread's own assistant turns; *edge* plans put a decode where
implementations go wrong: after prompts of one token, two, a chunk, a chunk plus or minus one, and across
an end-of-text token in mid-turn. (Turns that the model writes itself cannot be planned; `capture` samples
them turn by turn.)

Ids come from the renderer once and are carried: nothing here encodes text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..artifacts import digest_json
from ..errors import ContractError
from ..routes import DECODED, PREFILLED
from ..threads import Rendered
from .observe import Turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """One sequence.

    Attributes:
        sequence: name within thread and generation. `thread`: `Thread.uid`. `owner`: normalised.
        tokens: `i32[T]`. phase: `u8[T]`, `PREFILLED` or `DECODED`.
        message_start: `i32[M]`; role: `u8[M]`; turns: answers inside the sequence.
        beyond: tokens of the thread that did not fit the context.
        began: why the sequence does not continue an earlier one, or None.
    """

    sequence: str
    thread: str
    owner: str
    tokens: np.ndarray
    phase: np.ndarray
    message_start: np.ndarray
    role: np.ndarray
    turns: tuple[Turn, ...] = ()
    beyond: int = 0
    began: str | None = None

    @property
    def decoded(self) -> int:
        return int((self.phase == DECODED).sum())

    def pieces(self, chunk: int) -> Iterator[tuple[int, np.ndarray]]:
        """`(phase, tokens)` in feeding order: prompts in chunks of at most `chunk`, decoded tokens one by one."""
        edges = np.flatnonzero(np.diff(self.phase)) + 1
        for run in np.split(np.arange(len(self.tokens)), edges):
            phase = int(self.phase[run[0]])
            size = chunk if phase == PREFILLED else 1
            for start in range(run[0], run[-1] + 1, size):
                yield phase, self.tokens[start : min(start + size, run[-1] + 1)]


def turn_seed(seed: int, thread: str, turn: int) -> int:
    """Seed of one sampled turn: a function of thread and turn only, so captures may run in any order."""
    return int(digest_json([seed, thread, turn])[:8], 16)


def forced(rendered: Rendered, *, thread: str, owner: str, context: int, decode: bool) -> Plan:
    """A rendered thread, cut at `context` tokens. With `decode`, its answers are decoded, else prefilled."""
    length = min(context, len(rendered.token_ids))
    phase = np.where(rendered.decoded[:length] & decode, DECODED, PREFILLED).astype(np.uint8)
    kept = rendered.message_start < length
    turns = tuple(
        Turn(index=int(turn), start=int(start), end=min(int(end), length))
        for turn, (start, end) in zip(rendered.turn, rendered.answer, strict=True)
        if decode and start < length
    )
    return Plan(
        sequence=f"forced-{rendered.sequence}",
        thread=thread,
        owner=owner,
        tokens=rendered.token_ids[:length],
        phase=phase,
        message_start=rendered.message_start[kept],
        role=rendered.role[kept],
        turns=turns,
        beyond=len(rendered.token_ids) - length,
        began=rendered.began,
    )


def edges(plan: Plan, *, chunk: int, steps: int, end_of_text: int) -> list[Plan]:
    """Edge sequences over the text of a plan.

    Raises:
        ContractError: the plan is shorter than `chunk + 1 + steps`.
    """
    if len(plan.tokens) < chunk + 1 + steps:
        raise ContractError(
            "text too short for the edge sequences",
            field="tokens",
            got=len(plan.tokens),
            expected=f">= {chunk + 1 + steps}",
        )
    made = [
        _edge(plan, f"prompt-{prompt}", prompt, plan.tokens[: prompt + steps])
        for prompt in sorted({1, 2, max(1, chunk - 1), chunk, chunk + 1})
    ]
    ended = plan.tokens[: chunk + steps].copy()
    ended[chunk + steps // 2] = end_of_text
    return [*made, _edge(plan, "end-of-text", chunk, ended)]


def _edge(plan: Plan, name: str, prompt: int, tokens: np.ndarray) -> Plan:
    kept = plan.message_start < len(tokens)
    return Plan(
        sequence=f"edge-{name}",
        thread=plan.thread,
        owner=plan.owner,
        tokens=tokens,
        phase=np.where(np.arange(len(tokens)) < prompt, PREFILLED, DECODED).astype(np.uint8),
        message_start=plan.message_start[kept],
        role=plan.role[kept],
    )
