"""The recipe of a reference model: what it is made of and how it is trained, as one record.

Two routing families, because they differ in what a predictor has to predict:

* `softmax` (`qwen3_moe`): softmax over all experts, the K highest, weights normalised among them;
* `sigmoid` (`glm4_moe`): a sigmoid each, a learned correction bias for the choice only, experts in groups
  of which the worst are dropped, one shared expert beside them.

Every layer is a mixture-of-experts layer. `Recipe()` is the committed reference models' shape.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..errors import ParameterError

FAMILIES = ("softmax", "sigmoid")
CONTEXT = 4096
"""Positions the rotary embedding is declared for. Training windows are shorter; routes past them are untrained."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Architecture, schedule and seed. Two equal recipes on equal text give the same model on one machine.

    Raises:
        ParameterError: an unknown family, or counts that do not fit together.
    """

    family: str
    hidden: int = 192
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 64
    top_k: int = 4
    expert_width: int = 64
    groups: int = 8
    kept_groups: int = 4
    scale: float = 2.5
    """`sigmoid` only, as the two above it: the constant that normalised weights are multiplied by."""
    steps: int = 2000
    batch: int = 16
    window: int = 256
    peak_rate: float = 2e-3
    warmup: int = 100
    decay: float = 0.4
    """Share of the steps, at the end, over which the rate falls linearly to zero."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    balance: float = 0.03
    """Weight of the balance loss (`routers.balance_loss`)."""
    bias_step: float = 2e-3
    """`sigmoid` only: how far a correction bias moves in a step; a quarter of it while the rate decays."""
    seed: int = 0

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ParameterError("unknown family", field="family", got=self.family, expected=FAMILIES)
        for field, whole, part in (
            ("heads", self.heads, self.kv_heads),
            ("experts", self.experts, self.groups),
            ("groups", self.groups, self.kept_groups),
        ):
            if part < 1 or whole % part and field != "groups" or part > whole:
                raise ParameterError("counts do not fit", field=field, got=(whole, part), expected="a multiple")
        if self.family == "sigmoid" and self.kept_groups * (self.experts // self.groups) < self.top_k:
            raise ParameterError("too few experts are kept", field="kept_groups", got=self.kept_groups)

    def own(self) -> dict[str, Any]:
        """Plain values, for identities and records."""
        return {**dataclasses.asdict(self), "betas": list(self.betas)}

    def rate(self, step: int) -> float:
        """Learning rate at step 0, 1, …: linear warm-up, flat, linear decay to zero."""
        left = (self.steps - step) / max(1, round(self.decay * self.steps))
        return self.peak_rate * min(1.0, (step + 1) / max(1, self.warmup), left)

    def decaying(self, step: int) -> bool:
        return step >= self.steps - round(self.decay * self.steps)


def make_network(recipe: Recipe, vocabulary: int) -> Any:
    """A freshly initialised torch model of the recipe, seeded, with input and output embeddings tied."""
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {
        "vocab_size": vocabulary,
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "num_experts_per_tok": recipe.top_k,
        "moe_intermediate_size": recipe.expert_width,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if recipe.family == "softmax":
            config = Qwen3MoeConfig(
                **common, num_experts=recipe.experts, decoder_sparse_step=1, mlp_only_layers=[], rope_parameters=rope
            )
            return Qwen3MoeForCausalLM(config)
        config = Glm4MoeConfig(
            **common,
            n_routed_experts=recipe.experts,
            n_shared_experts=1,
            n_group=recipe.groups,
            topk_group=recipe.kept_groups,
            routed_scaling_factor=recipe.scale,
            first_k_dense_replace=0,
            num_nextn_predict_layers=0,
            use_qk_norm=True,
            rope_parameters={**rope, "partial_rotary_factor": 0.5},
        )
        return Glm4MoeForCausalLM(config)
