"""Offline training of a predictor: seeded, resumable to the bit, on whatever device it is given.

The objective follows AFN-021 ("A loss function that matches the I/O objective"), per row and layer:

    w_deadline(l) * L_rank  +  over * L_false_positive  +  calibration * L_confidence

* `L_rank`: cross entropy of softmax(scores) against the native experts, weighted by a logarithmic
  discount of their native rank, so the first-ranked expert counts most;
* `L_false_positive`: probability mass given to experts that were not selected, i.e. bytes read for nothing;
* `L_confidence`: binary cross entropy of sigmoid(score), which makes confidence thresholds meaningful.

Nothing here draws from a global generator: the order of epoch `e` is a function of (seed, e), so a run
killed anywhere resumes to the same weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import GateRefusedError, GeometryError
from .predictors import NearTermPredictor


@dataclass(frozen=True)
class Examples:
    """Training rows in memory. `gate_scores` is None for a predictor that does not use them.

    features: f32|f16 [T, L, H], row l belongs to target layer l.
    ids: integer [T, L, K], native experts in rank order.
    gate_scores: f32 [T, L, E] | None.
    """

    features: np.ndarray
    ids: np.ndarray
    gate_scores: np.ndarray | None = None

    def __post_init__(self):
        T, L = self.ids.shape[:2]
        for name in ("features", "gate_scores"):
            value = getattr(self, name)
            if value is not None and value.shape[:2] != (T, L):
                raise GeometryError("rows do not line up", field=name, got=value.shape[:2], expected=(T, L))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: np.ndarray | slice) -> Examples:
        gate = None if self.gate_scores is None else self.gate_scores[index]
        return Examples(self.features[index], self.ids[index], gate)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. `deadline` weighs layers; None weighs them equally."""

    epochs: int = 6
    batch: int = 512
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    over: float = 0.05
    calibration: float = 1.0
    seed: int = 0
    deadline: tuple[float, ...] | None = None


def loss(scores: torch.Tensor, ids: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Mean objective of scores [T, L, E] against native ids i64 [T, L, K]. See the module text."""
    K = ids.shape[-1]
    discount = 1.0 / torch.log2(torch.arange(K, device=scores.device, dtype=scores.dtype) + 2.0)
    rank = -(torch.log_softmax(scores, -1).gather(-1, ids) * (discount / discount.sum())).sum(-1)
    target = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
    confidence = torch.nn.functional.binary_cross_entropy_with_logits(scores, target, reduction="none").sum(-1)
    wasted = (torch.sigmoid(scores) * (1 - target)).sum(-1)
    row = rank + recipe.over * wasted + recipe.calibration * confidence / K
    if recipe.deadline is not None:
        row = row * torch.tensor(recipe.deadline, device=scores.device, dtype=scores.dtype)
    return row.mean()


def fit(
    model: NearTermPredictor,
    examples: Examples,
    recipe: Recipe,
    *,
    gate1: str = "pass",
    device: str = "cpu",
    checkpoint: str | Path | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Train in place and return the mean loss of each epoch run here.

    `gate1` is the verdict on the labels: anything but "pass" is refused. With `checkpoint`, the state is
    written there after every epoch and picked up again if the file exists.

    Raises:
        GateRefusedError: the labels come from a replay that is not exact.
    """
    if gate1 != "pass":
        raise GateRefusedError(
            "labels are not exact: replay did not pass Gate 1",
            field="gate1",
            got=gate1,
            expected="pass",
            fix="use an identity whose Gate 1 is exact, or decode-captured labels only",
        )
    steps = -(-len(examples) // recipe.batch)
    total = steps * recipe.epochs
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: max(0.0, 1.0 - step / max(1, total)))
    first = _restore(checkpoint, model, optimiser, schedule)
    history = []
    for epoch in range(first, recipe.epochs):
        losses = []
        for step, batch in enumerate(_batches(examples, recipe, epoch, device)):
            features, gate, ids = batch
            optimiser.zero_grad(set_to_none=True)
            value = loss(model(features, gate), ids, recipe)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            losses.append(float(value.detach()))
            if on_step is not None:
                on_step(epoch * steps + step + 1, total, losses[-1])
        history.append(float(np.mean(losses)))
        _store(checkpoint, model, optimiser, schedule, epoch + 1)
    model.eval().to("cpu")
    return history


def _batches(examples: Examples, recipe: Recipe, epoch: int, device: str) -> Iterator[tuple]:
    order = np.random.default_rng((recipe.seed, epoch)).permutation(len(examples))
    for start in range(0, len(order), recipe.batch):
        part = examples.rows(np.sort(order[start : start + recipe.batch]))
        gate = None if part.gate_scores is None else _tensor(part.gate_scores, device)
        # Ids are widened here: torch has no arithmetic on unsigned 16-bit integers.
        yield _tensor(part.features, device), gate, torch.from_numpy(part.ids.astype(np.int64)).to(device)


def _tensor(array: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32)).to(device)


def _store(path, model, optimiser, schedule, epoch) -> None:
    if path is None:
        return
    state = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "schedule": schedule.state_dict(),
        "epoch": epoch,
    }
    aside = Path(f"{path}.tmp")
    torch.save(state, aside)
    os.replace(aside, path)


def _restore(path, model, optimiser, schedule) -> int:
    if path is None or not Path(path).is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    schedule.load_state_dict(state["schedule"])
    return state["epoch"]
