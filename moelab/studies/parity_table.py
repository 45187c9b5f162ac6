"""Where does prefill equal decode? Every family, every precision, both BLAS libraries, one honest table.

    python -m moelab.studies.parity_table reports/committed/parity_table.json

Each cell decodes the same random tokens twice on a tiny random model of the family: once with the cache, one
at a time, and once as a single prefill, and compares the routes of the decoded rows. MLA switches to another
form at length one, linear attention and state-space layers depend on the chunk: in half precision those
break, and the table says how far.

mlx has no half-precision expert product on the CPU. Where a cell needs one, a *shim* multiplies in float32
and casts the result back; such cells are marked, since they are not what a GPU would compute.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np

from .. import artifacts, models
from ..commands import Parser
from ..errors import UnsupportedModelError

PRECISIONS = ("float32", "float16", "bfloat16", "4-bit", "8-bit")
FAMILIES = (
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "olmoe",
    "mixtral",
    "glm4_moe",
    "dots1",
    "deepseek_v2",
    "deepseek_v3",
    "bailing_moe",
    "bailing_moe_linear",
    "bailing_hybrid",
    "bailing_moe_v3",
    "granitemoehybrid",
    "gpt_oss",
)
TOKENS, PROMPT = 96, 8


def cells(families: tuple[str, ...] = FAMILIES, *, tokens: int = TOKENS, seed: int = 0) -> list[dict[str, Any]]:
    """All families and precisions under this process's BLAS: one dict a cell."""
    rows = []
    for number, family in enumerate(families):
        rows += [cell(family, precision, tokens=tokens, seed=seed) for precision in PRECISIONS]
        models.report_progress({"done": number + 1, "total": len(families)})
    return rows


def cell(family: str, precision: str, *, tokens: int = TOKENS, seed: int = 0) -> dict[str, Any]:
    """One family at one precision. `error` holds the reason where the cell cannot be computed."""
    row: dict[str, Any] = {"family": family, "precision": precision, "shim": False, "error": None}
    try:
        network = _prepare(family, precision, seed)
        row["shim"] = precision in ("float16", "bfloat16") and _shim(network) > 0
        decoded, filled = _both(network, tokens, seed)
    except (UnsupportedModelError, ValueError, RuntimeError) as error:
        return {**row, "error": str(error).split("\n")[0][:200]}
    order = (decoded.ids[0] != filled.ids[0])[PROMPT:].any(-1)
    sets = (np.sort(decoded.ids[0], -1) != np.sort(filled.ids[0], -1))[PROMPT:].any(-1)
    margins = decoded.margin[0][PROMPT:][order]
    return {
        **row,
        "rows": int(order.size),
        "exact_rank_rate": float(1 - order.mean()),
        "set_rate": float(1 - sets.mean()),
        "median_margin_at_mismatch": float(np.median(margins)) if margins.size else None,
        "largest_margin_at_mismatch": float(margins.max()) if margins.size else None,
        "gate1": "fail" if order.any() else "pass",
    }


def _prepare(family: str, precision: str, seed: int):
    import mlx.core as mx
    import mlx.nn as nn

    from ..models.loading import cast
    from ..models.tiny import build

    network = build(family, seed=seed)
    if precision.endswith("-bit"):
        # Activations stay float32: what a quantised checkpoint does here after `load`.
        nn.quantize(network, group_size=32, bits=int(precision[0]), class_predicate=_quantisable)
    else:
        cast(network, precision)
    mx.eval(network.parameters())
    return network


def _quantisable(_: str, module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return hasattr(module, "to_quantized") and weight is not None and weight.shape[-1] % 32 == 0


def _shim(network) -> int:
    """Let half-precision expert products run on the CPU, in float32; returns how many were wrapped."""
    import mlx.core as mx
    from mlx_lm.models.switch_layers import SwitchLinear

    class Float32SwitchLinear(SwitchLinear):
        def __call__(self, x, indices, sorted_indices=False):
            weight = self["weight"].astype(mx.float32).swapaxes(-1, -2)
            out = mx.gather_mm(x.astype(mx.float32), weight, rhs_indices=indices, sorted_indices=sorted_indices)
            if "bias" in self:
                out = out + mx.expand_dims(self["bias"][indices], -2)
            return out.astype(x.dtype)

    found = [m for _, m in network.named_modules() if type(m) is SwitchLinear]
    for module in found:
        module.__class__ = Float32SwitchLinear
    return len(found)


def _both(network, tokens: int, seed: int):
    """Routes of a cached decode and of one prefill over the same tokens: two `TapRecord`s."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from ..models.blocks import find_blocks
    from ..models.taps import tap

    ids = mx.array(np.random.default_rng(seed).integers(1, 200, (1, tokens)))
    with tap(find_blocks(network)) as taps:
        cache = make_prompt_cache(network)
        for part in [ids[:, :PROMPT], *(ids[:, i : i + 1] for i in range(PROMPT, tokens))]:
            mx.eval(network(part, cache=cache), *taps.pending())
        decoded = taps.take()
        mx.eval(network(ids, cache=make_prompt_cache(network)), *taps.pending())
        return decoded, taps.take()


def table(families: tuple[str, ...] = FAMILIES) -> dict[str, Any]:
    """Both BLAS identities, each in a process of its own."""
    rows = []
    for blas in ("reference", "openblas"):
        if blas == "openblas" and models.find_openblas() is None:
            continue
        (found,) = models.run_workers(cells, [{"families": families}], blas=blas, workers=1, on_progress=_say)
        rows += [{"blas": blas, **row} for row in found]
    return {
        "schema_version": 1,
        "command": "make parity-table",
        "date": datetime.date.today().isoformat(),
        "tokens": TOKENS,
        "prompt": PROMPT,
        "cells": rows,
    }


def _say(_: int, message: dict[str, int]) -> None:
    print(f"{message['done']} of {message['total']} families", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m moelab.studies.parity_table", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="JSON file to write")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="model types (default: all)")
    options = parser.parse_args(arguments)
    found = table(tuple(options.families))
    artifacts.write_json(options.out, found)
    for row in found["cells"]:
        rate = row["error"] or f"rank {row['exact_rank_rate']:.4f} set {row['set_rate']:.4f} {row['gate1']}"
        print(f"{row['blas']:<10} {row['family']:<20} {row['precision']:<9} {'shim ' if row['shim'] else ''}{rate}")
    print(json.dumps({"cells": len(found["cells"]), "failed": sum(r.get("gate1") == "fail" for r in found["cells"])}))


if __name__ == "__main__":
    main()
