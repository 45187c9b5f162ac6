"""Known answers: does this machine compute what the model computes?

Matrix kernels that are silently wrong on one class of device load, run and write noise. Two checks run
before anything is recorded (`self_test`):

* *kernels*: the first MoE layer's expert products against a float64 product of the same weights, for any
  model;
* *answers*: three prompts with the routes and logits they must give, for models that ship a
  `known_answers.json` (the embedded ones). The prompts are those, among many, whose narrowest margin
  is widest, so that rounding cannot move a route between BLAS libraries but an error can.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..errors import ArtifactError, IdentityError
from ..files import digest_json, read_json, write_json
from ..routes import PREFILLED
from .blocks import host

if TYPE_CHECKING:
    from .loading import LoadedModel

FILE = "known_answers.json"
SCHEMA_VERSION = 1
PROMPTS = 3
LOGITS = 8
"""Logits compared per prompt: those of the most likely tokens after its last position."""

# Largest allowed error of one expert product, relative to the spread of the exact one. float32 with any
# summation order stays below 1e-5; half precision keeps 8 bits.
KERNEL_TOLERANCE = {"float32": 1e-3, "half": 3e-2}
# BLAS libraries move logits by about 2e-5; an error of 1e-2 in the experts moves them by more than 1e-2.
LOGIT_TOLERANCE = 1e-3


def self_test(lm: LoadedModel) -> dict[str, Any]:
    """Check kernels, and known answers where the model ships them; returns what was measured.

    `kernel_error`: largest relative error; `answers`: prompts compared; `logit_error`: largest difference.

    Raises:
        IdentityError: a kernel, a route, a logit or a token id is not what it must be.
        ArtifactError: the file of answers is unreadable.
    """
    with lm.holding(0):
        result = {"kernel_error": check_kernels(lm), "answers": 0, "logit_error": 0.0}
    file = lm.path / FILE
    if not file.is_file():
        return result
    known = read_json(file)
    if not isinstance(known, dict) or set(known) != {"schema_version", "model", "prompts"}:
        raise ArtifactError("not a file of known answers", file=file, got=type(known).__name__)
    if known["schema_version"] != SCHEMA_VERSION:
        raise ArtifactError(
            "unknown version", file=file, field="schema_version", got=known["schema_version"], expected=SCHEMA_VERSION
        )
    if known["model"] != lm.digests["model"]:
        raise IdentityError(
            "known answers are of another model", file=file, got=lm.digests["model"], expected=known["model"],
            fix="after changing the weights, write them anew with known_answers.write",
        )  # fmt: skip
    with lm.decoding():
        for number, expected in enumerate(known["prompts"]):
            error = _compare(_answer(lm, expected["text"]), expected, file, number)
            result["logit_error"] = max(result["logit_error"], error)
            result["answers"] += 1
    return result


def _compare(got: dict[str, Any], expected: dict[str, Any], file: Path, number: int) -> float:
    for field in ("token_ids", "routes"):
        if got[field] != expected[field]:
            raise IdentityError(
                "this machine does not give the known answer",
                file=file,
                field=f"prompts[{number}].{field}",
                got=got[field],
                expected=expected[field],
            )
    error = max(abs(float(got["all_logits"][int(token)]) - value) for token, value in expected["logits"].items())
    if not error <= LOGIT_TOLERANCE:
        raise IdentityError(
            "this machine does not give the known logits",
            file=file,
            field=f"prompts[{number}].logits",
            got=f"{error:.3g} away",
            expected=f"within {LOGIT_TOLERANCE}",
        )
    return error


def _answer(lm: LoadedModel, text: str) -> dict[str, Any]:
    """Prefill a text: its token ids, digest of the chosen sets, logits after it, and the narrowest margin."""
    tokens = [int(t) for t in lm.tokenizer.encode(text)]
    with lm.tap() as tap:
        logits = lm.run(mx.array(tokens)[None], lm.make_cache(), PREFILLED)[0, -1]
        mx.eval(logits, *tap.pending())
        record = tap.take()
    narrowest = float(record.margin.min())
    if record.group_margin is not None:
        narrowest = min(narrowest, float(record.group_margin.min()))
    return {
        "token_ids": tokens,
        "routes": digest_json(np.sort(record.ids[0], -1).tolist()),
        "all_logits": host(logits),
        "margin": narrowest,
    }


def write(lm: LoadedModel, texts: Iterable[str]) -> Path:
    """Choose the prompts with the widest narrowest margin among `texts` and write the answers beside the model."""
    answers = sorted(((_answer(lm, text), text) for text in set(texts)), key=lambda pair: (-pair[0]["margin"], pair[1]))
    prompts = []
    for answer, text in answers[:PROMPTS]:
        top = np.argsort(-answer["all_logits"], kind="stable")[:LOGITS]
        prompts.append(
            {
                "text": text,
                "token_ids": answer["token_ids"],
                "routes": answer["routes"],
                "narrowest_margin": round(answer["margin"], 6),
                "logits": {str(int(t)): round(float(answer["all_logits"][t]), 5) for t in top},
            }
        )
    file = lm.path / FILE
    write_json(file, {"schema_version": SCHEMA_VERSION, "model": lm.digests["model"], "prompts": prompts})
    return file


def check_kernels(lm: LoadedModel) -> float:
    """Largest relative error of the first MoE layer's expert products; raises `IdentityError` if too large."""
    rng, worst = np.random.default_rng(0), 0.0
    for name, product in lm.blocks[0].switch.children().items():
        if not hasattr(product, "num_experts"):
            continue
        half = mx.float32 not in (product.get("scales", product["weight"]).dtype, product["weight"].dtype)
        tolerance = KERNEL_TOLERANCE["half" if half else "float32"]
        ids = rng.permutation(product.num_experts)[: min(4, product.num_experts)]
        x = rng.normal(size=(len(ids), product.input_dims)).astype(np.float32)
        dtype = product.get("scales", product["weight"]).dtype
        lazy = mx.array(x).astype(dtype if mx.issubdtype(dtype, mx.floating) else mx.float32)
        got = host(product(lazy[:, None, None, :], mx.array(ids)[:, None]))[:, 0, 0]
        exact = np.stack([_dense(product, int(e), row) for e, row in zip(ids, host(lazy), strict=True)])
        error = float(np.abs(got - exact).max() / exact.std())
        worst = max(worst, error)
        if not error <= tolerance:
            raise IdentityError(
                "expert products are wrong on this machine",
                file=lm.path,
                field=f"layer {lm.blocks[0].layer_id}.{name}",
                got=f"relative error {error:.3g}",
                expected=f"<= {tolerance}",
            )
    return worst


def _dense(product: Any, expert: int, x: np.ndarray) -> np.ndarray:
    """What one expert gives for `x [in]`: `f64[out]`, dequantised if need be."""
    weight = product["weight"][expert]
    if "scales" in product:
        biases = product.get("biases")
        weight = mx.dequantize(
            weight,
            product["scales"][expert],
            None if biases is None else biases[expert],
            product.group_size,
            product.bits,
            mode=product.mode,
        )
    out = host(weight).astype(np.float64) @ x.astype(np.float64)
    return out + host(product["bias"][expert]) if "bias" in product else out
