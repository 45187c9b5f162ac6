"""Predictors that know the answer: what prefetch could give, before anyone has trained anything.

A predictor is a callable `(pass, layer) -> [(layer, expert, confidence), …]`, asked when that layer's route is
known. These look it up in the recorded future: `Oracle` says exactly what comes `lead` visits later,
`NoisyOracle` is right as often as it is told to be, and `PreviousToken` knows only the past (a layer's next
route is its last one), the simplest control that costs nothing.
"""

from __future__ import annotations

import random

from ...errors import ContractError
from .passes import Passes

__all__ = ["Candidate", "NoisyOracle", "Oracle", "PreviousToken"]

Candidate = tuple[int, int, float]
"""Layer, expert, confidence (the probability that it will be used)."""


class Oracle:
    """Exactly the experts of the visit `lead` visits ahead, with confidence 1.

    Args:
        passes: the recording.
        lead: visits ahead: 1 is the next layer, L the same layer of the next pass. Before the end, nothing.
    """

    def __init__(self, passes: Passes, *, lead: int = 1):
        if lead < 1:
            raise ContractError("a prediction is of the future", field="lead", got=lead, expected=">= 1")
        self.passes, self.lead = passes, lead

    def _truth(self, step: int, layer: int) -> tuple[int, list[int]]:
        """Target layer and its experts; no expert beyond the end of the recording."""
        ahead, target = divmod(layer + self.lead, self.passes.layers)
        if step + ahead >= len(self.passes):
            return target, []
        return target, [key - target * self.passes.experts for key in self.passes.keys[step + ahead][target]]

    def __call__(self, step: int, layer: int) -> list[Candidate]:
        target, experts = self._truth(step, layer)
        return [(target, expert, 1.0) for expert in experts]


class NoisyOracle(Oracle):
    """Each expert of the visit ahead with probability `recall`, hidden among wrong ones.

    For each right candidate there are (1 - precision) / precision wrong ones on average, drawn from the layer's
    other experts; all carry `precision` as confidence, which is then calibrated. The same seed gives the same
    candidates, whatever is asked in between.

    Raises:
        ContractError: recall outside [0, 1], or precision outside (0, 1].
    """

    def __init__(self, passes: Passes, *, lead: int = 1, recall: float, precision: float, seed: int = 0):
        super().__init__(passes, lead=lead)
        if not (0 <= recall <= 1 and 0 < precision <= 1):
            raise ContractError(
                "no such predictor", field="recall, precision", got=(recall, precision), expected="[0, 1], (0, 1]"
            )
        self.recall, self.precision, self.seed = recall, precision, seed

    def __call__(self, step: int, layer: int) -> list[Candidate]:
        target, truth = self._truth(step, layer)
        rng = random.Random(f"{self.seed} {step} {layer}")
        told = [expert for expert in truth if rng.random() < self.recall]
        wanted = len(told) * (1 - self.precision) / self.precision
        others = [expert for expert in range(self.passes.experts) if expert not in truth]
        count = min(int(wanted) + (rng.random() < wanted % 1), len(others))
        told += rng.sample(others, count)
        rng.shuffle(told)
        return [(target, expert, self.precision) for expert in told]


class PreviousToken:
    """A layer's experts now, for its next visit: the training-free control. Horizon one token (lead L)."""

    def __init__(self, passes: Passes, *, confidence: float = 0.4):
        self.passes, self.confidence = passes, confidence

    def __call__(self, step: int, layer: int) -> list[Candidate]:
        first = layer * self.passes.experts
        return [(layer, key - first, self.confidence) for key in self.passes.keys[step][layer]]
