"""What each family's gate does: the part of routing that a model's structure cannot show.

`SUPPORTED` has one line for each mlx-lm file that defines a mixture-of-experts block, and each line
reads the numbers (top-K, groups, scale) from the block it is given. `REFUSED` names the families that
cannot be tapped, with the reason. A family that reuses another one's block needs no line of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .families import RoutingFamily


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


def _gemma4(block: Any, gate: Any, args: Any) -> RoutingFamily:
    return RoutingFamily(top_k=_top_k(gate.config), score="logit", weight="softmax", keeps="last", expert_scaled=True)


def _deepseek_v41(block: Any, gate: Any, args: Any) -> RoutingFamily:
    return replace(_grouped(epsilon=1e-20, score=None)(block, gate, args), temperature=float(gate.gate_temp))


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
    "deepseek_v41": _deepseek_v41,
    "dots1": _grouped(),
    "ernie4_5_moe": _ernie,
    "exaone_moe": _grouped(epsilon=1e-20),
    "gemma4_text": _gemma4,
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
    "dbrx": "experts are separate modules, not a switch layer, so no ids pass that could be recorded",
    "longcat_flash": "identity experts reach the switch layer as expert 0, so its ids do not say what was routed",
    "muse_spark": "routing happens inside a fused Metal kernel, so nothing can stand between gate and experts",
}
"""mlx-lm file that defines the MoE block → why it cannot be tapped."""

NO_RESIDUAL: dict[str, str] = {
    "deepseek_v41": "the residual stream is several streams (hyper-connections)",
    "kimi_k3": "a layer's input is mixed from the sums of earlier layers (attention residuals)",
}
"""Families whose routes can be recorded, but whose layers have no single input to call `pre_attention`."""

FLOAT32_GATES = {"bailing_moe_v3", "deepseek_v41", "minimax"}
"""Gates that widen their input to float32 themselves."""
