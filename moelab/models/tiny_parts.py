"""What configurations of tiny models are made of: sizes that all share, and the mixers that several families have."""

from __future__ import annotations

from typing import Any

VOCABULARY, HIDDEN, EXPERTS, TOP_K = 264, 64, 16, 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_expert_group": 4,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.5,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 32}
DELTA_ATTENTION = {
    "linear_attn_config": {
        "kda_layers": [1, 2],
        "full_attn_layers": [3],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "intermediate_size": 32,
    "tie_word_embeddings": True,
}
