"""Routing by the letter of each family, one token at a time: the slow side of the parity tests.

Written from the families' configurations, without the package's routing code: `RULES` says for each
mlx-lm model type what its gate does; `route` does it with loops and Python floats.
"""

from __future__ import annotations

import math

import numpy as np

GROUPED_ZERO = {"score": "sigmoid", "groups": 4, "kept": 2, "mask": 0.0}
GROUPED_INF = {**GROUPED_ZERO, "mask": -math.inf}
SIGMOID = {"score": "sigmoid"}
SOFTMAX = {"score": "softmax"}
LOGIT = {"score": "logit"}
RULES = {
    "Klear": SIGMOID,
    "afmoe": GROUPED_ZERO,
    "bailing_hybrid": GROUPED_INF,
    "bailing_moe": GROUPED_ZERO,
    "bailing_moe_linear": GROUPED_ZERO,
    "bailing_moe_v3": GROUPED_INF,
    "deepseek": SOFTMAX,
    "deepseek_v2": {"score": "softmax", "groups": 4, "kept": 2, "mask": 0.0, "worth": max},
    "deepseek_v3": GROUPED_ZERO,
    "deepseek_v32": GROUPED_ZERO,
    "deepseek_v41": {"score": "sqrtsoftplus"},
    "dots1": GROUPED_ZERO,
    "ernie4_5_moe": SOFTMAX,
    "exaone_moe": GROUPED_ZERO,
    "gemma4_text": LOGIT,
    "glm4_moe": GROUPED_ZERO,
    "glm4_moe_lite": GROUPED_ZERO,
    "glm_moe_dsa": GROUPED_ZERO,
    "gpt_oss": LOGIT,
    "granitemoe": LOGIT,
    "granitemoehybrid": LOGIT,
    "hunyuan": SOFTMAX,
    "jamba": LOGIT,
    "kimi_k25": GROUPED_ZERO,
    "kimi_k3": GROUPED_ZERO,
    "kimi_linear": GROUPED_ZERO,
    "kimi_vl": GROUPED_ZERO,
    "laguna": SIGMOID,
    "lfm2_moe": SIGMOID,
    "llama4": LOGIT,
    "mellum": SOFTMAX,
    "mimo_v2_flash": GROUPED_ZERO,
    "minimax": SIGMOID,
    "minimax_m3_vl": SIGMOID,
    "mistral4": {"score": "softmax", "groups": 4, "kept": 2, "mask": 0.0},
    "mixtral": LOGIT,
    "nemotron_h": GROUPED_ZERO,
    "olmoe": SOFTMAX,
    "phimoe": LOGIT,
    "phixtral": LOGIT,
    "qwen2_moe": SOFTMAX,
    "qwen3_5_moe": SOFTMAX,
    "qwen3_moe": SOFTMAX,
    "qwen3_next": SOFTMAX,
    "qwen3_vl_moe": SOFTMAX,
    "solar_open": GROUPED_ZERO,
    "step3p5": SIGMOID,
}


def score(kind: str, logits: list[float]) -> list[float]:
    if kind == "softmax":
        top = max(logits)
        total = math.fsum(math.exp(x - top) for x in logits)
        return [math.exp(x - top) / total for x in logits]
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    if kind == "sqrtsoftplus":
        return [math.sqrt(math.log1p(math.exp(x))) for x in logits]
    return list(logits)


def route(rule: dict, logits: np.ndarray, bias: np.ndarray | None, top_k: int) -> tuple[list[int], float, float]:
    """Experts of one token in rank order, the margin, and the margin between groups (inf without)."""
    values = score(rule["score"], [float(x) for x in logits])
    if bias is not None:
        values = [v + float(b) for v, b in zip(values, bias, strict=True)]
    between = math.inf
    if groups := rule.get("groups"):
        size, worth = len(values) // groups, []
        for g in range(groups):
            inside = sorted(values[g * size : (g + 1) * size], reverse=True)
            worth.append(rule["worth"](inside) if "worth" in rule else inside[0] + inside[1])
        order = sorted(range(groups), key=lambda g: -worth[g])
        between = worth[order[rule["kept"] - 1]] - worth[order[rule["kept"]]]
        for g in order[rule["kept"] :]:
            values[g * size : (g + 1) * size] = [rule["mask"]] * size
    order = sorted(range(len(values)), key=lambda e: (-values[e], e))
    return order[:top_k], values[order[top_k - 1]] - values[order[top_k]], between
