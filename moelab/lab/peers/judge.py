"""From runs to rows and a verdict: `pass`, `fail`, or `refused` where the evidence is not fit to decide.

Refused, because nothing could be concluded whatever the figures say: no enforced cap, a model that fits into it, no
device counter, a run that did not begin cold, two arms that are one arm, an arm that changed between rounds, too
few rounds or tokens, an arm of ours that did not run, or a rival that gave other tokens (it did not compute the same).
Failed: of an arm of ours other tokens, more bytes read or more memory than the limit, or slower than a rival. Rivals
that did not run are named; they neither pass nor fail anything.

    read amplification = device bytes in decode / bytes of the experts that the decoded tokens were routed to

A token is routed to K experts in each of L layers whatever a runtime caches, so a cache shows as a figure below 1.

    allowed memory = parameters that are no experts + slots + BESIDE
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from ...flywheel.gates import FAIL, PASS, REFUSED
from ...studies.streaming_claims import AMPLIFICATION, BESIDE
from .cap import Refusal
from .comparison import OURS, REFERENCE, RIVAL, Run
from .generated import Shape

SMALLEST_ROUNDS, SMALLEST_TOKENS = 5, 20
COLD_SHARE = 0.01
"""Pages of weight files that may be in memory before a run: the header that a directory scan or a digest leaves."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An arm over all its rounds. Bytes are bytes, times seconds; medians over rounds, spreads half the quartiles'."""

    arm: str
    role: str
    rounds: int
    """Rounds that ended well."""
    equal_tokens: bool | None = None
    """Whether every round gave the reference's tokens; None where there is nothing to compare."""
    seconds_per_token: float | None = None
    seconds_spread: float | None = None
    times_ours: float | None = None
    """Median over rounds of this arm's seconds over those of the first of ours in the same round."""
    rounds_slower: int | None = None
    """Rounds in which it was slower than that."""
    bytes_per_token: float | None = None
    amplification: float | None = None
    device_per_read: float | None = None
    """Bytes from the device over the bytes that the arm says it read: above 1 the system read more than was asked."""
    peak_rss: int | None = None
    rss_allowed: int | None = None
    """Bytes that `peak_rss` may be; None where nothing is asked."""
    group_peak: int | None = None
    error: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    status: str
    reasons: list[str]
    rows: list[Row]


def rows(runs: Sequence[Run], shape: Shape, model_bytes: int) -> list[Row]:
    """One row an arm, in the order in which arms first ran."""
    other = model_bytes - shape.layers * shape.experts * shape.expert_bytes
    expected = {run.round: run.answer.tokens for run in runs if run.role == REFERENCE and run.answer}
    first = next((run.arm for run in runs if run.role == OURS), None)
    ours = {run.round: run.answer.seconds_per_token for run in runs if run.arm == first and run.answer}
    return [
        _row(arm, mine, expected, {} if arm == first else ours, shape, other) for arm, mine in _by_arm(runs).items()
    ]


def judge(runs: Sequence[Run], *, shape: Shape, model_bytes: int, cap_bytes: int, refusal: Refusal | None) -> Outcome:
    """The verdict on these runs of a model of `model_bytes`."""
    table = rows(runs, shape, model_bytes)
    lacking = _lacking(runs, table, shape, model_bytes, cap_bytes, refusal)
    if lacking:
        return Outcome(status=REFUSED, reasons=lacking, rows=table)
    wrong = _wrong(table)
    absent = [f"{row.arm} did not run" for row in table if row.role == RIVAL and not row.rounds]
    return Outcome(status=FAIL if wrong else PASS, reasons=wrong + absent, rows=table)


def _by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.round):
        found[run.arm].append(run)
    return dict(found)


def _row(
    arm: str, runs: list[Run], expected: dict[int, list[int]], ours: dict[int, float], shape: Shape, other_bytes: int
) -> Row:
    done = [run for run in runs if run.answer]
    error = next((run.error for run in runs if run.error), "")
    row = {"arm": arm, "role": runs[0].role, "rounds": len(done), "error": error}
    if not done:
        return Row(**row)
    times = [run.answer.seconds_per_token for run in done]
    read = [run.answer.decode_bytes / run.answer.decoded for run in done if run.answer.decode_bytes is not None]
    asked = [run.answer.decode_bytes / run.answer.read_bytes for run in done if run.answer.decode_bytes and _said(run)]
    comparable = [run for run in done if run.round in expected]
    ratios = [run.answer.seconds_per_token / ours[run.round] for run in done if run.round in ours]
    slots = max(run.answer.report.get("slots_given", 0) for run in done)
    return Row(
        **row,
        equal_tokens=all(run.answer.tokens == expected[run.round] for run in comparable) if comparable else None,
        seconds_per_token=statistics.median(times),
        seconds_spread=_spread(times),
        times_ours=statistics.median(ratios) if ratios else None,
        rounds_slower=sum(ratio > 1 for ratio in ratios) if ratios else None,
        bytes_per_token=statistics.median(read) if read else None,
        amplification=statistics.median(read) / shape.routed_bytes if read else None,
        device_per_read=statistics.median(asked) if asked else None,
        peak_rss=max((run.answer.peak_rss or 0 for run in done), default=0) or None,
        rss_allowed=other_bytes + slots + BESIDE if runs[0].role == OURS else None,
        group_peak=max((run.group_peak or 0 for run in runs), default=0) or None,
    )


def _said(run: Run) -> bool:
    """Whether the arm counts what it reads."""
    return bool(run.answer.read_bytes)


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def _lacking(runs, table, shape, model_bytes, cap_bytes, refusal) -> list[str]:
    """Everything that makes the runs unfit to decide on."""
    found = [] if refusal is None else [f"no enforced memory cap: {refusal.reason}"]
    if model_bytes <= cap_bytes:
        found.append(f"the model ({model_bytes:,} bytes) fits into the cap ({cap_bytes:,} bytes)")
    for role, what in ((REFERENCE, "no reference run gave tokens"), (OURS, "no arm of ours ran")):
        if not any(row.role == role and row.rounds for row in table):
            found.append(what)
    for row in table:
        if row.rounds and row.rounds < SMALLEST_ROUNDS:
            found.append(f"{row.arm}: {row.rounds} of {SMALLEST_ROUNDS} rounds needed")
        elif row.role == OURS and row.error:
            found.append(f"{row.arm}: {row.error}")
        if row.role == OURS and row.rounds and row.peak_rss is None:
            found.append(f"{row.arm}: this system does not count resident memory")
        if row.role == RIVAL and row.equal_tokens is False:
            found.append(f"{row.arm} gave other tokens: it did not compute the same")
    done = [run for run in runs if run.answer]
    if any(run.answer.decoded < SMALLEST_TOKENS for run in done):
        found.append(f"fewer than {SMALLEST_TOKENS} decoded tokens a run")
    return found + _one_arm_twice(done) + _warm(done, shape)


def _one_arm_twice(done: list[Run]) -> list[str]:
    digests: dict[str, set[str]] = defaultdict(set)
    for run in done:
        # The reference is the resident arm without a cap: the cap is part of what an arm is.
        digests[run.arm].add(f"{run.answer.options_digest} {'capped' if run.capped else ''}")
    found = [f"{arm} ran with other options in other rounds" for arm, seen in digests.items() if len(seen) > 1]
    owners: dict[str, str] = {}
    for arm, seen in digests.items():
        for digest in seen:
            if (other := owners.setdefault(digest, arm)) != arm:
                found.append(f"{other} and {arm} ran with the same options: they are one arm")
    return found


def _warm(done: list[Run], shape: Shape) -> list[str]:
    """Runs that cannot have begun cold: pages held before the start, or fewer device bytes than experts used."""
    used = {run.round: run.answer.report.get("distinct_experts") for run in done if run.role == REFERENCE}
    found = []
    for run in done:
        name = f"{run.arm}, round {run.round + 1}"
        least = (used.get(run.round) or 0) * shape.expert_bytes
        if run.device_total is None or run.cached_before is None:
            found.append(f"{name}: this system does not count device bytes or cached pages")
        elif run.cached_before > COLD_SHARE:
            found.append(f"{name}: {run.cached_before:.0%} of the weights were in memory before it began")
        elif run.device_total < least:
            found.append(f"{name}: {run.device_total:,} bytes from the device, {least:,} needed: it was not cold")
        elif run.answer.options.get("reader") == "o_direct" and run.device_total < run.answer.read[-1]:
            found.append(f"{name}: the device delivered {run.device_total:,} of {run.answer.read[-1]:,} bytes it read")
    return found


def _wrong(table: list[Row]) -> list[str]:
    """What any of ours does not meet, and tokens that no arm may change."""
    found = [f"{row.arm}: other tokens than the reference" for row in table if row.equal_tokens is False]
    for row in table:
        if row.role == OURS and row.amplification > AMPLIFICATION:
            found.append(f"{row.arm}: read amplification {row.amplification:.3f}, {AMPLIFICATION} allowed")
        if row.role == OURS and row.peak_rss > row.rss_allowed:
            found.append(f"{row.arm}: {row.peak_rss:,} bytes resident, {row.rss_allowed:,} allowed")
    for ours in (row for row in table if row.role == OURS):
        for row in table:
            if row.role == RIVAL and row.rounds and row.seconds_per_token <= ours.seconds_per_token:
                seconds = f"{ours.seconds_per_token:.3f} s a token, {row.arm} {row.seconds_per_token:.3f}"
                found.append(f"{ours.arm}: {seconds}")
    return found
