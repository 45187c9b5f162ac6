"""Finding the mixture-of-experts blocks of a model, and saying what their gates do.

Structure does most of the work. A decoder layer that contains a switch layer (a module made of stacked
expert projections, `mlx_lm.models.switch_layers`) is a MoE layer; the nearest module around it that has
a `gate` or a `router` is its block; the only `[E, H]` matrix in that gate is the gate weight. What
structure cannot show is the arithmetic (softmax or sigmoid, what a dropped group is masked with, which
of two tied experts is kept), so `SUPPORTED` states it for each mlx-lm file that defines a block. A
family that reuses another one's block needs no entry of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import GeometryError, UnsupportedModelError
from .families import RoutingFamily

GATE_NAMES = ("gate", "router")
BIAS_NAMES = ("e_score_correction_bias", "expert_bias", "router_bias")
NORM_NAMES = ("pre_mlp_layernorm", "pre_ff_layernorm", "ffn_norm", "post_attention_layernorm", "ln", "norm")
"""Names of the norm in front of the MoE block, the more specific ones first."""


def _first(holders: tuple[Any, ...], *names: str, default: Any = None) -> Any:
    for holder in holders:
        for name in names:
            if (value := getattr(holder, name, None)) is not None:
                return value
    return default


def _top_k(*holders: Any) -> int:
    return int(_first(holders, "top_k", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "k"))


def _softmax(keeps: str, **fields: Any) -> Callable[..., RoutingFamily]:
    """Softmax over all experts, then the K highest; normalised where the model's flag says so."""

    def read(block: Any, gate: Any, args: Any) -> RoutingFamily:
        flag = bool(_first((gate, block, args), "norm_topk_prob", default=False))
        return RoutingFamily(top_k=_top_k(gate, block, args), keeps=keeps, **{"normalise": flag, **fields})

    return read


def _chosen(keeps: str, weight: str = "softmax", **fields: Any) -> Callable[..., RoutingFamily]:
    """The K highest raw logits, weighed among themselves."""

    def read(block: Any, gate: Any, args: Any) -> RoutingFamily:
        more = {name: float(_first((block, gate), attribute)) for name, attribute in fields.items()}
        return RoutingFamily(top_k=_top_k(gate, block, args), score="logit", weight=weight, keeps=keeps, **more)

    return read


def _grouped(
    keeps: str = "first",
    *,
    epsilon: float = 0.0,
    dropped: float = 0.0,
    score: str | None = "sigmoid",
    normalise: bool | None = None,
    scaled: bool = True,
    worth: str = "top2",
) -> Callable[..., RoutingFamily]:
    """Scores with a correction bias and, where the configuration asks for it, dropped groups."""

    def read(block: Any, gate: Any, args: Any) -> RoutingFamily:
        at, top_k = (gate, block, args), _top_k(gate, block, args)
        groups = int(_first(at, "n_group", "num_expert_group", default=1) or 1)
        kept = int(_first(at, "topk_group", default=groups) or groups)
        flag = normalise
        if flag is None:
            flag = top_k > 1 and bool(_first(at, "norm_topk_prob", "route_norm", "moe_renormalize", default=False))
        scale = _first(at, "routed_scaling_factor", "route_scale", default=1.0) if scaled else 1.0
        return RoutingFamily(
            top_k=top_k,
            score=score or _first(at, "score_function", "score_func", "moe_router_activation_func"),
            normalise=flag,
            epsilon=epsilon,
            scale=float(scale),
            groups=groups,
            kept_groups=kept if groups > 1 else 1,
            group_score=worth,
            dropped=dropped,
            keeps=keeps,
        )

    return read


def _deepseek_v2(block: Any, gate: Any, args: Any) -> RoutingFamily:
    limited = gate.topk_method == "group_limited_greedy"
    return RoutingFamily(
        top_k=gate.top_k,
        scale=float(gate.routed_scaling_factor),
        groups=gate.n_group if limited else 1,
        kept_groups=gate.topk_group if limited else 1,
        group_score="max",
    )


def _ernie(block: Any, gate: Any, args: Any) -> RoutingFamily:
    return RoutingFamily(top_k=block.k, score=type(block.gate_act).__name__.lower(), normalise=True)


def _laguna(block: Any, gate: Any, args: Any) -> RoutingFamily:
    return RoutingFamily(top_k=gate.top_k, score=gate.score_func, normalise=True, softcap=float(gate.softcap))


SUPPORTED: dict[str, Callable[..., RoutingFamily]] = {
    "Klear": _grouped(scaled=False),
    "afmoe": _grouped(score=None),
    "bailing_hybrid": _grouped(epsilon=1e-20, dropped=-np.inf, score=None),
    "bailing_moe": _grouped("last", epsilon=1e-20, score=None),
    "bailing_moe_linear": _grouped(score=None),
    "bailing_moe_v3": _grouped(epsilon=1e-20, dropped=-np.inf, normalise=True),
    "deepseek": _softmax("first", normalise=False),
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _grouped(),
    "deepseek_v32": _grouped(),
    "dots1": _grouped(),
    "ernie4_5_moe": _ernie,
    "exaone_moe": _grouped(epsilon=1e-20),
    "glm4_moe": _grouped(),
    "glm4_moe_lite": _grouped(epsilon=1e-20),
    "gpt_oss": _chosen("last"),
    "granitemoe": _chosen("last"),
    "granitemoehybrid": _chosen("last"),
    "hunyuan": _softmax("first", normalise=False),
    "jamba": _chosen("first"),
    "kimi_k3": _grouped(epsilon=1e-20),
    "kimi_linear": _grouped(epsilon=1e-20, score=None),
    "laguna": _laguna,
    "lfm2_moe": _grouped("last", epsilon=1e-6),
    "llama4": _chosen("first", "sigmoid"),
    "mellum": _softmax("last"),
    "mimo_v2_flash": _grouped(epsilon=1e-20),
    "minimax": _grouped(epsilon=1e-20, normalise=True, scaled=False),
    "minimax_m3_vl": _grouped(epsilon=1e-20, normalise=True),
    "mistral4": _grouped(epsilon=1e-20, score="softmax"),
    "mixtral": _chosen("first"),
    "nemotron_h": _grouped(epsilon=1e-20),
    "olmoe": _softmax("first"),
    "phimoe": _chosen("argmax", "sparsemixer", jitter="jitter_eps"),
    "phixtral": _chosen("first"),
    "qwen2_moe": _softmax("first", normalise=False),
    "qwen3_moe": _softmax("last"),
    "qwen3_next": _softmax("last"),
    "step3p5": _grouped(epsilon=1e-20, normalise=None),
}
"""mlx-lm file that defines the MoE block → the arithmetic of its gate, read from the built block."""

REFUSED: dict[str, str] = {
    "longcat_flash": "identity experts reach the switch layer as expert 0, so its ids do not say what was routed",
    "muse_spark": "the gate is evaluated inside a fused kernel, so nothing can stand between it and the experts",
    "deepseek_v41": "the residual stream is several streams (hyper-connections), so a layer has no single input",
}
"""mlx-lm file that defines the MoE block → why it cannot be tapped."""

FLOAT32_GATES = {"bailing_moe_v3"}
"""Gates that widen their input themselves."""


@dataclass(frozen=True)
class Block:
    """One MoE layer of a model: where its parts are. Parts are looked up when needed, so that a runtime
    may put its own switch layer in place."""

    layer_id: int
    layer: nn.Module
    gate: nn.Module
    matrix: nn.Module
    bias_owner: nn.Module | None
    bias_name: str | None
    switch_owner: nn.Module
    switch_name: str
    family: RoutingFamily
    norm: nn.Module | None
    defined_in: str

    @property
    def switch(self) -> nn.Module:
        return getattr(self.switch_owner, self.switch_name)

    @property
    def experts(self) -> int:
        return self.matrix["weight"].shape[0]

    def logits(self, x: np.ndarray, precision: mx.Dtype = mx.float32) -> np.ndarray:
        """The gate's logits `f32[..., E]` for its input `f32[..., H]`, computed once more on the host.

        float32: the exactly rounded product, so that it does not depend on how many rows are given at
        once. Half precision: by the operations that the gate itself uses, since their rounding decides.
        """
        if precision == mx.float32 or self.defined_in in FLOAT32_GATES:
            bias = self.host_logit_bias()
            product = x.astype(np.float64) @ self.host_weight().T.astype(np.float64)
            return (product if bias is None else product + bias).astype(np.float32)
        half = mx.array(x).astype(precision)
        linear = isinstance(self.matrix, (nn.Linear, nn.QuantizedLinear))
        out = self.matrix(half) if linear else half @ self.matrix["weight"].T
        return np.array(out.astype(mx.float32))

    def host_weight(self) -> np.ndarray:
        """Gate matrix `f32[E, H]`, dequantised if need be."""
        m = self.matrix
        if "scales" not in m:
            return host(m["weight"])
        return host(mx.dequantize(m["weight"], m["scales"], m.get("biases"), m.group_size, m.bits, mode=m.mode))

    def host_logit_bias(self) -> np.ndarray | None:
        """Bias `f32[E]` of the gate's own linear layer, part of the logits."""
        return host(self.matrix.get("bias"))

    def host_bias(self) -> np.ndarray | None:
        """Correction bias `f32[E]`, added to the scores for the choice only."""
        return None if self.bias_owner is None else host(getattr(self.bias_owner, self.bias_name))


def host(array: mx.array | None) -> np.ndarray | None:
    """An mlx array as float32 numpy (numpy knows no bfloat16)."""
    return None if array is None else np.array(array.astype(mx.float32))


def _is_switch(module: nn.Module) -> bool:
    return any(isinstance(child, (SwitchLinear, QuantizedSwitchLinear)) for child in module.children().values())


def _parents(layer: nn.Module) -> dict[str, nn.Module]:
    return {"": layer, **{path: module for path, module in layer.named_modules() if path}}


def find_blocks(model: nn.Module, args: Any = None) -> list[Block]:
    """The MoE blocks of a model, by layer.

    Raises:
        UnsupportedModelError: no MoE layer, a refused family, or one that `SUPPORTED` does not list.
        GeometryError: layers differ in experts or experts per token.
    """
    blocks = []
    for layer_id, layer in enumerate(model.layers):
        modules = _parents(layer)
        switches = [path for path, module in modules.items() if path and _is_switch(module)]
        if not switches:
            continue
        if len(switches) > 1:
            raise UnsupportedModelError(
                "more than one switch layer in a decoder layer", field=f"layer {layer_id}", got=switches, expected=1
            )
        blocks.append(_block(layer_id, layer, modules, switches[0], args))
    if not blocks:
        raise UnsupportedModelError(
            "no mixture-of-experts layer found",
            got=type(model).__module__,
            expected="a model with mlx-lm switch layers",
        )
    if len({block.family for block in blocks}) > 1:
        raise GeometryError(
            "layers route differently", field="family", got=sorted({str(b.family) for b in blocks}), expected="one"
        )
    return blocks


def _block(layer_id: int, layer: nn.Module, modules: dict[str, nn.Module], path: str, args: Any) -> Block:
    around = path.split(".")[:-1]
    switch_owner, switch_name = modules[".".join(around)], path.split(".")[-1]
    while True:
        owner = modules[".".join(around)]
        if found := [name for name in GATE_NAMES if isinstance(owner.get(name), nn.Module)]:
            break
        if not around:
            raise UnsupportedModelError("switch layer without a gate", field=f"layer {layer_id}.{path}")
        around.pop()
    gate = owner[found[0]]
    defined_in = type(owner).__module__.rsplit(".", 1)[-1]
    if defined_in in REFUSED:
        raise UnsupportedModelError(REFUSED[defined_in], field="family", got=defined_in)
    if defined_in not in SUPPORTED:
        raise UnsupportedModelError(
            "routing of this family is not described", field="family", got=defined_in, expected=sorted(SUPPORTED)
        )
    experts = modules[path].children()
    experts = next(c for c in experts.values() if isinstance(c, (SwitchLinear, QuantizedSwitchLinear))).num_experts
    matrices = [
        m for _, m in gate.named_modules() if isinstance(m.get("weight"), mx.array) and m["weight"].shape[0] == experts
    ]
    if len(matrices) != 1:
        raise UnsupportedModelError(
            "gate has no single [experts, hidden] matrix", field=f"layer {layer_id}.{found[0]}", got=len(matrices)
        )
    bias = [(o, n) for o in (gate, owner) for n in BIAS_NAMES if isinstance(getattr(o, n, None), mx.array)]
    norm = next((layer[n] for n in NORM_NAMES if isinstance(layer.get(n), nn.Module)), None)
    settings = getattr(owner, "args", None) or getattr(owner, "config", None) or args
    family = SUPPORTED[defined_in](owner, gate, settings)
    return Block(
        layer_id,
        layer,
        gate,
        matrices[0],
        *(bias[0] if bias else (None, None)),
        switch_owner,
        switch_name,
        family,
        norm,
        defined_in,
    )
