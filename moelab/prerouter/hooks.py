"""Two ways to put a prediction into a MoE block, and the block's arithmetic with a route that is given.

* `patch`: the block's class gets a `__call__` that looks for a hook on the instance, once per class however often it is
  asked for; an instance without a hook runs the original. For model code that knows nothing of predictions.
* `swap`: the instance gets a subclass of its class with the hook, and no other instance or class is touched.

Both are taken off without a trace. A hook is called as `hook(x, original)`.

With a given route a block computes `sum_k w_k · expert_k(x)` and adds its shared expert, as its own code does; the gate
is not evaluated. On the same experts and weights the output has the bits of the block's own call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..errors import ContractError, UnsupportedModelError
from ..models.blocks import Block
from ..models.gates import FLOAT32_GATES
from ..streaming.layer.install import SHARED, shared_expert

__all__ = ["BlockParts", "attach", "detach", "is_hooked"]

HOOK = "_prerouter_hook"
Hook = Callable[[mx.array, Callable[[mx.array], mx.array]], mx.array]

OTHERWISE = {
    "Klear": "a learned coefficient mixes routed and shared outputs",
    "deepseek_v41": "the experts weigh their outputs themselves",
    "gemma4_text": "the router reads another state than the experts",
    "kimi_k3": "the experts work in a space of their own",
    "llama4": "weights scale what the expert reads",
    "phimoe": "weights depend on the order in which experts are picked",
}
"""mlx-lm files whose block is not this sum, and why; that of all others in `models.SUPPORTED` is."""
FLOAT32_WEIGHTS = {
    "afmoe", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe",
    "glm4_moe_lite", "granitemoe", "laguna", "mimo_v2_flash", "mistral4", "nemotron_h", "step3p5",
}  # fmt: skip
"""Their weights stay float32; those of the others have the type of the block's input."""

_patched: dict[type, tuple[object, int]] = {}  # class -> its own `__call__` or None, and instances with a hook
_hooked: dict[type, type] = {}


def attach(block: nn.Module, hook: Hook, *, patch: bool) -> None:
    """Put a hook on a block: class patched, or subclass swapped in. Raises ContractError: it has one."""
    if is_hooked(block):
        raise ContractError("this block has a hook", field="block", got=type(block).__name__, expected="none")
    if patch:
        _patch(type(block))
    else:
        block.__class__ = _subclass(type(block))
    object.__setattr__(block, HOOK, hook)


def detach(block: nn.Module) -> None:
    """Take the hook off again. Raises ContractError: it has none."""
    if not is_hooked(block):
        raise ContractError("this block has no hook", field="block", got=type(block).__name__, expected="one")
    object.__delattr__(block, HOOK)
    if (base := type(block).__mro__[1]) in _hooked and type(block) is _hooked[base]:
        block.__class__ = base
    else:
        _unpatch(type(block))


def is_hooked(block: nn.Module) -> bool:
    return HOOK in block.__dict__


def _call_of(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def call(self: nn.Module, x: mx.array) -> mx.array:
        hook = self.__dict__.get(HOOK)
        return original(self, x) if hook is None else hook(x, functools.partial(original, self))

    call.__dict__[HOOK] = True
    return call


def _original(cls: type) -> Callable[..., mx.array]:
    """The class's call as if nothing were patched: two hooks on top of each other would call each other."""
    return cls.__call__.__wrapped__ if HOOK in vars(cls.__call__) else cls.__call__


def _patch(cls: type) -> None:
    own, count = _patched.get(cls, (cls.__dict__.get("__call__"), 0))
    if not count:
        cls.__call__ = _call_of(_original(cls))
    _patched[cls] = own, count + 1


def _unpatch(cls: type) -> None:
    own, count = _patched[cls]
    if count > 1:
        _patched[cls] = own, count - 1
        return
    del _patched[cls]
    if own is None:
        del cls.__call__
    else:
        cls.__call__ = own


def _subclass(cls: type) -> type:
    if cls not in _hooked:
        body = {"__call__": _call_of(_original(cls)), "__module__": cls.__module__}
        _hooked[cls] = type(f"Prerouted{cls.__name__}", (cls,), body)
    return _hooked[cls]


class BlockParts:
    """A MoE block taken apart.

    Attributes:
        block: as found by `models.find_blocks`. module: the mlx module that is called with `x [B, T, H]`.

    Raises:
        UnsupportedModelError: its arithmetic is not described here.
    """

    def __init__(self, block: Block):
        module = block.switch_owner
        reason = OTHERWISE.get(block.defined_in)
        if reason is None and getattr(module, "moe_latent_size", None) is not None:
            reason = OTHERWISE["kimi_k3"]  # nemotron_h, where its configuration asks for it
        if reason is None and not any(child is block.gate for child in module.children().values()):
            reason = "the gate is no part of the block"
        if reason is not None:
            raise UnsupportedModelError(
                "a prediction cannot take the place of this gate", field="family", got=f"{block.defined_in}: {reason}",
                expected="a sum of experts by their weights, and a shared expert",
            )  # fmt: skip
        self.block, self.module = block, module
        self._wide = block.defined_in in FLOAT32_WEIGHTS
        has_shared = any(isinstance(module.get(name), nn.Module) for name in SHARED)
        self._shared = shared_expert(block) if has_shared else None
        self._scale = module.routed_scaling_factor if block.defined_in == "laguna" else None  # of the sum

    @property
    def bias(self) -> mx.array | None:
        """The gate's correction bias `[E]`."""
        return None if self.block.bias_owner is None else getattr(self.block.bias_owner, self.block.bias_name)

    def logits(self, x: mx.array) -> mx.array:
        """The gate's own logits `[..., E]`."""
        matrix = self.block.matrix
        linear = isinstance(matrix, (nn.Linear, nn.QuantizedLinear))
        x = x.astype(mx.float32) if self.block.defined_in in FLOAT32_GATES else x
        return matrix(x) if linear else x @ matrix["weight"].T

    def output(self, x: mx.array, experts: mx.array, weights: mx.array) -> mx.array:
        """`[..., H]` of the outputs of chosen experts `[..., K, H]` and their weights `[..., K]`."""
        weights = weights if self._wide else weights.astype(x.dtype)
        out = (experts * weights[..., None]).sum(axis=-2).astype(experts.dtype)
        out = out if self._scale is None else out * self._scale
        return out if self._shared is None else out + self._shared(x)
