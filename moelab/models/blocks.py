"""Finding the mixture-of-experts blocks of a model by its structure.

A decoder layer that contains a switch layer (a module made of stacked expert projections, from
`mlx_lm.models.switch_layers`) is a MoE layer. The nearest module around it that has a `gate` or a
`router` is its block, and the only matrix in that gate is the gate weight, `[E, H]`. What the gate does
with its logits is looked up in `gates`.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import GeometryError, UnsupportedModelError
from .families import RoutingFamily
from .gates import FLOAT32_GATES, REFUSED, SUPPORTED

GATE_NAMES = ("gate", "router")
BIAS_NAMES = ("e_score_correction_bias", "expert_bias", "router_bias")
NORM_NAMES = ("pre_mlp_layernorm", "pre_ff_layernorm", "ffn_norm", "post_attention_layernorm", "ln", "norm")
"""Names of the norm in front of the MoE block, the more specific ones first."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One MoE layer of a model: where its parts are, and the host copy of its gate.

    The switch layer is looked up when needed, so that a runtime may put its own in place.
    """

    layer_id: int
    """Position among all decoder layers."""
    layer: nn.Module
    gate: nn.Module
    matrix: nn.Module
    """The module in or under the gate that holds `weight [E, H]`."""
    bias_owner: nn.Module | None
    bias_name: str
    switch_owner: nn.Module
    switch_name: str
    norm: nn.Module | None
    """Norm in front of the block; None when the gate takes the residual stream itself."""
    family: RoutingFamily
    defined_in: str
    """mlx-lm file that defines the block."""

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
            wide = x.astype(np.float64)
            if (scale := self.input_scale()) is not None:
                wide = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + self.gate.eps) * host(scale)
            product = wide @ self.weight().T.astype(np.float64)
            bias = self.logit_bias()
            return (product if bias is None else product + bias).astype(np.float32)
        half = mx.array(x).astype(precision)
        if (scale := self.input_scale()) is not None:
            half = mx.fast.rms_norm(half, scale, self.gate.eps)
        linear = isinstance(self.matrix, (nn.Linear, nn.QuantizedLinear))
        return host(self.matrix(half) if linear else half @ self.matrix["weight"].T)

    def input_scale(self) -> mx.array | None:
        """Scale `[H]` of the RMS norm that the gate applies to its own input (gemma4), else None."""
        return self.gate["scale"] * self.gate._root_size if self.defined_in == "gemma4_text" else None

    def weight(self) -> np.ndarray:
        """Gate matrix `f32[E, H]`, dequantised if need be."""
        m = self.matrix
        if "scales" not in m:
            return host(m["weight"])
        return host(mx.dequantize(m["weight"], m["scales"], m.get("biases"), m.group_size, m.bits, mode=m.mode))

    def logit_bias(self) -> np.ndarray | None:
        """Bias `f32[E]` of the gate's own linear layer, part of the logits."""
        return host(self.matrix.get("bias"))

    def bias(self) -> np.ndarray | None:
        """Correction bias `f32[E]`, added to the scores for the choice only."""
        return None if self.bias_owner is None else host(getattr(self.bias_owner, self.bias_name))

    def expert_scale(self) -> np.ndarray | None:
        """What the weights of each expert are multiplied by, `f32[E]`, for families that learn it."""
        return host(self.gate["per_expert_scale"]) if self.family.expert_scaled else None


def host(array: mx.array | None) -> np.ndarray | None:
    """An mlx array as float32 numpy (numpy knows no bfloat16)."""
    return None if array is None else np.array(array.astype(mx.float32))


def _is_switch(module: nn.Module) -> bool:
    # One stacked projection alone is no expert: an attention block may use it for its heads.
    projections = [c for c in module.children().values() if isinstance(c, (SwitchLinear, QuantizedSwitchLinear))]
    return len(projections) >= 2


def _expert_count(switch: nn.Module) -> int:
    return next(
        c for c in switch.children().values() if isinstance(c, (SwitchLinear, QuantizedSwitchLinear))
    ).num_experts


def find_blocks(model: nn.Module) -> list[Block]:
    """The MoE blocks of a model, by layer.

    Raises:
        UnsupportedModelError: no MoE layer, a refused family, or one that `SUPPORTED` does not list.
        GeometryError: layers differ in experts or experts per token.
    """
    blocks = []
    for layer_id, layer in enumerate(model.layers):
        modules = dict(layer.named_modules())
        switches = [path for path, module in modules.items() if path and _is_switch(module)]
        if len(switches) > 1:
            raise UnsupportedModelError(
                "more than one switch layer in a decoder layer", field=f"layer {layer_id}", got=switches, expected="one"
            )
        if switches:
            blocks.append(_block(layer_id, layer, modules, switches[0]))
    if not blocks:
        refuse(type(model).__module__)
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


def refuse(module: str) -> None:
    """Raise if the mlx-lm file of this name is one of `REFUSED`."""
    if reason := REFUSED.get(module.rsplit(".", 1)[-1]):
        raise UnsupportedModelError(reason, field="family", got=module.rsplit(".", 1)[-1])


def _block(layer_id: int, layer: nn.Module, modules: dict[str, nn.Module], path: str) -> Block:
    *around, switch_name = path.split(".")
    switch_owner = modules[".".join(around)]
    while not (named := [n for n in GATE_NAMES if isinstance(modules[".".join(around)].get(n), nn.Module)]):
        if not around:
            raise UnsupportedModelError("switch layer without a gate", field=f"layer {layer_id}.{path}")
        around.pop()
    owner = modules[".".join(around)]
    gate, defined_in = owner[named[0]], type(owner).__module__.rsplit(".", 1)[-1]
    refuse(defined_in)
    if defined_in not in SUPPORTED:
        raise UnsupportedModelError(
            "routing of this family is not described", field="family", got=defined_in, expected=sorted(SUPPORTED)
        )
    matrices = [m for _, m in gate.named_modules() if isinstance(m.get("weight"), mx.array) and m["weight"].ndim == 2]
    if len(matrices) != 1 or len(matrices[0]["weight"]) != _expert_count(modules[path]):
        raise UnsupportedModelError(
            "gate has no single [experts, hidden] matrix",
            field=f"layer {layer_id}.{named[0]}",
            got=[m["weight"].shape for m in matrices],
            expected=f"[{_expert_count(modules[path])}, hidden]",
        )
    biases = [(o, n) for o in (gate, owner) for n in BIAS_NAMES if isinstance(getattr(o, n, None), mx.array)]
    bias_owner, bias_name = biases[0] if biases else (None, "")
    norms = [layer[name] for name in NORM_NAMES if isinstance(layer.get(name), nn.Module)]
    settings = getattr(owner, "args", None) or getattr(owner, "config", None)
    return Block(
        layer_id=layer_id,
        layer=layer,
        gate=gate,
        matrix=matrices[0],
        bias_owner=bias_owner,
        bias_name=bias_name,
        switch_owner=switch_owner,
        switch_name=switch_name,
        norm=None if defined_in == "gemma4_text" else norms[0],
        family=SUPPORTED[defined_in](owner, gate, settings),
        defined_in=defined_in,
    )
