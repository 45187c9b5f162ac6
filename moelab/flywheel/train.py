"""Offline training of a predictor: seeded, resumable to the bit, on whatever device it is given.

The objective follows AFN-021 ("A loss function that matches the I/O objective"), per token and layer:

    w_deadline(l) * L_rank  +  over * L_false_positive  +  calibration * L_confidence

* `L_rank`, nats: for each native expert k, -log of its share against the experts that were *not* selected,
  softplus(logsumexp(z_j, j not native) - z_k), averaged with a logarithmic discount of the native rank, so
  that the first-ranked counts most. Native experts do not compete with each other: the usual cross entropy
  over all experts makes them, which flattens the scores of the best and costs recall;
* `L_false_positive`, experts: expected number read for nothing, the sum of sigmoid(z_j) over j not native;
* `L_confidence`, nats per native expert: binary cross entropy of sigmoid(z), which makes thresholds mean
  something.

Nothing here draws from a global generator, starts a process or forks: the order of epoch `e` is a function
of (seed, e) and the learning rate one of the step, so a run killed anywhere resumes to the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..artifacts import digest_json, digest_tensors, read_tensors, write_tensors
from ..errors import GateRefusedError, GeometryError, IdentityError, RecordError
from .calibrate import calibrate
from .lesson import Examples, Recipe
from .predictors import NearTermPredictor, anchored, as_tensor

ANCHOR_ROWS = 1024
"""Rows that the gate's first gain and bias are fitted on: two numbers a layer need no more."""


def loss(scores: torch.Tensor, ids: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Mean objective of scores [T, L, E] against native ids i64 [T, L, K]. See the module text."""
    K = ids.shape[-1]
    discount = 1.0 / torch.log2(torch.arange(K, device=scores.device, dtype=scores.dtype) + 2.0)
    others = scores.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    rank = (torch.nn.functional.softplus(others - scores.gather(-1, ids)) * (discount / discount.sum())).sum(-1)
    target = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
    wasted = (torch.sigmoid(scores) * (1.0 - target)).sum(-1)
    confidence = torch.nn.functional.binary_cross_entropy_with_logits(scores, target, reduction="none").sum(-1) / K
    if recipe.deadline is not None:
        rank = rank * torch.tensor(recipe.deadline, device=scores.device, dtype=scores.dtype)
    return (rank + recipe.over * wasted + recipe.calibration * confidence).mean()


def fit(
    model: NearTermPredictor,
    examples: Examples,
    recipe: Recipe,
    *,
    gate1: str = "refused",
    device: str = "cpu",
    checkpoint: str | Path | None = None,
    checkpoint_steps: int | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Train in place and return the mean loss of each epoch.

    `gate1` is the verdict on the labels: anything but "pass" is refused, silence too. With `checkpoint`, the
    state is written there every `checkpoint_steps` steps (None: every epoch) and picked up again if the
    file exists; killed at any moment and started again, the run ends with the same weights and the same
    history, to the bit on the same device and number of threads. `on_step(step, steps, loss)` follows it.

    A predictor whose head is untrained first gets the gain and offset per layer that make its gate a
    probability: no ranking changes, and training need not spend its steps on finding them.

    Raises:
        GateRefusedError: the labels are not known to be exact.
        GeometryError: examples of another shape than the predictor's.
        RecordError: an id out of range or twice in a row, or a loss that is not finite.
        IdentityError: the checkpoint belongs to another recipe, predictor or set of examples.
    """
    if gate1 != "pass":
        raise GateRefusedError(
            "labels are not known to be exact: Gate 1 has not passed for them",
            field="gate1",
            got=gate1,
            expected="pass",
            fix="use an identity whose Gate 1 is exact, or decode-captured labels only",
        )
    _check(model, examples, recipe)
    per_epoch = -(-len(examples) // recipe.batch)
    total = per_epoch * recipe.epochs
    model.to(device).train()
    saved = _Checkpoint(checkpoint, model, examples, recipe)
    optimiser = _optimiser(model, recipe)
    losses = saved.restore(optimiser)
    if losses is None:
        losses = []
        _anchor(model, examples)
    order = None
    for step in range(len(losses), total):
        epoch, part = divmod(step, per_epoch)
        if part == 0 or order is None:
            order = np.random.default_rng((recipe.seed, epoch)).permutation(len(examples))
        batch = examples.rows(np.sort(order[part * recipe.batch : (part + 1) * recipe.batch]))
        losses.append(_step(model, optimiser, batch, recipe, step, total))
        if (step + 1) % (checkpoint_steps or per_epoch) == 0:
            saved.store(optimiser, losses)
        if on_step is not None:
            on_step(step + 1, total, losses[-1])
    model.eval().to("cpu")
    return [float(mean) for mean in np.reshape(losses, (recipe.epochs, per_epoch)).mean(1)]


def _check(model: NearTermPredictor, examples: Examples, recipe: Recipe) -> None:
    own, ids = model.identity, examples.ids
    if len(examples) == 0:
        raise RecordError("no rows to train on", field="ids", got=ids.shape, expected="at least one row")
    if ids.shape[1:] != (own.layers, own.top_k):
        raise GeometryError("ids of another shape", field="ids", got=ids.shape[1:], expected=(own.layers, own.top_k))
    if recipe.deadline is not None and len(recipe.deadline) != own.layers:
        raise GeometryError("one weight a layer", field="deadline", got=len(recipe.deadline), expected=own.layers)
    ordered = np.sort(ids, axis=-1)
    if ordered[..., 0].min() < 0 or ordered[..., -1].max() >= own.experts:
        got = int(ordered[..., 0].min()), int(ordered[..., -1].max())
        raise RecordError("id out of range", field="ids", got=got, expected=f"0 to {own.experts - 1}")
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise RecordError("an expert twice in one row", field="ids", expected=f"{own.top_k} different experts")
    first = examples.rows(slice(0, 1))
    model.scores(first.features, first.gate_scores)  # checks shapes, before anything is anchored


@torch.no_grad()
def _anchor(model: NearTermPredictor, examples: Examples) -> None:
    if not model.gate or bool(model.head.any()):
        return
    few = examples.rows(np.unique(np.linspace(0, len(examples) - 1, ANCHOR_ROWS).astype(np.int64)))
    scale, bias = calibrate(anchored(as_tensor(few.gate_scores, "cpu"), model.identity.top_k).numpy(), few.ids)
    model.gain.copy_(torch.from_numpy(scale)[:, None])
    model.bias.copy_(torch.from_numpy(bias)[:, None])


def _optimiser(model: NearTermPredictor, recipe: Recipe) -> torch.optim.Optimizer:
    # Decay is for matrices alone: it would pull the gain on the gate to zero.
    matrices = model.decayed
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if name in matrices],
            "weight_decay": recipe.weight_decay,
        },
        {"params": [p for name, p in model.named_parameters() if name not in matrices], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate)


def _step(model, optimiser, batch: Examples, recipe: Recipe, step: int, total: int) -> float:
    device = next(model.parameters()).device
    gate = None if batch.gate_scores is None else as_tensor(batch.gate_scores, device)
    # Ids are widened here: torch has no arithmetic on unsigned 16-bit integers.
    ids = torch.from_numpy(batch.ids.astype(np.int64)).to(device)
    for group in optimiser.param_groups:
        group["lr"] = recipe.learning_rate * (1.0 - step / total)
    optimiser.zero_grad(set_to_none=True)
    value = loss(model(as_tensor(batch.features, device), gate), ids, recipe)
    if not bool(torch.isfinite(value)):
        got = f"{float(value.detach())} at step {step}"
        raise RecordError("loss is not finite", field="features, gate_scores", got=got)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return float(value.detach())


class _Checkpoint:
    """Weights, both moments of AdamW and every loss so far, in one sealed file that says what it belongs to."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(self, path: str | Path | None, model: NearTermPredictor, examples: Examples, recipe: Recipe):
        self.path, self.model = path, model
        if path is not None:
            start = digest_tensors({name: value.cpu().numpy() for name, value in model.state_dict().items()})
            self.owner = {
                "predictor": digest_json(asdict(model.identity)),
                "start": start,
                "recipe": digest_json(asdict(recipe)),
                "examples": examples.digest(),
            }

    def store(self, optimiser: torch.optim.Optimizer, losses: list[float]) -> None:
        if self.path is None:
            return
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[name] = parameter.detach().cpu().numpy()
            for moment in self.MOMENTS:
                tensors[f"{name}.{moment}"] = optimiser.state[parameter][moment].cpu().numpy()
        write_tensors(self.path, tensors, {"owner": self.owner, "losses": losses})

    @torch.no_grad()
    def restore(self, optimiser: torch.optim.Optimizer) -> list[float] | None:
        """Losses so far, with weights and moments put back; None without a file."""
        if self.path is None or not Path(self.path).is_file():
            return None
        tensors, header = read_tensors(self.path)
        for field, expected in self.owner.items():
            if (got := header.get("owner", {}).get(field)) != expected:
                raise IdentityError(
                    "checkpoint of another training",
                    file=self.path,
                    field=field,
                    got=got,
                    expected=expected,
                    fix="delete the file to train from the start",
                )
        for name, parameter in self.model.named_parameters():
            parameter.copy_(torch.from_numpy(tensors[name]))
            state: dict[str, Any] = {"step": torch.tensor(float(len(header["losses"])))}
            for moment in self.MOMENTS:
                state[moment] = torch.from_numpy(tensors[f"{name}.{moment}"]).to(parameter.device)
            optimiser.state[parameter] = state
        return header["losses"]
