"""From predictions to reads: what is worth a ticket, and what became of it.

Any predictor will do: it names candidates `(layer, expert, confidence)`. A `Prefetcher` turns them into tickets for the
scheduler, the most confident first, as long as a step's byte budget lasts (flash that is saturated by predictions loses
more than they gain, so bytes are a first-class constraint), and tells the cache to keep those that are resident
already. A prediction only ever moves bytes; what is executed is the router's choice.

Every candidate is counted: issued, or suppressed and why. Every ticket has one fate in the end:

    useful       read ahead and resident when its expert was asked for
    late         being read when it was asked for: the layer had to wait for the rest
    overtaken    asked for before its read began, so demand read it; right, and without any lead
    wasted       read, and evicted (or dropped at the end) before anyone asked for it
    withdrawn    cancelled, expired or without a slot; no byte was read for it
    failed       its read failed

Timely recall = exact selected experts ready before the deadline ÷ exact selected experts; useful prefetch ratio =
predicted physical bytes consumed ÷ predicted physical bytes read; byte amplification = total physical expert bytes ÷
accepted output tokens (`Counters.byte_amplification`). Timely *miss* recall leaves out what the cache held anyway: it
is what the predictor earned. Source: AFN-021.

One caller at a time, with the lock that guards cache and scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any

from ...errors import ContractError
from ..cache.cache import Cache
from .schedule import P0, P1, P2, Scheduler, Ticket

__all__ = ["FATES", "ISSUE", "REASONS", "PrefetchCounters", "Prefetcher"]

ISSUE = ("in_forward", "async_boundary", "step_boundary")
"""When a prediction may ask: inside the pass, or after it beside the next pass or before it."""

REASONS = ("confidence", "resident", "on_its_way", "too_late", "budget")
"""Why a candidate got no ticket, in the order in which they are asked."""
FATES = ("useful", "late", "overtaken", "wasted", "withdrawn", "failed")


@dataclass
class PrefetchCounters:
    """Sums since the start."""

    candidates: int = 0
    issued: int = 0
    issued_bytes: int = 0
    raised: int = 0
    """Tickets for a key that another, less urgent ticket was to read already."""
    suppressed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    fate: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    fate_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))
    selected: int = 0
    """Experts asked for in the visits observed."""
    ready: int = 0
    """Of these, resident when asked for."""
    ready_by_prefetch: int = 0
    """Of these, because this prefetcher had read them, and for the first time since."""

    @property
    def timely_recall(self) -> float:
        """Experts ready ÷ experts selected, whoever made them ready; nan without any."""
        return _ratio(self.ready, self.selected)

    @property
    def timely_miss_recall(self) -> float:
        """Ready by prefetch ÷ (ready by prefetch + not ready): of what the cache alone lacked; nan without any."""
        return _ratio(self.ready_by_prefetch, self.ready_by_prefetch + self.selected - self.ready)

    @property
    def read_bytes(self) -> int:
        """Bytes read ahead whose fate is known."""
        return sum(self.fate_bytes[fate] for fate in ("useful", "late", "wasted", "failed"))

    @property
    def useful_prefetch_ratio(self) -> float:
        """Predicted physical bytes consumed ÷ predicted physical bytes read; nan if none was read."""
        return _ratio(self.fate_bytes["useful"] + self.fate_bytes["late"], self.read_bytes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _number_below(value: Any, end: int) -> bool:
    """A whole number of whatever type, from 0 on."""
    return hasattr(value, "__index__") and 0 <= value < end


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


class Prefetcher:
    """Tickets for a predictor's candidates, and their fates (see the module text).

    Args:
        cache, scheduler: those that the tickets are for; asked, and told what to protect.
        nbytes: `[L]`, bytes of a read of each layer.
        byte_budget: bytes of tickets a step at most.
        threshold: least confidence for a ticket or protection.
        priority: P1, or P2 for what is far ahead.
        owner: of the tickets; one prefetcher an owner.
        protect: whether predictions protect residents from eviction (`Cache.expect`).

    Attributes:
        step: number of steps begun; the tickets' generation.
        counters: `PrefetchCounters`.

    Raises:
        ContractError: a threshold outside [0, 1], a negative budget, or P0.
    """

    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        *,
        nbytes: Sequence[int],
        byte_budget: int,
        threshold: float = 0.0,
        priority: int = P1,
        owner: str = "prefetch",
        protect: bool = True,
    ):
        if not 0 <= threshold <= 1 or byte_budget < 0 or priority not in (P1, P2) or len(nbytes) != cache.layers:
            raise ContractError(
                "no such prefetcher", field="threshold, byte_budget, priority, nbytes",
                got=(threshold, byte_budget, priority, len(nbytes)), expected=f"[0, 1], >= 0, P1 or P2, {cache.layers}",
            )  # fmt: skip
        self.cache, self.scheduler, self.nbytes = cache, scheduler, tuple(int(n) for n in nbytes)
        self.byte_budget, self.threshold, self.priority = byte_budget, threshold, priority
        self.owner, self.protect = owner, protect
        self.step, self.left = 0, byte_budget
        self.counters = PrefetchCounters()
        self._open: dict[int, Ticket] = {}  # key -> ticket whose fate is not known

    def begin_step(self) -> None:
        """A new pass: the byte budget is whole again."""
        self.step += 1
        self.left = self.byte_budget

    def tickets(
        self,
        candidates: Iterable[tuple[int, int, float]],
        now: float,
        *,
        due: Callable[[int], float] | None = None,
        passes_ahead: int = 0,
    ) -> list[Ticket]:
        """Tickets to submit at once, most confident first (of equals, the nearest layer).

        Args:
            candidates: layer, expert, confidence in [0, 1]; named twice, the higher confidence counts.
            now: seconds, of the scheduler's clock.
            due: layer -> seconds when its visit is due; None = not known. What is due by `now` gets no ticket.
            passes_ahead: 0 = for each layer's next visit, n = for the n-th after it.

        Raises:
            ContractError: no such layer, expert or confidence.
        """
        named = self.named(candidates)
        return self.tickets_of(named, self.deadlines(named, due), now, passes_ahead=passes_ahead)

    def named(self, candidates: Iterable[tuple[int, int, float]]) -> dict[int, float]:
        """Key -> confidence of candidates. Looks at nothing that changes, so it needs no lock. Raises as `tickets`."""
        layers, experts = self.cache.layers, self.cache.experts
        best: dict[int, float] = {}
        for layer, expert, confidence in candidates:
            if not (_number_below(layer, layers) and _number_below(expert, experts) and 0 <= confidence <= 1):
                raise ContractError(
                    "no such candidate", field="candidates", got=(layer, expert, confidence),
                    expected=f"ints < {layers} and < {experts}, [0, 1]",
                )  # fmt: skip
            key = index(layer) * experts + index(expert)
            best[key] = max(best.get(key, 0.0), float(confidence))
        return best

    def deadlines(self, named: Iterable[int], due: Callable[[int], float] | None) -> dict[int, float]:
        """Seconds by layer of these keys; inf = none is known. No lock either."""
        layers = {key // self.cache.experts for key in named}
        return dict.fromkeys(layers, math.inf) if due is None else {layer: due(layer) for layer in layers}

    def tickets_of(
        self, named: Mapping[int, float], deadlines: Mapping[int, float], now: float, *, passes_ahead: int = 0
    ) -> list[Ticket]:
        """`tickets` of what `named` and `deadlines` made of the candidates."""
        experts, ahead, out = self.cache.experts, passes_ahead * self.cache.layers, []
        visits = {key: self.cache.next_visit(key // experts) + ahead for key in named}
        for key in sorted(named, key=lambda key: (-named[key], visits[key], key)):
            self.counters.candidates += 1
            layer, confidence = key // experts, named[key]
            deadline = deadlines[layer]
            reason = self._suppressed(key, layer, confidence, deadline, now)
            if reason != "confidence" and self.protect:
                self.cache.expect((key,), visits[key])
            if reason is None:
                out.append(self._issue(key, layer, confidence, deadline, visits[key]))
            else:
                self.counters.suppressed[reason] += 1
        return out

    def _suppressed(self, key: int, layer: int, confidence: float, deadline: float, now: float) -> str | None:
        if confidence < self.threshold:
            return "confidence"
        if self.cache.slot(key) is not None:
            return "resident"
        live = self.scheduler.ticket(key)
        if live is not None and live.priority <= self.priority or self.cache.in_flight(key) is not None:
            return "on_its_way"
        if deadline <= now:
            return "too_late"
        if live is None and self.nbytes[layer] > self.left:
            return "budget"
        return None

    def _issue(self, key: int, layer: int, confidence: float, deadline: float, visit: int) -> Ticket:
        ticket = Ticket(
            key=key, layer=layer, priority=self.priority, owner=self.owner, generation=self.step, deadline=deadline,
            nbytes=self.nbytes[layer], confidence=confidence, visit=visit,
        )  # fmt: skip
        if self.scheduler.ticket(key) is not None:
            self.counters.raised += 1
            return ticket
        self._settle(key, asked=False)  # an earlier ticket of this key: what it read is gone
        self.left -= ticket.nbytes
        self.counters.issued += 1
        self.counters.issued_bytes += ticket.nbytes
        self._open[key] = ticket
        return ticket

    def observe(self, keys: Sequence[int], hits: Sequence[bool]) -> None:
        """A visit asked for these keys, and these were resident: what `Cache.visit` took and gave.

        Call it after the visit and before the missing ones are submitted.
        """
        self.counters.selected += len(keys)
        self.counters.ready += sum(hits)
        for key, hit in zip(keys, hits, strict=True):
            if self._settle(key, asked=True, hit=hit) == "useful":
                self.counters.ready_by_prefetch += 1

    def close(self) -> PrefetchCounters:
        """The run is over: what is queued is withdrawn, what nobody asked for yet is wasted. Returns the counters."""
        self.scheduler.cancel(self.owner)
        for key in list(self._open):
            self._settle(key, asked=False)
        return self.counters

    def _settle(self, key: int, *, asked: bool, hit: bool = False) -> str | None:
        """Fate of the open ticket of a key, now that it is asked for, replaced or over; None if there is none."""
        ticket = self._open.pop(key, None)
        if ticket is None:
            return None
        if ticket.state in ("new", "merged", "cancelled", "dropped"):
            fate = "withdrawn"
        elif ticket.state == "failed":
            fate = "failed"
        elif ticket.state == "queued":
            fate = "overtaken" if asked else "withdrawn"
        elif ticket.started_as == P0:
            fate = "overtaken"
        elif not asked or (ticket.state == "done" and not hit):
            fate = "wasted"  # never asked for, or evicted before it was
        else:
            fate = "useful" if hit else "late"
        self.counters.fate[fate] += 1
        self.counters.fate_bytes[fate] += ticket.nbytes
        return fate
