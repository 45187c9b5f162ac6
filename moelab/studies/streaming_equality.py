"""Is a streamed model the same model? Its greedy tokens and logits against those of the resident one.

The native router decides in both, and every kernel is the same; only where an expert's bytes lie differs. So
the logits must be equal to the last bit, at every budget and wherever the experts are read from, and a request
that follows another must give what it gives alone.

That holds for a BLAS that gives the same bits for any number of rows. A prompt whose experts do not fit the cache at
once is computed in parts, and OpenBLAS rounds a product of fewer rows otherwise. So the study runs under both where
there are two, since equality is a statement about one runtime: bits under the first, and under the second
tokens, with the largest difference of a log-probability beside them.

Shapes: n tokens, V vocabulary. `cycle` is one token's experts, K slots of every layer: the least a cache may be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..models.runtime import active_blas
from ..streaming import EngineOptions, ExpertStore, StreamingEngine

if TYPE_CHECKING:
    from ..models import LoadedModel

__all__ = ["equality", "equality_of", "geometry", "resident_tokens"]

Answer = tuple[list[int], np.ndarray, float]
"""Tokens `[n]`, log-probabilities `f32[n,V]`, seconds a token after the first."""


def geometry(loaded: LoadedModel, stores: Mapping[str, ExpertStore]) -> dict[str, Any]:
    """What is streamed, in bytes; `places` has one row for each place where the experts lie."""
    from mlx.utils import tree_flatten

    layouts = next(iter(stores.values())).layouts
    experts = loaded.geometry.experts * sum(layout.run_bytes for layout in layouts)
    everything = sum(array.nbytes for _, array in tree_flatten(loaded.model.parameters()))
    slots = [layout.slot_bytes for layout in layouts]
    return {
        "layers": loaded.geometry.layers,
        "experts": loaded.geometry.experts,
        "top_k": loaded.geometry.top_k,
        "expert_bytes": max(layout.run_bytes for layout in layouts),
        "all_expert_bytes": experts,
        "other_bytes": everything - experts,
        "cycle_bytes": loaded.geometry.top_k * sum(slots),
        "full_bytes": loaded.geometry.experts * sum(slots),
        "places": [
            {
                "place": place,
                "reader": store.identity["reader"],
                "stored_bytes": store.nbytes(0),
                "tensors": len(store.layouts[0].tensors),
                "types": ", ".join(sorted({t.stored for t in store.layouts[0].tensors})),
                "run": ", ".join(sorted({t.run for t in store.layouts[0].tensors})),
            }
            for place, store in stores.items()
        ],
    }


def resident_tokens(loaded: LoadedModel, prompt: Sequence[int], tokens: int) -> Answer:
    """Greedy answer of the resident model by mlx-lm's own loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(list(prompt)), loaded.model, max_tokens=tokens, prompt_cache=loaded.make_cache())
    return _collected(steps)


def equality(
    loaded: LoadedModel,
    places: Mapping[str, Path],
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    budgets: Sequence[float],
    cycle_bytes: int,
) -> dict[str, Any]:
    """Greedy answers at each budget from each place, against the resident model's.

    Args:
        places: name → folder of the same model, as a checkpoint or a pack.
        prompts: a second one is also asked of the pack after the first, at the smallest budget, with the cache as that
            left it.
        budgets: in token cycles, ascending; a checkpoint in place is asked at the smallest alone.
        cycle_bytes: of one token cycle.

    Returns:
        `resident_s` (seconds a token) and `rows`: `blas`, `place`, `cycles`, `request`, tokens and logits equal of
        `n`, `largest` difference of a log-probability, `seconds` and `read_bytes` a token.
    """
    want = [resident_tokens(loaded, prompt, tokens) for prompt in prompts[:2]]
    rows = []
    for place, path in places.items():
        for budget in budgets if place == "pack" else budgets[:1]:
            options = EngineOptions(cache_bytes=round(budget * cycle_bytes), precision=loaded.precision)
            with StreamingEngine.load(path, options) as engine:
                again = len(want) > 1 and place == "pack" and budget == min(budgets)
                for number, request in enumerate(["first", "second"][: 1 + again]):
                    before = engine.store.payload_bytes
                    got = _collected(engine.stream_tokens(list(prompts[number]), max_tokens=tokens))
                    rows.append(
                        {
                            "blas": active_blas(),
                            "place": place,
                            "cycles": budget,
                            "budget": engine.cache.budget,
                            "request": request,
                            **_compared(got, want[number]),
                            "seconds": got[2],
                            "read_bytes": (engine.store.payload_bytes - before) / tokens,
                        }
                    )
    return {"resident_s": want[0][2], "rows": rows}


def equality_of(*, model: Path, precision: str, **figures: Any) -> dict[str, Any]:
    """`equality` of a model by its folder, in a process whose BLAS is another."""
    from ..models import load

    return equality(load(model, precision=precision), **figures)


def _collected(steps) -> Answer:
    tokens, rows, stamps = [], [], []
    for token, logprobs in steps:
        tokens.append(int(token))
        rows.append(np.array(logprobs, np.float32))
        stamps.append(time.perf_counter())
    return tokens, np.stack(rows), (stamps[-1] - stamps[0]) / max(len(stamps) - 1, 1)


def _compared(got: Answer, want: Answer) -> dict[str, Any]:
    """How many tokens and how many rows of logits are equal, bit for bit, and the largest difference in them."""
    bits = [answer[1].view(np.uint32) for answer in (got, want)]
    return {
        "tokens_equal": sum(a == b for a, b in zip(got[0], want[0], strict=True)),
        "logits_equal": int((bits[0] == bits[1]).all(-1).sum()),
        "largest": float(np.nanmax(np.abs(got[1] - want[1]))) if got[0] == want[0] else None,
        "n": len(want[0]),
    }
