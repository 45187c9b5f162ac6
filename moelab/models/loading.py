"""Load a checkpoint and know what it is: geometry, routing family, digests, gates.

`load` takes what `mlx_lm.load` takes (a folder or a repository id) or the name of an embedded reference
model. Loading is strict: a weight that the model does not know, or lacks, is an error that lists the
keys, because a lenient load once left random experts in place of quantised ones and still ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

from ..artifacts import root
from ..errors import GeometryError, MissingArtifactError, ParameterError, UnsupportedModelError
from ..files import digest_file, digest_json, read_json
from .blocks import Block, find_blocks
from .families import RoutingFamily
from .gate_weights import GateWeights, gate_weights
from .taps import Tap, tap

PRECISIONS = ("float32", "float16", "bfloat16", "stored")
REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")
PROBE = "Café: 3.14 × 2 = 6.28\n\tif (x != y) { return 'naïve' }  // 你好, мир, مرحبا 🙂 <|user|>"
"""Text whose token ids stand for a tokenizer's behaviour."""


@dataclass(frozen=True)
class MoEGeometry:
    """Counts of a model: `layers` L with MoE, `experts` E, `top_k` K, `hidden` H.

    `layer_ids[L]` are positions among all decoder layers; `expert_bytes` is the size of the largest
    expert as stored in the checkpoint, `layer_expert_bytes[L]` that of each layer.
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    layer_ids: tuple[int, ...]
    expert_bytes: int
    layer_expert_bytes: tuple[int, ...]


@dataclass
class LoadedModel:
    """A model that runs, and what moelab needs to know about it. Made by `load`.

    `decoding`, `holding`, `run`, `bytes_read` and `waited_s` are what a streamed model does otherwise
    (`streaming.StreamedModel`): here every expert is in memory, and they have nothing to do.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    path: Path
    precision: str
    config: dict[str, Any]
    blocks: list[Block]
    geometry: MoEGeometry
    residency: str = "resident"
    """`resident` or `streamed`: part of the runtime identity of everything recorded."""

    @property
    def family(self) -> RoutingFamily:
        return self.blocks[0].family

    @cached_property
    def digests(self) -> dict[str, str]:
        """`model` (configuration and every weight file), `tokenizer` and `template` (their behaviour).

        A tokenizer that can render no thread at all has template `none`.
        """
        from ..threads import template_digest, tokenizer_digest

        model = self.model_digest
        try:
            return {
                "model": model,
                "tokenizer": tokenizer_digest(self.tokenizer),
                "template": template_digest(self.tokenizer),
            }
        except UnsupportedModelError:
            probe = [int(i) for i in self.tokenizer.encode(PROBE)]
            return {"model": model, "tokenizer": digest_json(probe), "template": "none"}

    @cached_property
    def model_digest(self) -> str:
        files = {f.name: digest_file(f) for f in sorted(self.path.glob("model*.safetensors"))}
        return digest_json({"config": read_json(self.path / "config.json"), "files": files})

    @property
    def bytes_read(self) -> int:
        """Payload bytes of experts read from the store so far."""
        return 0

    @property
    def waited_s(self) -> float:
        """Seconds that passes waited for those reads so far."""
        return 0.0

    def decoding(self) -> AbstractContextManager[None]:
        """Inside, passes can be run."""
        return nullcontext()

    def holding(self, layer: int) -> AbstractContextManager[None]:
        """Inside, all experts of MoE layer `layer` are in its switch module."""
        return nullcontext()

    def run(self, tokens: mx.array, cache: list[Any], phase: int) -> mx.array:
        """One pass of `[B,T]` tokens, prefilled or decoded (`routes`): logits `[B,T,V]`, which may be lazy."""
        return self.model(tokens, cache=cache)

    def make_cache(self) -> list[Any]:
        """A fresh, empty cache for one sequence (or one batch of equally long ones)."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def tap(self, features: Iterable[str] = ()) -> AbstractContextManager[Tap]:
        """Record routing while the model runs; see `taps`."""
        return tap(self.blocks, features)

    @cached_property
    def _gates(self) -> list[GateWeights]:
        return [gate_weights(block) for block in self.blocks]

    def gate_weights(self) -> list[GateWeights]:
        """One `GateWeights` a MoE layer, float32."""
        return self._gates

    def early_gate_scores(self, rep: np.ndarray, layer: int, norm: bool) -> np.ndarray:
        """Selection scores `f32[..., E]` that MoE layer `layer` (0..L-1) would give to another layer's state.

        `rep [..., H]`: with `norm=False` a block input (`moe_input`), with `norm=True` a residual stream
        (`pre_attention`), to which the layer's own post-attention norm is applied first. Experts of
        groups that the family would drop come after all others but keep their order, so that more
        than K candidates can be taken.
        """
        gate = self._gates[layer]
        if rep.shape[-1] != self.geometry.hidden:
            raise GeometryError(
                "width of the representation", field="rep", got=rep.shape, expected=self.geometry.hidden
            )
        logits = gate.logits(gate.norm(rep) if norm and gate.norm is not None else rep)
        masked, free, group_margin = self.family.selection(logits, gate.bias)
        if group_margin is not None:
            low, high = free.min(-1, keepdims=True), free.max(-1, keepdims=True)
            free = np.where(masked == free, free, free - (high - low) - 1.0)
        return free.astype(np.float32)


def find(model: str | Path) -> Path:
    """Folder of a model: an embedded name, a path, or a repository id (downloaded by mlx-lm).

    Raises:
        MissingArtifactError: no such folder, and not a repository id either.
    """
    for folder in (root() / "artifacts" / "models" / str(model), Path(model)):
        if (folder / "config.json").is_file():
            return folder
    if not REPOSITORY.fullmatch(str(model)) or Path(model).exists():
        raise MissingArtifactError(
            "no model here",
            file=model,
            expected="a name under artifacts/models, a checkpoint folder, or a repository id",
        )
    from mlx_lm.utils import _download

    return Path(_download(str(model)))


def load(model: str | Path, *, precision: str = "float32", cast_experts: bool = False) -> LoadedModel:
    """Load a mixture-of-experts checkpoint.

    `precision`: weights (and so activations) are cast to `float32` (default), `float16` or `bfloat16`;
    `stored` leaves them as they are. Quantised experts stay quantised. mlx's expert product takes only
    float32 on the CPU: with `cast_experts` half-precision experts are rounded to that precision but
    multiplied in float32, and `LoadedModel.precision` says so.

    Raises:
        MissingArtifactError: nothing to load there.
        UnsupportedModelError: mlx-lm cannot read this layout (unmatched keys listed), the family has no
            MoE layer or is one of `REFUSED`, or this device cannot run the experts in this precision.
    """
    if precision not in PRECISIONS:
        raise ParameterError("unknown precision", field="precision", got=precision, expected=PRECISIONS)
    from mlx_lm.utils import load_model

    path = find(model)
    if (path / "pack.json").is_file():
        raise UnsupportedModelError(
            "this is a pack: its experts are read while it runs, never all at once", file=path, got="pack.json",
            expected="a checkpoint", fix=f"streaming.StreamingEngine.load, or {path.name}@8GiB where a name is wanted",
        )  # fmt: skip
    try:
        network, config = load_model(path, lazy=True)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise UnsupportedModelError(
            "mlx-lm cannot read this checkpoint", file=path, got=str(error), expected="a layout and family it knows"
        ) from error
    blocks = find_blocks(network)
    geometry = measure(blocks)
    cast(network, precision)
    precision += widen_experts(blocks, path, allowed=cast_experts)
    mx.eval(network.parameters())
    tokenizer = tokenizer_of(path, config)
    return LoadedModel(network, tokenizer, path.resolve().name, path, precision, config, blocks, geometry)


def tokenizer_of(path: Path, config: dict[str, Any]) -> Any:
    """A checkpoint's tokenizer, as mlx-lm wraps it.

    Raises:
        MissingArtifactError: it has none that can be read.
    """
    from mlx_lm.utils import load_tokenizer

    got = "a tokenizer that knows no text"  # what transformers makes where there are no files
    try:
        tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
        if tokenizer.encode(PROBE, add_special_tokens=False):
            return tokenizer
    except (OSError, ValueError, KeyError, TypeError) as error:  # it has an error of its own for each case
        got = (str(error).splitlines() or [type(error).__name__])[0]
    raise MissingArtifactError(
        "no tokenizer here", file=path, got=got, expected="tokenizer.json, or what the family has",
        fix="put the tokenizer's files beside the weights",
    )  # fmt: skip


def cast(network: nn.Module, precision: str) -> None:
    """Cast floating weights in place; selection biases that the model keeps in float32 stay there."""
    if precision == "stored":
        return
    dtype = getattr(mx, precision)
    keep = getattr(network, "cast_predicate", lambda _: True)
    weights = tree_flatten(network.parameters())
    changed = [(k, v.astype(dtype)) for k, v in weights if mx.issubdtype(v.dtype, mx.floating) and keep(k)]
    network.update(tree_unflatten(changed))


class CastSwitchLinear(SwitchLinear):
    """Expert product that widens its input to float32 and rounds its output back."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return super().__call__(x.astype(mx.float32), indices, sorted_indices).astype(x.dtype)


def widen_experts(blocks: list[Block], path: Path, *, allowed: bool) -> str:
    """Make half-precision experts run on the CPU; returns what that adds to the name of the precision.

    Raises:
        UnsupportedModelError: they would not run, and the cast is not allowed.
    """
    products = [p for b in blocks for p in b.switch.children().values() if type(p) is SwitchLinear]
    narrow = [p for p in products if p["weight"].dtype != mx.float32]
    if not narrow or "cpu" not in str(mx.default_device()):
        return ""
    if not allowed:
        raise UnsupportedModelError(
            "mlx multiplies unquantised experts only in float32 on the CPU",
            file=path,
            field="precision",
            got=str(narrow[0]["weight"].dtype),
            expected="float32",
            fix="load with precision='float32', or with cast_experts=True to round weights but multiply in float32",
        )
    for product in narrow:
        product.update({name: value.astype(mx.float32) for name, value in product.items()})
        product.__class__ = CastSwitchLinear
    return "+float32-experts"


def measure(blocks: list[Block]) -> MoEGeometry:
    """Geometry of a model's MoE blocks, before any cast (expert bytes are the stored ones)."""
    sizes = tuple(sum(v.nbytes for _, v in tree_flatten(b.switch.parameters())) // b.experts for b in blocks)
    experts, hidden = {b.experts for b in blocks}, {b.weight().shape[1] for b in blocks}
    if len(experts) > 1 or len(hidden) > 1:
        raise GeometryError("layers differ in shape", field="experts, hidden", got=[sorted(experts), sorted(hidden)])
    return MoEGeometry(
        len(blocks),
        experts.pop(),
        blocks[0].family.top_k,
        hidden.pop(),
        tuple(b.layer_id for b in blocks),
        max(sizes),
        sizes,
    )
