"""Which layer predicts which: the double shift, its indices, and the known tiers.

A head *owned* by layer N reads what layer N knows at token t and predicts its *consumer*, layer N+1, at token
t+1. Layers are counted as the model counts them (decoder layers, dense ones included), as the keys of weight
files do; `Wiring` also gives their place among the MoE layers, which is how routes and caches count.

A layer at or behind `start_layer` is *flagged* as a consumer. If no head predicts it, it would quietly go on using
its own gate: that is an error here, unless `gate_layers` says so. (edge0-8b starts at layer 7 and has no head in
layer 6, so layer 7 is such a layer.)

Source: edge0, "prerouter: cross-token routing prediction".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import GeometryError, ParameterError

KINDS = ("SOFTMAX_TOPK", "SIGMOID_GROUP")
DTYPES = {"fp16": "float16", "fp32": "float32"}
FEATURE_TOPK = ("executed", "teacher")


@dataclass(frozen=True, kw_only=True)
class PrerouterSpec:
    """What is installed where.

    Attributes:
        kind: routing family that logits are turned into routes with.
        start_layer: first layer that may consume a prediction.
        hidden: width of the heads. dtype: of their weights.
        feature_topk: whose experts the heads are told: those the layer `executed` (in replacing modes its own
            prediction) or those that the `teacher`, the native gate, would choose.
        owners: layers with a head; None = `range(start_layer - 1, n_layers - 1)`.
        weights_file: name of the file, looked up by `files.find_weights`.
        patch_call: whether the block's class is patched (True) or the block has a hook of its own.
        gate_layers: flagged layers that no head predicts and that keep their gate on purpose.
    """

    kind: str = "SOFTMAX_TOPK"
    start_layer: int = 7
    hidden: int = 512
    dtype: str = "fp16"
    feature_topk: str = "executed"
    owners: tuple[int, ...] | None = None
    weights_file: str = ""
    patch_call: bool = False
    gate_layers: tuple[int, ...] = ()

    def __post_init__(self):
        for name, allowed in (("kind", KINDS), ("dtype", tuple(DTYPES)), ("feature_topk", FEATURE_TOPK)):
            if getattr(self, name) not in allowed:
                raise ParameterError("unknown choice", field=name, got=getattr(self, name), expected=allowed)
        for name in ("start_layer", "hidden"):
            if not _is_count(value := getattr(self, name)) or value < 1:
                raise ParameterError("not a positive integer", field=name, got=value, expected=">= 1")
        for name in ("patch_call",):
            if type(getattr(self, name)) is not bool:
                raise ParameterError("not a switch", field=name, got=getattr(self, name), expected="True or False")
        for name in ("owners", "gate_layers"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _layers(name, value))

    def wiring(self, layer_ids: Sequence[int], n_layers: int | None = None) -> Wiring:
        """Owners and consumers on a model with MoE in `layer_ids`, of `n_layers` decoder layers (default: up to the
        last MoE layer).

        Raises:
            GeometryError: no owner; an owner or a consumer that is no MoE layer; a consumer in front of
                `start_layer`; a flagged layer that nothing predicts, or one in `gate_layers` that is not such.
        """
        layer_ids = _layers("layer_ids", layer_ids)
        count = layer_ids[-1] + 1 if n_layers is None else n_layers
        owners = tuple(range(self.start_layer - 1, count - 1)) if self.owners is None else self.owners
        moe = set(layer_ids)
        if not owners:
            raise GeometryError(
                "no layer has a head", field="owners", got=owners, expected=f"start_layer <= {count - 1} of this model"
            )
        for owner in owners:
            if owner not in moe or owner + 1 not in moe:
                where = "owner" if owner not in moe else "consumer"
                raise GeometryError(
                    f"{where} is no MoE layer of this model",
                    field="owners",
                    got=f"layer {owner} predicting layer {owner + 1}",
                    expected=f"both among {_span(layer_ids)}",
                )
        early = [owner for owner in owners if owner + 1 < self.start_layer]
        if early:
            raise GeometryError(
                "nobody would read the prediction: its consumer lies in front of start_layer",
                field="owners",
                got=early,
                expected=f">= start_layer - 1 = {self.start_layer - 1}",
            )
        alone = tuple(n for n in layer_ids if n >= self.start_layer and n - 1 not in owners)
        if missing := sorted(set(alone) - set(self.gate_layers)):
            raise GeometryError(
                "flagged as a consumer, but no head predicts it",
                field="start_layer, owners",
                got=missing,
                expected=f"an owner {missing[0] - 1}, or {missing[0]} in gate_layers",
            )
        if wrong := sorted(set(self.gate_layers) - set(alone)):
            raise GeometryError(
                "not a flagged layer without a prediction", field="gate_layers", got=wrong, expected=list(alone)
            )
        return Wiring(owners, layer_ids)


@dataclass(frozen=True)
class Wiring:
    """A spec on one model. All layers are decoder layers unless they say `index`, which is among MoE layers."""

    owners: tuple[int, ...]
    layer_ids: tuple[int, ...]

    @cached_property
    def consumers(self) -> tuple[int, ...]:
        return tuple(owner + 1 for owner in self.owners)

    @cached_property
    def owner_index(self) -> tuple[int, ...]:
        return tuple(self.layer_ids.index(layer) for layer in self.owners)

    @cached_property
    def consumer_index(self) -> tuple[int, ...]:
        return tuple(self.layer_ids.index(layer) for layer in self.consumers)

    @cached_property
    def gated(self) -> tuple[int, ...]:
        """MoE layers that no head predicts: they always use their own gate."""
        return tuple(layer for layer in self.layer_ids if layer not in self.consumers)

    def __len__(self) -> int:
        return len(self.owners)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A spec and the model it was made for.

    `layer_ids[L]` MoE layers, `experts` E, `native_top_k` and `top_k` K (as trained, as used), `width` H,
    `groups` and `kept_groups` of the router, `scale` of its weights, `expert_bytes` of one expert as released,
    `weights_bytes` of the released head file.
    """

    name: str
    model_type: str
    spec: PrerouterSpec
    layers: int
    layer_ids: tuple[int, ...]
    experts: int
    native_top_k: int
    top_k: int
    width: int
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    expert_bytes: int | None = None
    weights_bytes: int | None = None
    aliases: tuple[str, ...] = field(default=())

    @property
    def feature_width(self) -> int:
        """F = H + 2E."""
        return self.width + 2 * self.experts

    @cached_property
    def wiring(self) -> Wiring:
        return self.spec.wiring(self.layer_ids, self.layers)

    @property
    def head_parameters(self) -> int:
        """Of one head: fc1 [D,F], fc2 [E,D], linear_init [E,F]."""
        D, E, F = self.spec.hidden, self.experts, self.feature_width
        return D * F + E * D + E * F


def edge0_35b() -> Tier:
    """Qwen3.5-35B-A3B: 33 heads in layers 6 to 38, four experts a token instead of the native eight."""
    return Tier(
        name="edge0-35b",
        model_type="qwen3_5_moe",
        spec=PrerouterSpec(
            kind="SOFTMAX_TOPK",
            start_layer=7,
            owners=tuple(range(6, 39)),
            weights_file="prerouter_edge0_35b.safetensors",
            patch_call=True,
        ),
        layers=40,
        layer_ids=tuple(range(40)),
        experts=256,
        native_top_k=8,
        top_k=4,
        width=2048,
        expert_bytes=1_769_472,
        weights_bytes=138_422_000,
        aliases=("qwen3_5_moe", "qwen3_5_moe_text"),
    )


def edge0_8b() -> Tier:
    """Ling 3.0 tiny: 16 heads in layers 7 to 22. Layer 7 is flagged and has no head: it keeps its gate."""
    return Tier(
        name="edge0-8b",
        model_type="bailing_hybrid",
        spec=PrerouterSpec(
            kind="SIGMOID_GROUP",
            start_layer=7,
            owners=tuple(range(7, 23)),
            weights_file="prerouter_edge0_8b.safetensors",
            gate_layers=(7,),
        ),
        layers=24,
        layer_ids=tuple(range(1, 24)),
        experts=128,
        native_top_k=8,
        top_k=8,
        width=1536,
        groups=8,
        kept_groups=4,
        scale=2.5,
        expert_bytes=1_327_104,
        weights_bytes=38_802_304,
        aliases=("bailing_hybrid", "bailing_moe_linear"),
    )


TIERS = {"edge0-35b": edge0_35b, "edge0-8b": edge0_8b}


def scaled(
    name: str,
    *,
    kind: str,
    layer_ids: Sequence[int],
    experts: int,
    top_k: int,
    width: int,
    hidden: int = 512,
    model_type: str = "",
    **router: float,
) -> Tier:
    """A tier like edge0's for another model: every MoE layer but the last has a head, of edge0's width by default.

    The first MoE layer has no layer before it and keeps its gate. `router`: `groups`, `kept_groups`, `scale`.
    """
    layer_ids = _layers("layer_ids", layer_ids)
    if len(layer_ids) < 2 or layer_ids != tuple(range(layer_ids[0], layer_ids[-1] + 1)):
        raise GeometryError("needs consecutive MoE layers", field="layer_ids", got=layer_ids, expected="two or more")
    return Tier(
        name=name,
        model_type=model_type,
        spec=PrerouterSpec(
            kind=kind,
            start_layer=layer_ids[1],
            hidden=hidden,
            weights_file="prerouter.safetensors",
            patch_call=kind == "SOFTMAX_TOPK",
        ),
        layers=layer_ids[-1] + 1,
        layer_ids=layer_ids,
        experts=experts,
        native_top_k=top_k,
        top_k=top_k,
        width=width,
        **router,
    )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _layers(name: str, value: Sequence[int]) -> tuple[int, ...]:
    try:
        layers = tuple(value)
    except TypeError:
        raise ParameterError("not a list of layers", field=name, got=value, expected="layer numbers") from None
    if not all(_is_count(layer) for layer in layers) or any(a >= b for a, b in zip(layers, layers[1:], strict=False)):
        raise ParameterError("layers out of order", field=name, got=layers, expected="ascending numbers, none twice")
    return layers


def _span(layers: Sequence[int]) -> str:
    whole = tuple(range(layers[0], layers[-1] + 1)) == tuple(layers)
    return f"{layers[0]} to {layers[-1]}" if whole else str(list(layers))
