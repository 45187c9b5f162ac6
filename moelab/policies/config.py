"""Policies as JSON: a configuration says which policies route a layer, a manifest which layers.

Every policy is a frozen dataclass of plain values, so its JSON is its name and its fields, nested
where a policy holds another. The form is strict: each field must be there, no other may be, and the
values pass the same checks as in code. What is read equals what was written.

    {"capacity": {"name": "promote_survivors"}, "combination": {"name": "score_softmax"},
     "execution": "outputs", "selection": {"mixture_threshold": 0.5, "name": "adaptive_top1_top2"},
     "version": 1}

An infinite threshold is written "inf", since JSON has no infinity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moelab.errors import PolicyError
from moelab.policies._validate import check_choice, check_count, check_kind
from moelab.policies.capacity import Capacity, OverflowToAnchorCapacity, PromoteSurvivorsCapacity
from moelab.policies.combination import (
    AlwaysOnAnchorCombination,
    Combination,
    EqualCombination,
    PositiveEvidenceCombination,
    ScoreSoftmaxCombination,
    UnitWeights,
)
from moelab.policies.compatibility import CompatibilityIndex, CompatibilityTop2Selection
from moelab.policies.decisions import Top1Decision
from moelab.policies.dispatch import SparseDispatcher
from moelab.policies.hierarchy import HierarchicalSelection
from moelab.policies.lora import LoRAMergeDispatcher
from moelab.policies.mixture_head import LearnedMixtureCombination
from moelab.policies.selection import (
    AdaptiveTop1Top2Selection,
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    DynamicKSelection,
    Selection,
)

VERSION = 1

POLICIES: dict[str, type] = {
    "anchored_top1": AnchoredTop1Selection,
    "anchor_veto_top2": AnchorVetoTop2Selection,
    "adaptive_top1_top2": AdaptiveTop1Top2Selection,
    "hierarchical": HierarchicalSelection,
    "compatibility_top2": CompatibilityTop2Selection,
    "compatibility_index": CompatibilityIndex,
    "dynamic_k": DynamicKSelection,
    "overflow_to_anchor": OverflowToAnchorCapacity,
    "promote_survivors": PromoteSurvivorsCapacity,
    "score_softmax": ScoreSoftmaxCombination,
    "equal": EqualCombination,
    "positive_evidence": PositiveEvidenceCombination,
    "unit_weights": UnitWeights,
    "learned_mixture": LearnedMixtureCombination,
    "always_on_anchor": AlwaysOnAnchorCombination,
}
_NAMES = {policy: name for name, policy in POLICIES.items()}
_DISPATCHERS = {"outputs": SparseDispatcher, "parameters": LoRAMergeDispatcher}


@dataclass(frozen=True)
class PolicyConfig:
    """The policies of one layer.

    selection, capacity, combination: a policy of each kind.
    execution: `"outputs"` mixes what the specialists compute, `"parameters"` merges their LoRA
        updates first.
    """

    selection: Selection = field(default_factory=AdaptiveTop1Top2Selection)
    capacity: Capacity = field(default_factory=PromoteSurvivorsCapacity)
    combination: Combination = field(default_factory=ScoreSoftmaxCombination)
    execution: str = "outputs"

    def __post_init__(self):
        for name, kind in (("selection", Selection), ("capacity", Capacity), ("combination", Combination)):
            policy = getattr(self, name)
            if not isinstance(policy, kind) or type(policy) not in _NAMES:
                got = type(policy).__name__
                raise PolicyError(f"{name} is not a policy", field=name, got=got, expected=f"a {kind.__name__}")
        check_choice("execution", self.execution, tuple(_DISPATCHERS))
        if isinstance(self.capacity, OverflowToAnchorCapacity) and self.selection.decision_type is not Top1Decision:
            got = type(self.selection).__name__
            raise PolicyError("capacity is for top-1 only", field="capacity", got=got, expected="a top-1 selection")
        self.build()

    def build(self) -> SparseDispatcher:
        """The dispatcher that runs these policies."""
        return _DISPATCHERS[self.execution](self.selection, self.capacity, self.combination)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in JSON."""
        parts = {part.name: _encode(getattr(self, part.name)) for part in fields(self)}
        return {"version": VERSION, **parts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicyConfig:
        """The inverse of `to_dict`. Raises `PolicyError` for anything that it would not write."""
        _check_fields("policy config", data, {"version", *(part.name for part in fields(cls))})
        _check_version(data)
        return cls(**{name: _decode(name, value) for name, value in data.items() if name != "version"})

    def to_json(self) -> str:
        """Canonical JSON: the same policies give the same text."""
        return _dump(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> PolicyConfig:
        """Read what `to_json` wrote. Raises `PolicyError` for any unknown, missing or wrong field."""
        return cls.from_dict(_load(text))


@dataclass(frozen=True)
class PolicyManifest:
    """Which policies route which layers of which model.

    base_digest: digest of the dense model that the specialists were made for.
    layers: by layer number; a layer that is not here keeps its own MLP.
    """

    base_digest: str
    layers: Mapping[int, PolicyConfig]

    def __post_init__(self):
        if not isinstance(self.base_digest, str) or not self.base_digest:
            raise PolicyError("no base digest", field="base_digest", got=self.base_digest, expected="a digest")
        check_kind("layers", self.layers, Mapping)
        for layer, config in self.layers.items():
            check_count("layers", layer, least=0)
            if not isinstance(config, PolicyConfig):
                got = type(config).__name__
                raise PolicyError("not a config", field=f"layers[{layer}]", got=got, expected="PolicyConfig")

    def to_json(self) -> str:
        """Canonical JSON."""
        layers = {str(layer): config.to_dict() for layer, config in self.layers.items()}
        return _dump({"version": VERSION, "base_digest": self.base_digest, "layers": layers})

    @classmethod
    def from_json(cls, text: str) -> PolicyManifest:
        """Read what `to_json` wrote. Raises `PolicyError` for any unknown, missing or wrong field."""
        data = _load(text)
        _check_fields("policy manifest", data, {"version", "base_digest", "layers"})
        _check_version(data)
        if not isinstance(data["layers"], dict):
            got = type(data["layers"]).__name__
            raise PolicyError("layers is not an object", field="layers", got=got, expected="an object")
        for name in data["layers"]:
            if not name.isdecimal() or str(int(name)) != name:
                raise PolicyError("not a layer number", field="layers", got=name, expected="a number such as '3'")
        return cls(data["base_digest"], {int(n): PolicyConfig.from_dict(c) for n, c in data["layers"].items()})


def _encode(value: Any) -> Any:
    if type(value) in _NAMES:
        return {
            "name": _NAMES[type(value)],
            **{part.name: _encode(getattr(value, part.name)) for part in fields(value)},
        }
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return "inf" if value == math.inf else value


def _decode(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        name_given = value.get("name")
        policy = POLICIES.get(name_given) if isinstance(name_given, str) else None
        if policy is None:
            expected = " or ".join(map(repr, POLICIES))
            raise PolicyError(f"{name} names no policy", field=name, got=name_given, expected=expected)
        types = {part.name: part.type for part in fields(policy)}
        _check_fields(value["name"], value, {"name", *types})
        return policy(
            **{
                part: math.inf if kind == "float" and value[part] == "inf" else _decode(part, value[part])
                for part, kind in types.items()
            }
        )
    if isinstance(value, list):
        return tuple(_decode(name, item) for item in value)
    return value


def _check_fields(what: str, data: Any, expected: set[str]) -> None:
    if not isinstance(data, dict):
        raise PolicyError(f"{what} is not an object", field=what, got=type(data).__name__, expected="an object")
    for kind, names in (("unknown", data.keys() - expected), ("missing", expected - data.keys())):
        if names:
            raise PolicyError(f"{what} has {kind} fields", field=what, got=sorted(names), expected=sorted(expected))


def _check_version(data: dict[str, Any]) -> None:
    if type(data["version"]) is not int or data["version"] != VERSION:
        raise PolicyError("unknown version", field="version", got=data["version"], expected=VERSION)


def _dump(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, allow_nan=False, ensure_ascii=False)


def _load(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise PolicyError("not JSON", field="text", got=str(error), expected="a JSON object") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise PolicyError(
            "a field is repeated", field="text", got=[name for name, _ in pairs], expected="distinct names"
        )
    return data


def _no_constant(name: str) -> None:
    raise PolicyError("not a JSON number", field="text", got=name, expected="a finite number")
