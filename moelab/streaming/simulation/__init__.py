"""Decoding without a model: recorded routes through the same cache and scheduler, on a disk made of arithmetic.

`simulator` runs them (`simulated_memory`, `demand_only`), `simulation` is what came out, `validation` compares it
with an engine's own run.
"""
