"""Routing policies: which specialists a token runs, and what becomes of their outputs.

A policy lies between evidence and execution. A router gives every specialist a calibrated score; a
selection compares the scores with the anchor's fixed zero; a capacity rule takes out what is
unavailable; dispatch runs what is left; a combination mixes the outputs. Policies are pure: they
extract no features, fit no scores, install nothing, estimate no load and record no telemetry.

    selection      anchored top-1, anchor-veto top-2, adaptive top-1/top-2, dynamic-k
    hierarchy      a package against the anchor, then specialists inside it
    compatibility  top-2 among pairs that are known to work together
    capacity       overflow to the anchor, promotion of survivors
    combination    softmax, equal, positive evidence, always-on anchor
    mixture_head   a learned head, with its offline fit
    lora           merging parameters instead of outputs
    degrade        a native route whose late experts are left to the anchor
    dispatch       grouped sparse execution, on tokens as rows
    telemetry      load, overflow, arity and regret, after the fact
    config         policies as strict JSON
"""

from moelab.policies.capacity import Capacity, OverflowToAnchorCapacity, PromoteSurvivorsCapacity
from moelab.policies.combination import (
    AlwaysOnAnchorCombination,
    Combination,
    EqualCombination,
    Mixture,
    PositiveEvidenceCombination,
    ScoreSoftmaxCombination,
    UnitWeights,
)
from moelab.policies.compatibility import CompatibilityIndex, CompatibilityTop2Selection
from moelab.policies.config import PolicyConfig, PolicyManifest
from moelab.policies.decisions import CapacityResult, Decision, Top1Decision, TopKDecision
from moelab.policies.degrade import DegradedRoutes, degrade
from moelab.policies.dispatch import DispatchResult, SparseDispatcher
from moelab.policies.hierarchy import HierarchicalDecision, HierarchicalSelection
from moelab.policies.lora import LoRAMergeDispatcher, LoRASpecialist, LoRAUpdate
from moelab.policies.mixture_head import LearnedMixtureCombination, fit_mixture_head
from moelab.policies.selection import (
    AdaptiveTop1Top2Selection,
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    DynamicKSelection,
    Selection,
)
from moelab.policies.telemetry import (
    RouteTelemetry,
    arity_histogram,
    expert_load,
    expert_overflow,
    measure,
    regret,
)

__all__ = [
    "AdaptiveTop1Top2Selection",
    "AlwaysOnAnchorCombination",
    "AnchorVetoTop2Selection",
    "AnchoredTop1Selection",
    "Capacity",
    "CapacityResult",
    "Combination",
    "CompatibilityIndex",
    "CompatibilityTop2Selection",
    "Decision",
    "DegradedRoutes",
    "DispatchResult",
    "DynamicKSelection",
    "EqualCombination",
    "HierarchicalDecision",
    "HierarchicalSelection",
    "LearnedMixtureCombination",
    "LoRAMergeDispatcher",
    "LoRASpecialist",
    "LoRAUpdate",
    "Mixture",
    "OverflowToAnchorCapacity",
    "PolicyConfig",
    "PolicyManifest",
    "PositiveEvidenceCombination",
    "PromoteSurvivorsCapacity",
    "RouteTelemetry",
    "ScoreSoftmaxCombination",
    "Selection",
    "SparseDispatcher",
    "Top1Decision",
    "TopKDecision",
    "UnitWeights",
    "arity_histogram",
    "degrade",
    "expert_load",
    "expert_overflow",
    "fit_mixture_head",
    "measure",
    "regret",
]
