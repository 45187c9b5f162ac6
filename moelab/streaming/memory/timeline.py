"""When each layer of each pass asked, got and used its experts: plain arrays, for gates and the simulator.

Stamps are taken at synchronisations only. On a lazy graph any other time is that of graph building, not
of computing. All are seconds on the engine's clock:

* `issue`: the router's ids are on the host; everything before them has been computed;
* `ready`: all experts of the visit are resident;
* `consume`: the next synchronisation, by which the layer's experts have been used;
* `blocked`: how long the computing thread waited for reads between `issue` and `ready`.

`compute` = consume - issue - blocked: the same visit if no read had ever made it wait. (Where resident
experts are computed during a wait it is a little too small; a run with everything resident has no such
error, and is what deadlines are taken from.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["Timeline"]


@dataclass
class Timeline:
    """Visits in the order they happened. `arrays()` gives numpy columns, one row a visit."""

    step: list[int] = field(default_factory=list)
    layer: list[int] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)
    issue: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    consume: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    """Payload bytes of the visit's demand reads, those already on their way included."""

    def arrive(self, *, step: int, layer: int, phase: int, now: float) -> None:
        self.close(now)
        for column, value in (
            (self.step, step), (self.layer, layer), (self.phase, phase), (self.issue, now), (self.ready, now),
            (self.blocked, 0.0), (self.experts, 0), (self.missing, 0), (self.read_bytes, 0),
        ):  # fmt: skip
            column.append(value)

    def is_open(self, step: int, layer: int) -> bool:
        """Is this visit the last that arrived, and not closed yet?"""
        row = len(self.issue) - 1
        return row >= 0 and len(self.consume) == row and (self.step[row], self.layer[row]) == (step, layer)

    def asked(self, *, experts: int, missing: int, read_bytes: int) -> None:
        self.experts[-1] += experts
        self.missing[-1] += missing
        self.read_bytes[-1] += read_bytes

    def waited(self, seconds: float, now: float) -> None:
        self.blocked[-1] += seconds
        self.ready[-1] = now

    def close(self, now: float) -> None:
        """The last visit has been consumed."""
        if len(self.consume) < len(self.issue):
            self.consume.append(now)

    def clear(self) -> None:
        for column in vars(self).values():
            column.clear()

    def arrays(self) -> dict[str, np.ndarray]:
        """`i32` or `f64` column by name, and `compute`; a visit that is still open is left out."""
        n = len(self.consume)
        columns = {
            name: np.array(values[:n], np.float64 if name in ("issue", "ready", "consume", "blocked") else np.int64)
            for name, values in vars(self).items()
        }
        return {**columns, "compute": columns["consume"] - columns["issue"] - columns["blocked"]}
