"""From a thread to the sequences a model is fed, and to knowing which of their tokens are answers.

Ids are carried, never made again: what was fed stays a prefix for ever, and an answer joins it as the
ids that were sampled, whatever its text would encode to. Where a chat template rewrites history, so
that the next prompt does not extend what was fed, a new sequence is begun and `Rendered.began` says why.

`T` tokens, `M` messages, `A` answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moelab.errors import RecordError

from .chat import ChatWriter
from .records import ROLES, Thread
from .template import Codec, HouseWriter, Parts


@dataclass(frozen=True, kw_only=True, eq=False)
class Rendered:
    """One sequence of a thread, ready to be fed.

    Attributes:
        token_ids: `i32[T]`.
        message_start: `i32[M]` where each message begins, from its role token on; the last runs to T.
        role: `u8[M]` index into `ROLES`.
        message: `i32[M]` index into `thread.messages`. Messages that a chat template does not separate
            (a system prompt written into the first question) are one entry, the later one.
        answer: `i32[A,2]` half-open spans of the tokens that the assistant makes in this sequence: after
            its role token, up to and with what closes the message.
        turn: `i32[A]` which of the thread's assistant turns each answer is.
        sequence: 0, 1, … within the thread.
        began: None for sequence 0; else why what was fed before could not be extended.
    """

    token_ids: np.ndarray
    message_start: np.ndarray
    role: np.ndarray
    message: np.ndarray
    answer: np.ndarray
    turn: np.ndarray
    sequence: int = 0
    began: str | None = None

    @property
    def decoded(self) -> np.ndarray:
        """`bool[T]`: True for the tokens of answers, which a forced decode feeds one by one."""
        mask = np.zeros(len(self.token_ids), bool)
        for start, end in self.answer:
            mask[start:end] = True
        return mask

    @property
    def parts(self) -> list[tuple[int, np.ndarray, int]]:
        """`(role, ids i32[n], header)` of each message: the first `header` ids are prompt, never answer."""
        ends = [*self.message_start[1:], len(self.token_ids)]
        answers = {int(self.message_start.searchsorted(start, "right")) - 1: int(start) for start, _ in self.answer}
        return [
            (int(role), self.token_ids[start:end], int(answers.get(index, end) - start))
            for index, (role, start, end) in enumerate(zip(self.role, self.message_start, ends, strict=True))
        ]


class Conversation:
    """A thread rendered turn by turn, for a decode forced along it or one that samples its answers.

        talk = Conversation(thread, tokenizer, mode="forced")
        while (ids := talk.prompt()) is not None:    # to be fed before the next answer
            if talk.fresh:                           # they begin a sequence: start with an empty cache
                ...
            talk.answer(talk.forced())               # or the ids that were sampled and fed
        sequences = talk.finish()

    Raises:
        UnsupportedModelError: the tokenizer has neither the house role tokens nor a chat template.
        RecordError: the chat template refuses the thread, or the thread holds a special token that it
            cannot quote.
    """

    def __init__(self, thread: Thread, tokenizer: Any, *, mode: Literal["forced", "sampled"]):
        if mode not in ("forced", "sampled"):
            raise RecordError("unknown mode", field="mode", got=mode, expected="forced or sampled")
        self.thread = thread
        self._forced = mode == "forced"
        codec = Codec(tokenizer)
        self._writer = HouseWriter(thread, codec) if codec.house else ChatWriter(thread, codec, forced=self._forced)
        self._done: list[Rendered] = []
        self._turn = 0
        self._begin(None)

    @property
    def turn(self) -> int:
        """Number of the turn that is being, or will next be, answered."""
        return self._turn

    @property
    def fresh(self) -> bool:
        """Whether the latest prompt begins a sequence."""
        return self._fresh

    def prompt(self) -> np.ndarray | None:
        """`i32[n]` ids to feed before the next answer; None when the thread has no further turn."""
        if self._turn == len(self.thread.turns):
            return None
        parts, reason = self._writer.prompt(self.thread.turns[self._turn])
        return self._extend(parts, reason)

    def forced(self) -> np.ndarray:
        """`i32[n]` ids of the thread's own answer to the latest prompt."""
        if not self._forced:
            raise RecordError("only a forced conversation has this", field="mode", got="sampled", expected="forced")
        return np.array(self._writer.forced(self.thread.turns[self._turn]), np.int32)

    def answer(self, ids: Sequence[int] | np.ndarray) -> None:
        """Take the ids that were fed as the answer, as they are; none, if the model stopped at once."""
        ids = [int(i) for i in ids]
        self._answers.append((len(self._ids), len(self._ids) + len(ids), self._turn))
        self._ids += ids
        self._writer.answered(self.thread.turns[self._turn], ids)
        self._turn += 1

    def finish(self, *, complete: bool = False) -> list[Rendered]:
        """The sequences that were fed. `complete` adds what follows the last answer, to the end of text.

        The end of text belongs to the last answer where nothing stands between them.
        """
        if complete:
            parts, reason = self._writer.rest()
            before = len(self._ids)
            self._extend(parts, reason)
            if self._answers and self._answers[-1][1] == before and all(message is None for message, _ in parts):
                start, _, turn = self._answers.pop()
                self._answers.append((start, len(self._ids), turn))
        self._close()
        return self._done

    def _begin(self, reason: str | None) -> None:
        self._ids: list[int] = []
        self._starts: list[tuple[int, int]] = []
        self._answers: list[tuple[int, int, int]] = []
        self._reason = reason

    def _extend(self, parts: Parts, reason: str | None) -> np.ndarray:
        if reason is not None:
            self._close()
            self._begin(reason)
        before = len(self._ids)
        self._fresh = before == 0
        for message, ids in parts:
            if message is not None:
                self._starts.append((len(self._ids), message))
            self._ids += ids
        return np.array(self._ids[before:], np.int32)

    def _close(self) -> None:
        if not self._ids:
            return
        roles = [ROLES.index(self.thread.messages[message].role) for _, message in self._starts]
        spans = np.array(self._answers, np.int32).reshape(-1, 3)
        self._done.append(
            Rendered(
                token_ids=np.array(self._ids, np.int32),
                message_start=np.array([start for start, _ in self._starts], np.int32),
                role=np.array(roles, np.uint8),
                message=np.array([message for _, message in self._starts], np.int32),
                answer=spans[:, :2],
                turn=spans[:, 2],
                sequence=len(self._done),
                began=self._reason,
            )
        )
        self._begin(None)


def render_sequences(thread: Thread, tokenizer: Any) -> list[Rendered]:
    """What a decode forced along the thread feeds: one sequence, unless a template rewrites history."""
    talk = Conversation(thread, tokenizer, mode="forced")
    while talk.prompt() is not None:
        talk.answer(talk.forced())
    return talk.finish(complete=True)


def render(thread: Thread, tokenizer: Any) -> Rendered:
    """The one sequence of a thread.

    Raises:
        RecordError: the chat template makes several (`render_sequences` returns them all).
    """
    first, *more = render_sequences(thread, tokenizer)
    if more:
        raise RecordError(
            "the chat template rewrites history",
            field="chat_template",
            got=f"{1 + len(more)} sequences: {more[0].began}",
            expected="one sequence",
            fix="use render_sequences",
        )
    return first
