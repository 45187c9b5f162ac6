"""How fast dispatch is, against the plain ways to do the same work.

Arms of one comparison run in turns, in an order that is reversed every round, so a machine that slows down slows all of
them. Every figure carries n, the median and the spread (the interquartile range) in seconds.

    grouped     dispatch as it is
    loop        dispatch of one token at a time
    dense       every specialist on every token, then a choice
    batched     one batched matrix product a projection over as many (token, specialist) rows as
                dispatch runs, gathered beforehand and split evenly: the least that any dispatch costs
    route       `SparseDispatcher.route`: selection and capacity, checks included, timed inside the runs of `grouped`:
                by themselves, in a loop, they would be warmer than dispatch ever finds them. `share` is the part of
                the same run that they take. (The one tensor of scores that a mixture of one token needs is made later)

One token is another token every run, as in decode: its specialists' weights come from memory. `measure` times every
selection policy, and the default one against the other arms; `judged` holds the rows against what was asked.

    python -m moelab.policies.bench --experts 8 64 256 --tokens 1 4096
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, cycle
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
ALL_ARMS, DEFAULT = "all arms", "adaptive top-1/2"
"""In place of a policy: the default policy, beside the plain ways to do its work. Which one that is."""
ROUTING, LOOP, BATCHED = 0.05, 10.0, 2.0
"""Asked: selection and capacity, of dispatch at most; the loop ÷ grouped at least; grouped ÷ batched at most."""
ASKED_HIDDEN, ASKED_BATCHED = 512, 64
"""Of models this wide at least; and with so many specialists."""


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


class Bank:
    """What is timed: `anchor` and N `experts`, MLPs `[..., H]` to `[..., H]` of random weights, with `[N]` `ids`."""

    def __init__(self, experts: int, *, hidden: int, intermediate: int):
        self.hidden, self.ids = hidden, names(experts)
        self.anchor, *self.experts = (GatedMlp(hidden, intermediate) for _ in range(experts + 1))
        self.availability = torch.arange(experts) % 8 != 7


def time_arms(arms: dict[str, Callable[[], object]], *, rounds: int, **enough: int) -> dict[str, Timing]:
    """Time every arm once a round, after one round that does not count.

    enough: by arm that lasts long, as many rounds as are enough for it, the first ones, without one before.
    """
    if unknown := enough.keys() - arms.keys():
        raise TypeError(f"no such arms: {sorted(unknown)}")
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name in arms if turn % 2 else reversed(arms):
            if turn > enough.get(name, rounds) or (name in enough and not turn):
                continue
            start = time.perf_counter()
            arms[name]()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: _timing(values) for name, values in seconds.items()}


@torch.no_grad()
def time_dispatch(
    bank: Bank,
    *,
    tokens: int,
    rounds: int = 5,
    arms: tuple[str, ...] = ("grouped", "loop", "dense", "batched"),
    seed: int = 0,
    dispatcher: SparseDispatcher | None = None,
    **enough: int,
) -> dict[str, Timing]:
    """Time dispatch of `tokens` tokens over the bank's specialists on random scores.

    One score in four is negative, one specialist in eight is unavailable. With `grouped` come `route` and `share`.
    `enough` as in `time_arms`.
    """
    generator, dispatcher = torch.Generator().manual_seed(seed), dispatcher or SparseDispatcher()
    batches = ONE_TOKEN_BATCHES if tokens == 1 else 1
    states = torch.randn(batches, tokens, bank.hidden, generator=generator)
    scores = torch.rand(batches, tokens, len(bank.ids), generator=generator) - 0.25
    given = {"expert_ids": bank.ids, "expert_availability": bank.availability}

    inside, shares = [], []
    # One token: the loop is half a round apart, so that neither finds the weights that the other has just used.
    turns = {"grouped": count(), "loop": count(batches // 2)}

    def dispatch(arm: str, token: slice = slice(None)) -> tuple[float, float]:
        """Seconds that routing took, and all of it."""
        batch = next(turns[arm]) % batches
        hidden, evidence = states[batch : batch + 1, token], scores[batch : batch + 1, token]  # as a model has them
        start = time.perf_counter()
        routes = dispatcher.route(evidence, tokens=hidden.shape[:2], **given)
        took = time.perf_counter() - start
        dispatcher.execute(routes, hidden, anchor_mlp=bank.anchor, experts=bank.experts)
        return took, time.perf_counter() - start

    def grouped() -> None:
        routing, whole = dispatch("grouped")
        inside.append(routing)
        shares.append(routing / whole)

    every = {
        "grouped": grouped,
        "loop": lambda: [dispatch("loop", slice(token, token + 1)) for token in range(tokens)],
        "dense": lambda: torch.stack([mlp(states[:1]) for mlp in (bank.anchor, *bank.experts)]),
    }
    if "batched" in arms:
        routes = dispatcher.route(scores[:1], **given).effective_routes
        every["batched"] = _batched(bank, int(routes.slot_mask.sum()), generator, copies=8 if tokens == 1 else 1)
    found = time_arms({name: every[name] for name in arms}, rounds=rounds, **enough)
    if "grouped" in arms:  # the first run does not count
        found |= {"route": _timing(inside[1:]), "share": _timing(shares[1:])}
    return found


def _batched(bank: Bank, rows: int, generator: torch.Generator, *, copies: int) -> Callable[[], Tensor]:
    """copies: of the weights, used in turns, where the last run's would still be in the caches."""
    used = max(1, min(rows, int(bank.availability.sum())))
    gathered = torch.randn(used, max(1, rows // used), bank.hidden, generator=generator)
    parts = ("gate", "up", "down")
    stack = [torch.stack([getattr(mlp, part).weight.T for mlp in bank.experts[:used]]) for part in parts]
    turns = cycle([stack, *([weights.clone() for weights in stack] for _ in range(copies - 1))])

    def run() -> Tensor:
        gate, up, down = next(turns)
        return torch.bmm(nn.functional.silu(torch.bmm(gathered, gate)) * torch.bmm(gathered, up), down)

    return run


def _timing(values: list[float]) -> Timing:
    first, median, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Timing(len(values), median, third - first)


def measure(
    experts: Sequence[int],
    tokens: Sequence[int],
    *,
    hidden: int,
    rounds: int,
    arms: tuple[str, ...] = ("grouped", "loop", "dense", "batched"),
    each_policy: Sequence[int] | None = None,
) -> Iterator[dict]:
    """Rows `{experts, tokens, policy, arm, n, median, spread}`, seconds (a ratio for the arm `share`), as they come.

    rounds: of many tokens; of one token two hundred times as many for each policy and forty times for all arms. Of
    many tokens a dense run takes `rounds`, and the other arms beside it three times as many. Of one token a dense run
    takes five times as many: it leaves nothing in the caches, where in decode a dispatch follows another.
    each_policy: of `tokens`, those on which every policy is timed and not the default one alone; None = all.
    """
    for number in experts:
        bank = Bank(number, hidden=hidden, intermediate=2 * hidden)
        for many in tokens:
            each, beside = (200 * rounds, 40 * rounds) if many == 1 else (rounds, 3 * rounds)
            enough = {"dense": 5 * rounds} if many == 1 else {"loop": beside, "dense": rounds}
            policies = dispatchers(number) if each_policy is None or many in each_policy else {}
            plans = [(name, d, ("grouped",), each) for name, d in policies.items()]
            for policy, dispatcher, timed, turns in [*plans, (ALL_ARMS, None, arms, beside)]:
                few = {arm: times for arm, times in enough.items() if arm in timed}
                found = time_dispatch(bank, tokens=many, rounds=turns, arms=timed, dispatcher=dispatcher, **few)
                cell = {"experts": number, "tokens": many, "policy": policy}
                yield from (cell | {"arm": arm} | asdict(timing) for arm, timing in found.items())


def judged(rows: Sequence[dict], *, hidden: int) -> list[dict]:
    """What was asked of dispatch, a row a claim and size: `claim`, `measured`, `spread` (None for a ratio of medians),
    `asked`, `most` (at most that, else at least), `n`, `who` (has most routing), `holds` (None: it is not asked)."""
    found, asked = [], hidden >= ASKED_HIDDEN

    def claim(claim: str, measured: float, bound: float, most: bool, n: int, who: str = "", spread=None) -> None:
        row = {"claim": claim, "measured": measured, "spread": spread, "asked": bound, "most": most, "n": n, "who": who}
        holds = (measured <= bound if most else measured >= bound) if asked else None
        found.append(row | {"holds": holds})

    for number, many in dict.fromkeys((row["experts"], row["tokens"]) for row in rows):
        here = [row for row in rows if (row["experts"], row["tokens"]) == (number, many)]
        arms = {row["arm"]: row for row in here if row["policy"] == ALL_ARMS}
        share = max((row for row in here if row["arm"] == "share"), key=lambda row: row["median"])
        size = f"{number} specialists, {many:,} token{'s' * (many > 1)}"
        who = f"{DEFAULT}, beside {ALL_ARMS}" if share["policy"] == ALL_ARMS else share["policy"]
        routing = f"selection and capacity, share of dispatch, {size}"
        claim(routing, share["median"], ROUTING, True, share["n"], who, share["spread"])
        grouped, loop, batched = (arms[name] for name in ("grouped", "loop", "batched"))
        if many > 1:
            times = loop["median"] / grouped["median"]
            claim(f"one token at a time ÷ grouped, {size}", times, LOOP, False, loop["n"])
        if number == ASKED_BATCHED:
            times = grouped["median"] / batched["median"]
            claim(f"grouped ÷ one batched pass, {size}", times, BATCHED, True, batched["n"])
    return found


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text}, expected a number >= {least}")
        return int(text)

    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the share of routing for every policy, then every claim; with `--out`, write the rows."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m moelab.policies.bench", description=__doc__, formatter_class=plain, allow_abbrev=False
    )
    parser.add_argument("--experts", type=_at_least(4), nargs="+", default=[8, 64, 256], help="specialists")
    parser.add_argument("--tokens", type=_at_least(1), nargs="+", default=[1, 4096], help="tokens of a batch")
    parser.add_argument("--hidden", type=_at_least(1), default=512, help="width H; specialists have 2 H inside")
    parser.add_argument("--rounds", type=_at_least(1), default=1, help="of many tokens; of one token 200 times as many")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args(arguments)
    if given.out and not given.out.parent.is_dir():
        parser.error(f"--out: no folder {given.out.parent}")
    torch.set_num_threads(1)
    rows = []
    for row in measure(given.experts, given.tokens, hidden=given.hidden, rounds=given.rounds):
        rows.append(row)
        value = f"{row['median']:9.3f}   " if row["arm"] == "share" else f"{row['median'] * 1e6:9.1f} us"
        cell = f"{row['experts']:4} specialists {row['tokens']:5} tokens"
        print(f"{cell}  {row['policy']:20} {row['arm']:8} {value} n {row['n']}", flush=True)
    for row in judged(rows, hidden=given.hidden):
        verdict = {True: "holds", False: "FAILS", None: "-"}[row["holds"]]
        print(f"{verdict:5}  {row['measured']:7.3f}  {row['asked']:5g}  {row['claim']}  {row['who']}")
    if given.out:
        command = shlex.join([*parser.prog.split(), *(sys.argv[1:] if arguments is None else arguments)])
        head = {"schema_version": 1, "command": command, "date": datetime.date.today().isoformat()}
        head |= {"hidden": given.hidden, "intermediate": 2 * given.hidden, "rows": rows}
        given.out.write_text(json.dumps(head, indent=1) + "\n")


if __name__ == "__main__":
    main()
