"""Training: next-token loss plus balance loss, AdamW, resumable after a kill to the very bit.

State goes to a dot file in the given folder every `save_every` steps, written aside and renamed; a second
call with the same recipe and text goes on from there. Windows depend on the seed and the step alone, and
nothing else is random (no dropout), so a resumed run equals one that was never stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from ..artifacts import digest_json, digest_tensors
from ..errors import IdentityError, MoelabError
from .recipe import Recipe, make_network
from .routers import RouterTap, balance_loss, move_bias
from .tokens import sample_windows, windows

STATE = ".training.pt"
Progress = Callable[[int, float, float], None]


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained torch model and its history: `loss f32[steps]` in nats a token, `balance f32[steps]`."""

    network: Any
    loss: np.ndarray
    balance: np.ndarray


def train(
    recipe: Recipe,
    streams: Mapping[str, np.ndarray],
    vocabulary: int,
    *,
    folder: Path | None = None,
    save_every: int = 50,
    stop_after: int | None = None,
    on_step: Progress | None = None,
) -> Trained:
    """Train a model of the recipe on token streams (domain → `i32[N]`).

    Args:
        folder: where the state of an unfinished run is kept; None keeps none.
        stop_after: end this call after so many steps of its own, as a kill would, state saved.
        on_step: called with (step, loss, balance).

    Raises:
        IdentityError: the folder holds the state of another recipe or other text.
        MoelabError: the loss is not finite.
    """
    identity = digest_json({"recipe": recipe.own(), "vocabulary": vocabulary, "text": digest_tensors(streams)})
    network = make_network(recipe, vocabulary)
    # One grouped product for all experts instead of a loop over them: twice as fast on a CPU.
    network.set_experts_implementation("grouped_mm")
    network.train()
    optimiser = _optimiser(network, recipe)
    history: list[tuple[float, float]] = []
    state = None if folder is None else folder / STATE
    if state is not None and state.is_file():
        history = _resume(state, identity, network, optimiser)
    first = len(history)
    for step in range(first, recipe.steps):
        if stop_after is not None and step - first >= stop_after:
            break
        tokens, _ = sample_windows(streams, batch=recipe.batch, length=recipe.window, seed=recipe.seed, step=step)
        history.append(_step(network, optimiser, recipe, torch.from_numpy(tokens), step))
        if not np.isfinite(history[-1]).all():
            raise MoelabError(f"training diverged at step {step}: loss {history[-1][0]}")
        if on_step is not None:
            on_step(step, *history[-1])
        if state is not None and ((step + 1) % save_every == 0 or step - first + 1 == stop_after):
            _save(state, identity, network, optimiser, history)
    loss, balance = np.array(history, np.float32).reshape(-1, 2).T
    return Trained(network.eval(), loss, balance)


def _step(network, optimiser, recipe: Recipe, tokens: torch.Tensor, step: int) -> tuple[float, float]:
    for group in optimiser.param_groups:
        group["lr"] = recipe.rate(step)
    sigmoid = recipe.family == "sigmoid"
    with RouterTap(network) as tap:
        logits = network(input_ids=tokens, use_cache=False).logits
    loss = next_token_loss(logits, tokens).mean()
    balance = balance_loss(tap.logits, tap.ids, sigmoid=sigmoid)
    optimiser.zero_grad(set_to_none=True)
    (loss + recipe.balance * balance).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
    optimiser.step()
    if sigmoid:
        move_bias(network, tap.ids, recipe.bias_step / (4 if recipe.decaying(step) else 1))
    return float(loss.detach()), float(balance.detach())


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Nats `f32[B,T-1]` of each token given those before it in its window."""
    return cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def _optimiser(network, recipe: Recipe) -> torch.optim.Optimizer:
    # Norms are the only vectors; pulling them to zero would shrink the residual stream.
    matrices = [p for p in network.parameters() if p.ndim > 1]
    vectors = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=recipe.betas)


def _save(path: Path, identity: str, network, optimiser, history) -> None:
    aside = path.with_suffix(".tmp")
    state = {
        "identity": identity,
        "network": network.state_dict(),
        "optimiser": optimiser.state_dict(),
        "history": history,
    }
    torch.save(state, aside)
    os.replace(aside, path)


def _resume(path: Path, identity: str, network, optimiser) -> list[tuple[float, float]]:
    state = torch.load(path, weights_only=True)
    if state["identity"] != identity:
        raise IdentityError(
            "unfinished training of another recipe or text",
            file=path,
            got=state["identity"],
            expected=identity,
            fix="delete the file to begin anew",
        )
    network.load_state_dict(state["network"])
    optimiser.load_state_dict(state["optimiser"])
    return [tuple(row) for row in state["history"]]


@torch.no_grad()
def evaluate(
    network: Any, streams: Mapping[str, np.ndarray], *, window: int, limit: int, batch: int = 16
) -> dict[str, tuple[float, int]]:
    """Domain → (mean nats a token, tokens predicted) over its first `limit` windows of text."""
    figures = {}
    for domain in sorted(streams):
        rows = torch.from_numpy(windows(streams[domain], window, limit=limit, domain=domain).astype(np.int64))
        losses = [next_token_loss(network(input_ids=part, use_cache=False).logits, part) for part in rows.split(batch)]
        figures[domain] = (float(torch.cat(losses).double().mean()), sum(loss.numel() for loss in losses))
    return figures
