"""Replay as prefill: known token sequences pushed through the model in padded, chunked batches.

A causal layer's row `i` depends on tokens `0..i` only, so sequences of different lengths can share a
batch if the padding comes after them, and a long batch can be fed in chunks through the cache. Gate 1
does not assume that; it compares the result with what decode gave.

Nothing after the last router is computed: neither its experts nor the output layer has a route in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ContractError

if TYPE_CHECKING:
    from ..models import LoadedModel, TapRecord


@dataclass(frozen=True)
class BatchShape:
    """`tokens`: padded tokens of a batch, at most; `chunk`: positions fed at once."""

    tokens: int = 2048
    chunk: int = 256


def batches(lengths: Sequence[int], limit: int) -> list[np.ndarray]:
    """Indices of each batch, longest sequences first: a function of the lengths alone.

    A batch's padded size (count x longest) stays within `limit`, or holds one sequence.

    Raises:
        ContractError: an empty sequence.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and lengths.min() < 1:
        raise ContractError(
            "an empty sequence cannot be replayed", field=f"lengths[{int(lengths.argmin())}]", got=0, expected=">= 1"
        )
    order = np.lexsort((np.arange(len(lengths)), -lengths))
    out, start = [], 0
    while start < len(order):
        size = max(1, int(limit // lengths[order[start]]))
        out.append(order[start : start + size])
        start += size
    return out


def replay(
    loaded: LoadedModel, sequences: Sequence[np.ndarray], shape: BatchShape, *, features: Iterable[str] = ()
) -> Iterator[tuple[int, TapRecord]]:
    """Yield `(index, record)` for every sequence i32[T], in batch order; record arrays are [T, …].

    `ids u16[T,L,K]`, `weights f32[T,L,K]`, `margin f32[T,L]`, `features` name → `f32[T,L,H]`.
    """
    import mlx.core as mx

    for batch in batches([len(s) for s in sequences], shape.tokens):
        longest = max(len(sequences[i]) for i in batch)
        padded = np.zeros((len(batch), longest), np.int32)
        for row, index in enumerate(batch):
            padded[row, : len(sequences[index])] = sequences[index]
        cache = loaded.make_cache()
        with loaded.tap(features) as tap:  # off while the caller has the records: it may run the model itself
            for start in range(0, longest, shape.chunk):
                loaded.model(mx.array(padded[:, start : start + shape.chunk]), cache=cache)
                mx.eval(*tap.pending(), [layer.state for layer in cache])
            record = tap.take()
        for row, index in enumerate(batch):
            yield int(index), _row(record, row, len(sequences[index]))


def _row(record: TapRecord, row: int, length: int) -> TapRecord:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    cut = {name: value[row, :length] for name, value in values.items() if isinstance(value, np.ndarray)}
    cut["features"] = {name: value[row, :length] for name, value in record.features.items()}
    return type(record)(**{**values, **cut})
