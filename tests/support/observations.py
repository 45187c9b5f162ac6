"""Valid observations to break on purpose."""

from dataclasses import replace

import msgspec
import numpy as np

from moelab.artifacts import encode_tensors
from moelab.flywheel.observe import Authorisation, Header, Observation, Turn

L, K, E = 2, 3, 8
RUNTIME = {
    "libraries": {"mlx": "0"},
    "platform": "linux",
    "device": "cpu",
    "precision": "float32",
    "blas": "reference",
    "blas_threads": 1,
    "compile": "fused",
    "residency": "resident",
}


def header(**changes):
    fields = dict(
        model="a" * 64,
        tokenizer="b" * 64,
        template="c" * 64,
        owner="o-001",
        thread="0123456789abcdef",
        generation=0,
        sequence="0",
        turns=(Turn(0, 4, 7), Turn(1, 9, 10)),
        tokens_fed=10,
        layer_ids=(0, 1),
        experts=E,
        top_k=K,
        mode="forced",
        sampling={},
        runtime=RUNTIME,
        machine="runtime",
        authorisation=Authorisation("own writing", ("train", "evaluate"), "2027-01-01"),
    )
    return Header(**fields | changes)


def observation(*, seed=0, first=100, group=False, **changes):
    """T = 10 rows; `changes` go into the header."""
    rng = np.random.default_rng(seed)
    head = header(**changes)
    T = head.tokens_fed
    phase = np.zeros(T, np.uint8)
    for turn in head.turns:
        phase[turn.start : turn.end] = 1
    everyone = np.tile(np.arange(E), (T, L, 1))
    return Observation(
        header=head,
        token_ids=rng.integers(0, 99, T).astype(np.int32),
        phase=phase,
        ordinal=np.arange(T, dtype=np.int64),
        counter=np.arange(first, first + T, dtype=np.uint64),
        wall_ns=rng.integers(0, 2**60, T),
        ids=rng.permuted(everyone, axis=-1)[..., :K].astype(np.uint16),
        weights=rng.uniform(0.1, 1, (T, L, K)).astype(np.float32),
        margin=rng.uniform(0, 1, (T, L)).astype(np.float32),
        group_margin=rng.uniform(0, 1, (T, L)).astype(np.float32) if group else None,
        message_start=np.array([0, 3, 7, 8][: 4 if T == 10 else 1], np.int32),
        role=np.array([1, 2, 1, 2][: 4 if T == 10 else 1], np.uint8),
    )


def change(obs, name, place, value):
    """The observation with one element of one array replaced."""
    array = getattr(obs, name).copy()
    array[place] = value
    return replace(obs, **{name: array})


def forge(obs, *, tensors=None, drop=(), **fields):
    """Bytes of a record that no writer would write, with every seal correct."""
    arrays = {**obs.arrays, **(tensors or {})}
    raw = {**msgspec.to_builtins(obs.sealed().header), **fields}
    return encode_tensors({name: array for name, array in arrays.items() if name not in drop}, raw)
