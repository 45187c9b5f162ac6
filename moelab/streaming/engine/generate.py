"""The generate loop of a streamed model: mlx-lm's samplers, caches and responses, and one pass at a time.

mlx-lm's own loop builds the next token's graph while the last one is computed. Under streaming that would
stamp one token's reads into another's time, so this loop evaluates each pass before the next begins. Chunks
are cut where mlx-lm cuts them (all but the last prompt token in steps of `prefill_step_size`, then the
last one alone), so that both run the same shapes and give the same tokens. Under a memory budget the steps may be
shorter: `StreamingEngine.prefill_step` says how long they are, and mlx-lm in those steps gives the same bits.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from ...errors import ParameterError
from ...routes import DECODED
from .footprint import seen_positions

if TYPE_CHECKING:
    from .engine import StreamingEngine

__all__ = ["stream_generate", "stream_tokens"]

NOT_HERE = {
    "kv_bits": "attention caches stay in the precision of the run",
    "kv_group_size": "attention caches are not quantised",
    "quantized_kv_start": "attention caches are not quantised",
    "input_embeddings": "a request is token ids",
    "draft_model": "there is no drafting here",
    "num_draft_tokens": "there is no drafting here",
    "stream": "the engine chooses the stream of its passes",
    "mode": "modes are a prerouter's, `install_prerouter(engine.loaded, spec, engine, mode=...)`",
}
"""Arguments of mlx-lm's that streaming does not have, and why."""


def stream_tokens(
    engine: StreamingEngine,
    prompt: list[int],
    *,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    logits_processors: list[Callable[[mx.array, mx.array], mx.array]] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **others: Any,
) -> Iterator[tuple[int, mx.array]]:
    """Token ids and log-probabilities `[V]`, one decode pass each; arguments as in `mlx_lm.generate_step`.

    What is wrong with the arguments is said at the call; the first token is computed when it is asked for. The request
    is reset then (`StreamingEngine.reset`). `max_tokens=-1` has no end. `prefill_step_size` is what is computed at once
    at most (`StreamingEngine.prefill_step`).

    Raises:
        ParameterError: an empty prompt, ids that are none, or an argument that streaming does not have (`NOT_HERE`).
        ContractError: the reserve of a memory budget does not hold the request; nothing was read.
    """
    for name, value in others.items():
        raise ParameterError(
            f"streaming does not have this: {NOT_HERE[name]}" if name in NOT_HERE else "unknown argument", field=name,
            got=value, expected=KNOWN,
        )  # fmt: skip
    vocabulary = engine.loaded.config.get("vocab_size") or engine.loaded.config.get("text_config", {}).get("vocab_size")
    if not len(prompt):
        raise ParameterError("a prompt has tokens", field="prompt", got=[], expected="at least one token id")
    if vocabulary is not None and not all(0 <= token < vocabulary for token in prompt):
        wrong = next(token for token in prompt if not 0 <= token < vocabulary)
        raise ParameterError("no such token", field="prompt", got=wrong, expected=f"0 to {vocabulary - 1}")
    if type(max_tokens) is not int or max_tokens < -1 or max_tokens == 0:
        raise ParameterError("no such count", field="max_tokens", got=max_tokens, expected="an int >= 1, or -1")
    return _tokens(
        engine, prompt, max_tokens, sampler or greedy_sampler, logits_processors or (), max_kv_size, prompt_cache,
        prefill_step_size, prompt_progress_callback or (lambda *_: None),
    )  # fmt: skip


def _tokens(
    engine: StreamingEngine,
    prompt: list[int],
    max_tokens: int,
    sampler: Callable[[mx.array], mx.array],
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]],
    max_kv_size: int | None,
    prompt_cache: list[Any] | None,
    prefill_step_size: int | None,
    told: Callable[[int, int], None],
) -> Iterator[tuple[int, mx.array]]:
    """`stream_tokens` of arguments that are right."""
    engine.reset()
    cache = make_prompt_cache(engine.loaded.model, max_kv_size) if prompt_cache is None else prompt_cache
    step = engine.prefill_step(len(prompt), max_tokens, most=prefill_step_size, seen=seen_positions(cache))
    tokens, seen = mx.array(prompt), 0
    told(0, len(prompt))
    while len(prompt) - seen > 1:
        piece = tokens[seen : min(seen + step, len(prompt) - 1)]
        engine.prefill(piece[None], cache)
        seen += len(piece)
        told(seen, len(prompt))
        mx.clear_cache()
    history, y, count, ahead = tokens[:seen], tokens[seen:], 0, None
    while count != max_tokens:
        logits = engine.run(y[None], cache, DECODED)[:, -1, :] if ahead is None else ahead
        history = mx.concatenate([history, y])
        for processor in logits_processors:
            logits = processor(history, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        y = sampler(logprobs)
        mx.eval(y, logprobs)
        if count == 0:
            told(len(prompt), len(prompt))
        if prompt_cache is not None:  # the caller goes on with this cache: like mlx-lm's, it holds what was yielded
            ahead = engine.run(y[None], cache, DECODED)[:, -1, :]
        yield y.item(), logprobs[0]
        count += 1


KNOWN = tuple(inspect.signature(stream_tokens).parameters)[2:-1]


def stream_generate(
    engine: StreamingEngine, prompt: str | list[int], *, max_tokens: int = 256, **kwargs: Any
) -> Iterator[GenerationResponse]:
    """Text as it is generated: `mlx_lm.stream_generate` without a draft model.

    Args:
        prompt: text (special tokens added as mlx-lm does) or token ids.
        max_tokens: at most; -1 = until the model ends.
        kwargs: of `stream_tokens`.

    Raises:
        ParameterError: `max_tokens` 0, an empty prompt, or an argument that streaming does not have.
    """
    if max_tokens == 0:
        raise ParameterError("nothing to generate", field="max_tokens", got=0, expected=">= 1, or -1")
    tokenizer = engine.loaded.tokenizer
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=special)
    try:
        prompt = [int(token) for token in prompt]
    except (TypeError, ValueError) as error:
        raise ParameterError(
            "no prompt", field="prompt", got=type(prompt).__name__, expected="text, or token ids"
        ) from error
    stream = stream_tokens(engine, prompt, max_tokens=max_tokens, **kwargs)
    return _responses(tokenizer, stream, len(prompt), max_tokens)


def _responses(
    tokenizer: Any, stream: Iterator[tuple[int, mx.array]], prompt_tokens: int, max_tokens: int
) -> Iterator[GenerationResponse]:
    detokenizer, began, count, token, logprobs = tokenizer.detokenizer, time.perf_counter(), 0, None, None
    prompt_tps = 0.0

    def response(reason: str | None) -> GenerationResponse:
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=count / (time.perf_counter() - began),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
        )

    for token, logprobs in stream:  # noqa: B007  (both are read by `response`)
        count += 1
        if count == 1:
            now = time.perf_counter()
            prompt_tps, began = prompt_tokens / (now - began), now
        if token in tokenizer.eos_token_ids:
            break
        detokenizer.add_token(token)
        if count == max_tokens:
            break
        yield response(None)
    detokenizer.finalize()
    yield response("stop" if token in tokenizer.eos_token_ids else "length")
