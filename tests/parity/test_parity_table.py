"""The table tells an exact family from one that half precision breaks, and marks what it had to shim."""

from moelab.models.tiny_configs import FAMILIES as TINY
from moelab.studies.parity_table import FAMILIES, cell


def test_float32_is_exact_for_a_family_whose_prefill_is_its_decode():
    row = cell("qwen3_moe", "float32", tokens=32)
    assert (row["exact_rank_rate"], row["set_rate"], row["gate1"], row["shim"]) == (1.0, 1.0, "pass", False)
    assert row["rows"] == (32 - 8) * 3 and row["largest_margin_at_mismatch"] is None


def test_latent_attention_in_bfloat16_fails_whatever_the_margins_say():
    row = cell("deepseek_v3", "bfloat16", tokens=96)
    assert row["gate1"] == "fail" and row["exact_rank_rate"] < 1 and row["shim"]
    assert row["largest_margin_at_mismatch"] > 0  # reported, and no excuse


def test_a_cell_that_cannot_be_computed_says_why():
    row = cell("qwen3_moe", "4-bit", tokens=16)
    assert row["error"] is None
    assert set(FAMILIES) <= set(TINY)
