"""Gate 1's evidence: the routes of a replay held against those of a real decode, row by row.

The comparison is per *runtime identity*: the same libraries, precision and BLAS on both sides. For the
identity of the capture, the decode side is the recorded observation itself; for another identity the
same tokens are decoded again under it. Ordered ids must be equal at every layer; margins at
disagreements are reported beside them and excuse nothing.

Source: AFN-021, "The key equivalence, and where it breaks" and Gate 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..artifacts import read_tensors, write_tensors
from ..errors import ContractError
from ..routes import DECODED, PREFILLED
from .batches import BatchShape, replay
from .engine import Engine, LiveEngine, follow
from .observe import Observation
from .plan import Plan
from .proposals import prefix_digest

if TYPE_CHECKING:
    from ..models import LoadedModel, TapRecord


@dataclass
class Parity:
    """Counts over decoded tokens (`decoded`) and their layer rows (`rows` = decoded x L)."""

    decoded: int = 0
    rows: int = 0
    order_mismatches: int = 0
    set_mismatches: int = 0
    token_mismatches: int = 0
    position_mismatches: int = 0
    prefix_mismatches: int = 0
    weight_error: float = 0.0
    margins: list[float] = field(default_factory=list)
    """Decode-side margins of the rows whose ordered ids differ, smallest first, at most 1,000."""

    @property
    def exact(self) -> bool:
        return not (
            self.order_mismatches
            or self.set_mismatches
            or self.token_mismatches
            or self.position_mismatches
            or self.prefix_mismatches
        )

    def figures(self) -> dict[str, Any]:
        """Everything a table shows, as plain numbers."""
        rows = max(1, self.rows)
        return {
            "decoded_tokens": self.decoded,
            "rows": self.rows,
            "order_mismatches": self.order_mismatches,
            "set_mismatches": self.set_mismatches,
            "token_mismatches": self.token_mismatches,
            "position_mismatches": self.position_mismatches,
            "prefix_mismatches": self.prefix_mismatches,
            "exact_rank_rate": 1 - self.order_mismatches / rows,
            "set_rate": 1 - self.set_mismatches / rows,
            "weight_error": self.weight_error,
            "largest_margin_at_disagreement": max(self.margins, default=None),
        }

    def add(self, decoded: Observation | Decoded, replayed: TapRecord, tokens: np.ndarray) -> None:
        """Compare one sequence. `tokens` are those that the replay was given."""
        rows = decoded.phase == DECODED
        self.decoded += int(rows.sum())
        length = min(len(decoded.token_ids), len(tokens), len(replayed.ids))
        self.position_mismatches += abs(len(decoded.token_ids) - len(replayed.ids))
        self.token_mismatches += int((decoded.token_ids[:length] != tokens[:length]).sum())
        self.prefix_mismatches += sum(
            prefix_digest(decoded.token_ids[:end]) != prefix_digest(tokens[:end]) for end in _accepted_ends(rows)
        )
        rows = rows[:length]
        left, right = decoded.ids[:length][rows], replayed.ids[:length][rows]
        order = (left != right).any(-1)
        self.rows += order.size
        self.order_mismatches += int(order.sum())
        self.set_mismatches += int((np.sort(left, -1) != np.sort(right, -1)).any(-1).sum())
        if (~order).any():
            difference = np.abs(decoded.weights[:length][rows] - replayed.weights[:length][rows])[~order]
            self.weight_error = max(self.weight_error, float(difference.max()))
        self.margins = sorted([*self.margins, *decoded.margin[:length][rows][order].tolist()])[:1000]


@dataclass(frozen=True, eq=False)
class Decoded:
    """A decode made for comparison only: never written, never evidence of anything else."""

    token_ids: np.ndarray
    phase: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    margin: np.ndarray


def _accepted_ends(decoded: np.ndarray) -> list[int]:
    """Where each run of decoded tokens ends: the prefixes that a decode accepted."""
    return [int(i) + 1 for i in np.flatnonzero(decoded & ~np.append(decoded[1:], False))]


def decode_again(engine: Engine, observation: Observation, chunk: int) -> Decoded:
    """Decode a recorded sequence's own tokens in their recorded phases, under this process's identity."""
    plan = Plan(
        sequence=observation.header.sequence,
        thread=observation.header.thread,
        owner=observation.header.owner,
        tokens=observation.token_ids,
        phase=observation.phase,
        message_start=observation.message_start,
        role=observation.role,
    )
    tape, record = follow(engine, plan, chunk)
    return Decoded(
        np.array(tape.tokens, np.int32), np.array(tape.phase, np.uint8), record.ids, record.weights, record.margin
    )


def compare(loaded: LoadedModel, decoded: Sequence[Observation | Decoded], shape: BatchShape) -> Parity:
    """Replay the tokens of `decoded` in batches of `shape` and count every difference."""
    parity = Parity()
    tokens = [item.token_ids for item in decoded]
    for index, record in replay(loaded, tokens, shape):
        parity.add(decoded[index], record, tokens[index])
    return parity


def largest_exact_chunk(
    loaded: LoadedModel, decoded: Sequence[Observation | Decoded], chunks: Sequence[int], limit: int
) -> tuple[int | None, dict[int, int]]:
    """Largest chunk whose replay is exact together with all smaller ones, and order mismatches by chunk."""
    mismatches = {c: compare(loaded, decoded, BatchShape(limit, c)).order_mismatches for c in sorted(chunks)}
    exact = None
    for chunk, count in mismatches.items():
        if count:
            break
        exact = chunk
    return exact, mismatches


DIAGNOSTIC_CAP = 2048
"""Tokens whose features a diagnostic may hold: whole activations are never collected beyond a bounded sample."""


def diagnose(loaded: LoadedModel, tokens: np.ndarray, shape: BatchShape, folder: Path) -> dict[str, Any]:
    """Features of one sequence three ways: live while decoding, by replay, and stored and read back.

    Returns `tokens`, `live_difference` (largest difference of decode and replay, relative to the largest
    feature), `stored_equal` (stored replay features and a second replay are the same bits).

    Raises:
        ContractError: more than `DIAGNOSTIC_CAP` tokens.
    """
    if len(tokens) > DIAGNOSTIC_CAP:
        raise ContractError(
            "diagnostic beyond its cap", field="tokens", got=len(tokens), expected=f"<= {DIAGNOSTIC_CAP}"
        )
    kinds = ("pre_attention", "moe_input")
    with LiveEngine(loaded, features=kinds) as engine:
        engine.start()
        for token in tokens:
            engine.feed(np.array([token], np.int32), DECODED)
        live = engine.take().features
    first, second = (dict(replay(loaded, [tokens], shape, features=kinds))[0].features for _ in range(2))
    path = folder / ".diagnostic.safetensors"
    write_tensors(path, first, {"schema_version": 1, "record": "diagnostic"})
    stored, _ = read_tensors(path)
    path.unlink()
    return {
        "tokens": len(tokens),
        "live_difference": max(float(np.abs(live[k] - first[k]).max() / np.abs(first[k]).max()) for k in kinds),
        "stored_equal": all(np.array_equal(stored[k], second[k]) for k in kinds),
    }


def speeds(
    loaded: LoadedModel, tokens: Sequence[np.ndarray], shape: BatchShape, *, steps: int = 48, repeats: int = 5
) -> dict[str, list[float]]:
    """Tokens per second of processor time of decode and of replay, in alternating pairs after a warm-up of both.

    Both are one busy thread; the clock on the wall would also time whoever else is at work.
    Decode is a cached step a token with capture's taps on; replay is one batch of `tokens`. Returns
    `{"decode": [repeats], "replay": [repeats]}`.
    """
    out: dict[str, list[float]] = {"decode": [], "replay": []}
    count = sum(len(t) for t in tokens)
    for repeat in range(repeats + 1):
        with LiveEngine(loaded) as engine:
            engine.start()
            engine.feed(tokens[0][: shape.chunk], PREFILLED)
            began = time.process_time()
            for token in tokens[0][:steps]:
                engine.feed(np.array([token], np.int32), DECODED)
            decode = min(steps, len(tokens[0])) / (time.process_time() - began)
            engine.take()
        began = time.process_time()
        for _ in replay(loaded, tokens, shape):
            pass
        if repeat:  # the first pair warms both arms
            out["decode"].append(decode)
            out["replay"].append(count / (time.process_time() - began))
    return out


def capture_cost(loaded: LoadedModel, tokens: np.ndarray, *, steps: int = 64, repeats: int = 9) -> dict[str, Any]:
    """What a decoded token costs with capture's taps on and off, paired and alternating.

    `overhead` is the median of the paired ratios of *processor* time, minus one: decode on the CPU is one
    busy thread, and on a shared machine the clock on the wall times the neighbours too. Both are returned,
    with quartiles and `n`.
    """
    spent: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for repeat in range(repeats + 1):
        for taps in (True, False) if repeat % 2 else (False, True):
            with LiveEngine(loaded, taps=taps) as engine:
                engine.start()
                engine.feed(tokens[:8], PREFILLED)
                began = time.process_time(), time.perf_counter()
                for token in tokens[8 : 8 + steps]:
                    engine.feed(np.array([token], np.int32), DECODED)
                if taps:
                    engine.take()  # reading the routes is part of what capture costs
                if repeat:  # the first pair warms both arms
                    spent[taps].append((time.process_time() - began[0], time.perf_counter() - began[1]))
    on, off = np.array(spent[True]) / steps, np.array(spent[False]) / steps
    cpu, wall = np.quantile(on / off - 1, [0.25, 0.5, 0.75], axis=0).T
    return {
        "on_ms": float(np.median(on[:, 0]) * 1e3),
        "off_ms": float(np.median(off[:, 0]) * 1e3),
        "overhead": float(cpu[1]),
        "overhead_quartiles": [float(cpu[0]), float(cpu[2])],
        "wall_overhead": float(wall[1]),
        "wall_overhead_quartiles": [float(wall[0]), float(wall[2])],
        "n": repeats,
    }
