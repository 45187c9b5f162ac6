"""How fast dispatch is, against the plain ways to do the same work.

Arms of one comparison run in turns, in an order that is reversed every round, so a machine that
slows down slows all of them. Every figure carries n, the median and the spread (the interquartile
range) in seconds.

    grouped     dispatch as it is
    loop        dispatch of one token at a time
    dense       every specialist on every token, then a choice
    batched     one batched matrix product a projection over as many (token, specialist) rows as
                dispatch runs, gathered beforehand and split evenly: the least that any dispatch costs
    route       `SparseDispatcher.route`: selection and capacity, checks included, timed inside the runs of `grouped`:
                by themselves, in a loop, they would be warmer than dispatch ever finds them. `share` is the part of
                the same run that they take

One token is another token every round, as in decode: its specialists' weights come from memory.

    python -m moelab.policies.bench --experts 8 64 256 --tokens 1 4096

times dispatch with every selection policy and prints what part of it routing takes. With `--out FILE` the default
policy is also timed against the other arms (minutes: dense runs every specialist on every token), and all is written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from moelab.policies.capacity import OverflowToAnchorCapacity
from moelab.policies.compatibility import CompatibilityIndex, CompatibilityTop2Selection
from moelab.policies.dispatch import SparseDispatcher
from moelab.policies.hierarchy import HierarchicalSelection
from moelab.policies.selection import (
    AdaptiveTop1Top2Selection,
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    DynamicKSelection,
)

ONE_TOKEN_BATCHES = 64
COMMAND = "python -m moelab.policies.bench --rounds 3 --out reports/committed/dispatch.json"


@dataclass(frozen=True)
class Timing:
    """Seconds of one arm (a ratio for `share`): `n` runs, their `median` and interquartile range, `spread`."""

    n: int
    median: float
    spread: float


def names(experts: int) -> tuple[str, ...]:
    """`[N]` ids of the specialists that are timed."""
    return tuple(f"specialist:{n}" for n in range(experts))


def dispatchers(experts: int) -> dict[str, SparseDispatcher]:
    """Every selection policy over so many specialists (four packages, four groups), with its capacity policy."""
    ids, quarters = names(experts), [4 * n // experts for n in range(experts)]
    return {
        "anchored top-1": SparseDispatcher(AnchoredTop1Selection(), OverflowToAnchorCapacity()),
        "anchor-veto top-2": SparseDispatcher(AnchorVetoTop2Selection()),
        "adaptive top-1/2": SparseDispatcher(AdaptiveTop1Top2Selection()),
        "dynamic-4": SparseDispatcher(DynamicKSelection(4)),
        "hierarchical top-2": SparseDispatcher(HierarchicalSelection([quarters.count(q) for q in range(4)])),
        "compatible top-2": SparseDispatcher(CompatibilityTop2Selection(CompatibilityIndex.from_groups(ids, quarters))),
    }


class GatedMlp(nn.Module):
    """SwiGLU, `[..., H]` to `[..., H]`: what an expert is in every model that specialists are attached to."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(states)) * self.up(states))


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
    ids = names(experts)
    anchor, bank = GatedMlp(hidden, intermediate), [GatedMlp(hidden, intermediate) for _ in ids]

    turn, inside, shares = count(), [], []

    def dispatch(hidden: Tensor, given: Tensor) -> float:
        """Seconds that routing took."""
        start = time.perf_counter()
        routes = dispatcher.route(given, tokens=hidden.shape[:2], expert_ids=ids, expert_availability=availability)
        took = time.perf_counter() - start
        dispatcher.execute(routes, hidden, anchor_mlp=anchor, experts=bank)
        return took

    def grouped() -> None:
        batch = next(turn) % batches
        hidden, given = states[batch : batch + 1], scores[batch : batch + 1]  # a model hands them over as they are
        start = time.perf_counter()
        inside.append(dispatch(hidden, given))
        shares.append(inside[-1] / (time.perf_counter() - start))

    def dense() -> Tensor:
        return torch.stack([mlp(states[:1]) for mlp in (anchor, *bank)])

    routes = dispatcher.route(scores[:1], expert_ids=ids, expert_availability=availability).effective_routes
    rows = int(routes.slot_mask.sum())
    used = max(1, min(rows, int(availability.sum())))
    gathered = torch.randn(used, max(1, rows // used), hidden, generator=generator)
    gate, up, down = (
        torch.stack([getattr(mlp, name).weight.T for mlp in bank[:used]]).contiguous()
        for name in ("gate", "up", "down")
    )

    def batched() -> Tensor:
        return torch.bmm(nn.functional.silu(torch.bmm(gathered, gate)) * torch.bmm(gathered, up), down)

    every = {
        "grouped": grouped,
        "loop": lambda: [
            dispatch(states[:1, token : token + 1], scores[:1, token : token + 1]) for token in range(tokens)
        ],
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


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number >= 1")
    return int(text)


def main() -> None:
    """Print the share of routing for every policy; with `--out`, write it and the default policy against all arms."""
    parser = argparse.ArgumentParser(prog="python -m moelab.policies.bench", description="What routing costs.")
    parser.add_argument("--experts", type=_positive, nargs="+", default=[8, 64, 256])
    parser.add_argument("--tokens", type=_positive, nargs="+", default=[1, 4096])
    parser.add_argument("--hidden", type=_positive, default=512)
    parser.add_argument(
        "--rounds", type=_positive, default=5, help="of many tokens; of one token two hundred times as many"
    )
    parser.add_argument("--out", help="JSON file: also loop, dense and batched (two rounds of many tokens)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []

    def timed(experts: int, tokens: int, policy: str, dispatcher: SparseDispatcher, arms: tuple[str, ...], rounds: int):
        found = time_dispatch(
            experts=experts, tokens=tokens, hidden=given.hidden, intermediate=2 * given.hidden,
            rounds=rounds, arms=arms, dispatcher=dispatcher,
        )  # fmt: skip
        cell = {"experts": experts, "tokens": tokens, "policy": policy}
        rows.extend(cell | {"arm": arm, **asdict(timing)} for arm, timing in found.items())
        return found

    for experts in given.experts:
        for tokens in given.tokens:
            many, all_arms = (200, 40) if tokens == 1 else (1, 1)
            for name, dispatcher in dispatchers(experts).items():
                found = timed(experts, tokens, name, dispatcher, ("grouped",), many * given.rounds)
                route, grouped = (found[arm].median * 1e6 for arm in ("route", "grouped"))
                print(
                    f"{experts:4} specialists {tokens:5} tokens  {name:20} route {route:9.1f} us of {grouped:10.1f} us,"
                    f" share {found['share'].median:.3f}",
                    flush=True,
                )
            if given.out:
                timed(
                    experts,
                    tokens,
                    "all arms",
                    SparseDispatcher(),
                    ("grouped", "loop", "dense", "batched"),
                    2 * all_arms,
                )
    if given.out:
        head = {"schema_version": 1, "command": COMMAND, "date": datetime.date.today().isoformat()}
        shape = {"hidden": given.hidden, "intermediate": 2 * given.hidden}
        Path(given.out).write_text(json.dumps({**head, **shape, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
