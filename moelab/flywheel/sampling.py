"""A model writes the assistant's turns of a thread itself, one decoded token after the other.

Each turn has a seed of its own, a function of thread and turn: an answer depends on no other thread, and on no order.
Ids are carried as they were drawn; text that was decoded and encoded again could be other ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import models
from ..routes import DECODED, PREFILLED
from ..threads import Conversation, Rendered, Thread, stop_ids
from . import plan as plans
from .engine import Engine, Tape
from .observe import Turn

if TYPE_CHECKING:
    from .capture import CaptureOptions


class Sampler:
    """A model that answers: turns of at most `options.max_new` tokens, within `options.context`."""

    def __init__(self, loaded: models.LoadedModel, engine: Engine, options: CaptureOptions):
        self.loaded, self.engine, self.options = loaded, engine, options
        self.stops = stop_ids(loaded.tokenizer)

    def can_answer(self, thread: Thread) -> bool:
        """Whether the first question of a thread leaves room for an answer in the context."""
        first = Conversation(thread, self.loaded.tokenizer, mode="sampled").prompt()
        return first is not None and len(first) < self.options.context

    def sample(self, thread: Thread) -> tuple[plans.Plan, Tape, models.TapRecord, tuple[Turn, ...]]:
        """A conversation: the plan that would have fed it, what was fed, its routes, and where the answers are."""
        talk = Conversation(thread, self.loaded.tokenizer, mode="sampled")
        tape, seeds, room = Tape(), {}, self.options.context
        self.engine.start()
        while (prompt := talk.prompt()) is not None:
            # A template that rewrites history would begin a second sequence: the first one is captured.
            if (tape.tokens and talk.fresh) or len(prompt) >= room:
                break
            for start in range(0, len(prompt), self.options.chunk):
                end = start + self.options.chunk
                logits = tape.feed(self.engine, prompt[start:end], PREFILLED, logits=end >= len(prompt))
            seed = seeds[talk.turn] = plans.turn_seed(self.options.seed, thread.uid, talk.turn)
            key, answer = self._key(seed), []
            for _ in range(min(self.options.max_new, room - len(prompt))):
                token, key = self._draw(logits, key)
                if token in self.stops:
                    break
                answer.append(token)
                logits = tape.feed(self.engine, np.array([token], np.int32), DECODED)
            talk.answer(answer)
            room = self.options.context - len(tape.tokens)
        rendered = talk.finish()[0]
        turns = tuple(
            Turn(index=int(turn), start=int(start), end=int(end), seed=seeds[int(turn)])
            for turn, (start, end) in zip(rendered.turn, rendered.answer, strict=True)
        )
        return _plan_of(rendered, thread, tape), tape, self.engine.take(), turns

    @staticmethod
    def _key(seed: int) -> Any:
        import mlx.core as mx

        return mx.random.key(seed)

    def _draw(self, logits: Any, key: Any) -> tuple[int, Any]:
        """One id from the nucleus, and the key of the next draw. Nothing global is read or moved."""
        import mlx.core as mx
        from mlx_lm.sample_utils import apply_top_p

        logprobs = (logits - mx.logsumexp(logits, keepdims=True))[None]
        if self.options.top_p < 1:
            logprobs = apply_top_p(logprobs, self.options.top_p)
        key, draw = mx.random.split(key)
        return int(mx.random.categorical(logprobs[0] / self.options.temperature, key=draw)), key


def _plan_of(rendered: Rendered, thread: Thread, tape: Tape) -> plans.Plan:
    """A sampled conversation as the plan that would have produced it: what was fed, not what was rendered."""
    length = len(tape.tokens)
    kept = rendered.message_start < length
    return plans.Plan(
        sequence="sampled-0",
        thread=thread.uid,
        owner=thread.owner,
        tokens=np.array(tape.tokens, np.int32),
        phase=np.array(tape.phase, np.uint8),
        message_start=rendered.message_start[kept],
        role=rendered.role[kept],
    )
