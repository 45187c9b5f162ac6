"""How fast dispatch is, against the plain ways to do the same work.

Arms of one comparison run in turns, in an order that is reversed every round, so a machine that
slows down slows all of them. Every figure carries n, the median and the spread (the interquartile
range) in seconds.

    grouped     dispatch as it is
    loop        dispatch of one token at a time
    dense       every specialist on every token, then a choice
    batched     one batched matrix product a projection over as many (token, specialist) rows as
                dispatch runs, gathered beforehand and split evenly: the least that any dispatch costs
    route       selection and capacity alone
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moelab.policies.dispatch import SparseDispatcher


@dataclass(frozen=True)
class Timing:
    """Seconds of one arm: `n` runs, their `median` and their interquartile range, `spread`."""

    n: int
    median: float
    spread: float


def make_mlp(hidden: int, intermediate: int) -> nn.Sequential:
    """A plain MLP, `[..., H]` to `[..., H]`."""
    return nn.Sequential(nn.Linear(hidden, intermediate), nn.SiLU(), nn.Linear(intermediate, hidden))


def time_arms(arms: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, Timing]:
    """Time every arm once a round, after one run of each that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name in arms if turn % 2 else reversed(arms):
            start = time.perf_counter()
            arms[name]()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: _timing(values) for name, values in seconds.items()}


@torch.no_grad()
def time_dispatch(
    *,
    experts: int,
    tokens: int,
    hidden: int = 512,
    intermediate: int = 1024,
    rounds: int = 5,
    arms: tuple[str, ...] = ("grouped", "loop", "dense", "batched", "route"),
    seed: int = 0,
    dispatcher: SparseDispatcher | None = None,
) -> dict[str, Timing]:
    """Time dispatch of `tokens` tokens over `experts` specialists on random scores.

    One score in four is negative, one specialist in eight is unavailable; the default policies run
    up to two specialists a token.
    """
    generator = torch.Generator().manual_seed(seed)
    dispatcher = dispatcher or SparseDispatcher()
    states = torch.randn(1, tokens, hidden, generator=generator)
    scores = torch.rand(1, tokens, experts, generator=generator) - 0.25
    availability = torch.arange(experts) % 8 != 7
    ids = tuple(f"specialist:{n}" for n in range(experts))
    anchor, bank = make_mlp(hidden, intermediate), [make_mlp(hidden, intermediate) for _ in ids]

    def dispatch(part: slice) -> Tensor:
        return dispatcher.dispatch(
            states[:, part],
            expert_scores=scores[:, part],
            expert_ids=ids,
            anchor_mlp=anchor,
            experts=bank,
            expert_availability=availability,
        ).output

    def route() -> Tensor:
        decision = dispatcher.selection(scores, expert_ids=ids)
        return dispatcher.capacity(decision, expert_availability=availability).effective_routes.selected_indices

    def dense() -> Tensor:
        return torch.stack([mlp(states) for mlp in (anchor, *bank)])

    rows = int((route() > 0).sum())
    used = max(1, min(rows, int(availability.sum())))
    gathered = torch.randn(used, max(1, rows // used), hidden, generator=generator)
    (up, up_bias), (down, down_bias) = (
        (
            torch.stack([mlp[layer].weight.T for mlp in bank[:used]]).contiguous(),
            torch.stack([mlp[layer].bias for mlp in bank[:used]]).unsqueeze(1),
        )
        for layer in (0, 2)
    )

    def batched() -> Tensor:
        return torch.baddbmm(down_bias, nn.functional.silu(torch.baddbmm(up_bias, gathered, up)), down)

    every = {
        "grouped": partial(dispatch, slice(None)),
        "loop": lambda: [dispatch(slice(token, token + 1)) for token in range(tokens)],
        "dense": dense,
        "batched": batched,
        "route": route,
    }
    return time_arms({name: every[name] for name in arms}, rounds=rounds)


def _timing(values: list[float]) -> Timing:
    first, median, third = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Timing(len(values), median, third - first)
