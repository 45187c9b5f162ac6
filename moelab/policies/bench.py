"""How fast dispatch is, against the plain ways to do the same work.

Arms of one comparison run in turns, in an order that is reversed every round, so a machine that
slows down slows all of them. Every figure carries n, the median and the spread (the interquartile
range) in seconds.

    grouped     dispatch as it is
    loop        dispatch of one token at a time
    dense       every specialist on every token, then a choice
    batched     one batched matrix product a projection over as many (token, specialist) rows as
                dispatch runs, gathered beforehand and split evenly: the least that any dispatch costs
    route       selection and capacity, timed inside the runs of `grouped`: by themselves, in a loop, they would be
                warmer than dispatch ever finds them. `share` is the part of the same run that they take

One token is another token every round, as in decode: its specialists' weights come from memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor, nn

from moelab.policies.dispatch import SparseDispatcher

ONE_TOKEN_BATCHES = 64


@dataclass(frozen=True)
class Timing:
    """Seconds of one arm (a ratio for `share`): `n` runs, their `median` and interquartile range, `spread`."""

    n: int
    median: float
    spread: float


class Timed:
    """A callable, and the `seconds` that its calls have taken together."""

    def __init__(self, call: Callable):
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return self.call(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


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
    arms: tuple[str, ...] = ("grouped", "loop", "dense", "batched"),
    seed: int = 0,
    dispatcher: SparseDispatcher | None = None,
) -> dict[str, Timing]:
    """Time dispatch of `tokens` tokens over `experts` specialists on random scores.

    One score in four is negative, one specialist in eight is unavailable; the default policies run
    up to two specialists a token. With `grouped` come `route` and `share`.
    """
    generator = torch.Generator().manual_seed(seed)
    dispatcher = dispatcher or SparseDispatcher()
    batches = ONE_TOKEN_BATCHES if tokens == 1 else 1
    states = torch.randn(batches, tokens, hidden, generator=generator)
    scores = torch.rand(batches, tokens, experts, generator=generator) - 0.25
    availability = torch.arange(experts) % 8 != 7
    ids = tuple(f"specialist:{n}" for n in range(experts))
    anchor, bank = make_mlp(hidden, intermediate), [make_mlp(hidden, intermediate) for _ in ids]

    timed = Timed(dispatcher.selection), Timed(dispatcher.capacity)
    observed = replace(dispatcher, selection=timed[0], capacity=timed[1])
    turn, inside, shares = count(), [], []

    def grouped() -> None:
        batch, before = next(turn) % batches, sum(part.seconds for part in timed)
        start = time.perf_counter()
        dispatch(observed, slice(batch, batch + 1), slice(None))
        took = time.perf_counter() - start
        inside.append(sum(part.seconds for part in timed) - before)
        shares.append(inside[-1] / took)

    def dispatch(by: SparseDispatcher, batch: slice, part: slice) -> Tensor:
        return by.dispatch(
            states[batch, part],
            expert_scores=scores[batch, part],
            expert_ids=ids,
            anchor_mlp=anchor,
            experts=bank,
            expert_availability=availability,
        ).output

    def dense() -> Tensor:
        return torch.stack([mlp(states[:1]) for mlp in (anchor, *bank)])

    asked = dispatcher.selection(scores[:1], expert_ids=ids)
    rows = int(dispatcher.capacity(asked, expert_availability=availability).effective_routes.slot_mask.sum())
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
        "grouped": grouped,
        "loop": lambda: [dispatch(dispatcher, slice(0, 1), slice(token, token + 1)) for token in range(tokens)],
        "dense": dense,
        "batched": batched,
    }
    found = time_arms({name: every[name] for name in arms}, rounds=rounds)
    if "grouped" in arms:  # the first run does not count
        found |= {"route": _timing(inside[1:]), "share": _timing(shares[1:])}
    return found


def _timing(values: list[float]) -> Timing:
    first, median, third = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return Timing(len(values), median, third - first)
