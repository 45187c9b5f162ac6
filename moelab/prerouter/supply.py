"""Where every layer's route came from, pass by pass: nothing falls back on its gate without being counted.

A layer that a head predicts (a consumer) has one of five sources in a decoded pass; any other layer has its own gate.
A pass in which a consumer named no source, or in which experts of a route were not computed, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np

from ..errors import ContractError

__all__ = ["Source", "Supply"]


class Source(IntEnum):
    """Of the route of one layer in one decoded pass."""

    GATE = 0
    """Its own gate: no head predicts this layer, or predictions are off."""
    PREDICTION = 1
    """The prediction was the route."""
    ADVISED = 2
    """Its own gate; a prediction moved bytes."""
    DECLINED = 3
    """Its own gate; the prediction was not sure enough."""
    START = 4
    """Its own gate: nothing of this request lies before the pass (a prompt of one token)."""


class Supply:
    """The supply map.

    Attributes:
        counts: `i64[L, sources]`, decoded passes since the prerouter was installed.
    """

    def __init__(self, layers: int, consumers: Sequence[int]):
        self.layers, self.consumers = layers, tuple(consumers)
        self.counts = np.zeros((layers, len(Source)), np.int64)
        self._rows: list[np.ndarray] = []
        self._named: dict[int, Source] = {}

    def begin(self) -> None:
        """A pass begins."""
        self._named.clear()

    def name(self, layer: int, source: Source) -> None:
        """A consumer's source in this pass."""
        self._named[layer] = source

    def source(self, layer: int) -> Source:
        """Of a layer in this pass, as far as it is named."""
        return self._named.get(layer, Source.GATE)

    def end(self, dropped: Mapping[int, int]) -> None:
        """A decoded pass is over. `dropped`: layer → pairs whose expert was not computed in it.

        Raises:
            ContractError: a consumer without a source, or a dropped expert in any layer.
        """
        if silent := [layer for layer in self.consumers if layer not in self._named]:
            raise ContractError(
                "a consumer's turn went by without its prediction", field="MoE layers", got=silent, expected=[]
            )
        if any(dropped.values()):
            raise ContractError(
                "experts of the route were not computed", field="dropped by MoE layer",
                got={layer: count for layer, count in dropped.items() if count}, expected="0 in every layer",
            )  # fmt: skip
        self._record(self._named)

    def plain(self) -> None:
        """A decoded pass without predictions is over."""
        self._record({})

    def _record(self, named: Mapping[int, Source]) -> None:
        row = np.zeros(self.layers, np.uint8)
        for layer, source in named.items():
            row[layer] = source
        self.counts[np.arange(self.layers), row] += 1
        self._rows.append(row)

    def reset(self) -> None:
        """A new request: its map is empty. `counts` go on."""
        self._rows.clear()
        self._named.clear()

    @property
    def map(self) -> np.ndarray:
        """`u8[T, L]`: the source of each layer in each decoded pass of this request."""
        return np.array(self._rows, np.uint8).reshape(len(self._rows), self.layers)

    def fed(self) -> bool:
        """Every consumer had a prediction in every decoded pass of this request, from the first on."""
        told = (Source.PREDICTION, Source.ADVISED, Source.DECLINED)
        return bool(np.isin(self.map[:, list(self.consumers)], told).all())
