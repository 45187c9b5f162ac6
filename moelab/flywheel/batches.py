"""Replay as prefill: known token sequences pushed through the model in padded, chunked batches.

A causal layer's row `i` depends on tokens `0..i` only, so sequences of different lengths can share a
batch if the padding comes after them, and a long batch can be fed in chunks through the cache. Gate 1
does not assume that; it compares the result with what decode gave.

A resident model is replayed batch after batch, and nothing after the last router is computed: neither its experts
nor the output layer has a route in it. A streamed model is replayed layer by layer (`streaming.layerwise`): the
passes of a whole *group* of batches are built first, then each layer's experts are read once for all of them.
The operations are the same in both, so are the results.

Between two layers a group keeps, for each padded token, the residual stream, the K outputs of the switch layer,
and what the taps noted; attention caches of one layer at a time, since nothing but the passes holds them.
`kept_bytes` bounds that. Sequences beyond what the memory budget leaves form another group, which reads the
model again; a batch that alone is too much goes through in pieces, each of which does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ContractError

if TYPE_CHECKING:
    from ..models import LoadedModel, MoEGeometry, Tap, TapRecord

GRAPH_BYTES = 128 << 10
"""Host memory of the operations of one chunk in one layer, while they wait; 40 to 100 KiB were measured."""


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


def kept_bytes(geometry: MoEGeometry, tokens: int, chunks: int, features: Iterable[str] = ()) -> int:
    """Bytes that a batch of `tokens` padded tokens in `chunks` keeps between two layers, at most.

    A token, in 4-byte numbers: 2·E a layer (the gate's output, and the ids, a view of E), H a layer for each
    feature (and for the gate's input, which some families note anyway), K·H out of the switch layer, and 4·H for
    the residual stream, the block input, and keys and values of one layer (no family has more than 2·H of these).
    """
    L, E, K, H = geometry.layers, geometry.experts, geometry.top_k, geometry.hidden
    row = L * (2 * E + len({"moe_input", *features}) * H) + (K + 4) * H
    return 4 * tokens * row + GRAPH_BYTES * chunks * L


def groups(costs: Sequence[int], room: int) -> list[slice]:
    """Consecutive batches that together keep at most `room` bytes; one that alone keeps more is a group of its own."""
    out, start, total = [], 0, 0
    for index, cost in enumerate(costs):
        if index > start and total + cost > room:
            out.append(slice(start, index))
            start, total = index, 0
        total += cost
    return [*out, slice(start, len(costs))] if len(costs) else []


def replay(
    loaded: LoadedModel, sequences: Sequence[np.ndarray], shape: BatchShape, *, features: Iterable[str] = ()
) -> Iterator[tuple[int, TapRecord]]:
    """Yield `(index, record)` for every sequence i32[T], in batch order; record arrays are [T, …].

    `ids u16[T,L,K]`, `weights f32[T,L,K]`, `margin f32[T,L]`, `features` name → `f32[T,L,H]`.
    """
    features = tuple(features)
    made = batches([len(s) for s in sequences], shape.tokens)
    run = _layer_major if loaded.residency == "streamed" else _batch_by_batch
    for batch, record in run(loaded, made, [_padded(sequences, batch) for batch in made], shape, features):
        for row, index in enumerate(batch):
            yield int(index), _row(record, row, len(sequences[index]))


def _batch_by_batch(loaded, made, padded, shape, features) -> Iterator[tuple[np.ndarray, TapRecord]]:
    import mlx.core as mx

    for batch, tokens in zip(made, padded, strict=True):
        with loaded.tap(features) as tap:  # off while the caller has the records: it may run the model itself
            cache = loaded.make_cache()
            for chunk in _chunks(tokens, shape):
                loaded.model(mx.array(chunk), cache=cache)
                mx.eval(*tap.pending(), [layer.state for layer in cache])
            record = tap.take()
        yield batch, record


def _layer_major(loaded, made, padded, shape, features) -> Iterator[tuple[np.ndarray, TapRecord]]:
    costs = [kept_bytes(loaded.geometry, tokens.size, len(_chunks(tokens, shape)), features) for tokens in padded]
    with loaded.replaying() as (layers, room):
        for group in groups(costs, room):
            if costs[group.start] > room:
                yield made[group.start], _in_pieces(loaded, layers, padded[group.start], shape, features, room)
                continue
            with layers.building():
                # Only the passes hold a cache: a layer's keys and values go when they have been used.
                taps = [_build(loaded, _chunks(t, shape), loaded.make_cache(), features) for t in padded[group]]
            layers.evaluate()
            for batch in made[group]:
                yield batch, taps.pop(0).take()


def _in_pieces(loaded, layers, tokens: np.ndarray, shape: BatchShape, features, room: int) -> TapRecord:
    """One batch `[B,T]` that keeps too much for one reading of the model: some chunks at a time, with its caches kept.

    Raises:
        ContractError: not even one chunk fits (both figures named).
    """
    import mlx.core as mx

    chunks, cache, records = _chunks(tokens, shape), loaded.make_cache(), []
    # Caches grow in steps of 256 positions, and hold all layers now.
    carried = 4 * len(tokens) * -(-tokens.shape[1] // 256) * 256 * 2 * loaded.geometry.hidden * len(loaded.model.layers)
    one = kept_bytes(loaded.geometry, chunks[0].size, 1, features)
    if carried + one > room:
        raise ContractError(
            "the memory budget does not hold one batch of a layer-major replay", field="batch_tokens",
            got=f"{carried + one} bytes kept between layers", expected=f"<= {room} bytes",
            fix="take smaller batches or chunks, fewer features or a larger memory budget",
        )  # fmt: skip
    count = (room - carried) // one
    for start in range(0, len(chunks), count):
        with layers.building():
            tap = _build(loaded, chunks[start : start + count], cache, features)
        layers.evaluate()
        mx.eval([layer.state for layer in cache])
        records.append(tap.take())
    return _joined(records)


def _build(loaded: LoadedModel, chunks: list[np.ndarray], cache: list, features: Iterable[str]) -> Tap:
    """The passes of some chunks, nothing of them evaluated."""
    import mlx.core as mx

    with loaded.tap(features) as tap:
        for chunk in chunks:
            loaded.model(mx.array(chunk), cache=cache)
    return tap


def _joined(records: list[TapRecord]) -> TapRecord:
    """Consecutive parts of one batch, joined along T."""
    parts = [{f.name: getattr(record, f.name) for f in fields(record)} for record in records]
    features = [part.pop("features") for part in parts]
    whole = {k: None if v is None else np.concatenate([part[k] for part in parts], axis=1) for k, v in parts[0].items()}
    joined = {name: np.concatenate([part[name] for part in features], axis=1) for name in features[0]}
    return type(records[0])(**whole, features=joined)


def _chunks(tokens: np.ndarray, shape: BatchShape) -> list[np.ndarray]:
    """`[B,T]` in parts of at most `shape.chunk` positions."""
    return [tokens[:, start : start + shape.chunk] for start in range(0, tokens.shape[1], shape.chunk)]


def _padded(sequences: Sequence[np.ndarray], batch: np.ndarray) -> np.ndarray:
    """`i32[B,T]`: the sequences of a batch, zeros behind their ends."""
    out = np.zeros((len(batch), max(len(sequences[i]) for i in batch)), np.int32)
    for row, index in enumerate(batch):
        out[row, : len(sequences[index])] = sequences[index]
    return out


def _row(record: TapRecord, row: int, length: int) -> TapRecord:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    cut = {name: value[row, :length] for name, value in values.items() if isinstance(value, np.ndarray)}
    cut["features"] = {name: value[row, :length] for name, value in record.features.items()}
    return type(record)(**{**values, **cut})
