"""Installing a prerouter on a streamed model, and taking it off again without a trace.

    engine = StreamingEngine.load("softmax", EngineOptions(...))
    prerouter = install_prerouter(engine.loaded, spec, engine)         # heads from spec.weights_file
    engine.generate("Why is the sky blue?")                            # one token ahead
    prerouter.mode = "off"                                             # the plain engine, bit for bit
    uninstall(engine.loaded)

Only consumers' blocks get a hook (`hooks`); everything else listens. What must agree is checked first: routing family,
geometry, owners, the digest of the model that heads were trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import ContractError, GeometryError, IdentityError, ParameterError
from ..models.loading import LoadedModel
from ..params import known_names
from ..streaming.engine.engine import StreamingEngine
from ..streaming.layer.paths import StagedSwitch
from ..streaming.schedule.prefetch import Prefetcher
from .files import find_weights, read_heads
from .fills import Clock, fill_of, issue_of
from .heads import Head, HeadBank
from .hooks import BlockParts, attach, detach
from .modes import DEFAULT_MODE, DEFAULT_THRESHOLD, check_family, check_mode
from .spec import PrerouterSpec, Wiring
from .stager import CrossTokenStager, LingPrerouterStager, PrerouterStager

__all__ = ["Prerouter", "install_prerouter", "uninstall"]

INSTALLED = "_prerouter"
PASSES = ("run", "prefill")
"""The engine's ways to run a pass."""
STAGERS: dict[str, type[PrerouterStager]] = {"SOFTMAX_TOPK": CrossTokenStager, "SIGMOID_GROUP": LingPrerouterStager}


class Prerouter:
    """An installed prerouter; made by `install_prerouter`. As a context manager it is uninstalled in the end.

    Attributes:
        spec, wiring, heads, stager, fill: what it is made of. supply: where routes came from (`supply.Supply`).
    """

    def __init__(self, engine: StreamingEngine, spec: PrerouterSpec, wiring: Wiring, stager: PrerouterStager):
        self.engine, self.spec, self.wiring, self.stager = engine, spec, wiring, stager
        self.heads, self.fill, self.supply = stager.heads, stager.fill, stager.supply
        self._attached: list[nn.Module] = []
        self._cache: list[Any] | None = None  # of the request in progress

    @property
    def mode(self) -> str:
        return self.stager.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        """Between requests: what was predicted is forgotten. Raises as `modes.check_mode`."""
        self.set(mode)

    def set(self, mode: str, *, threshold: float | None = None) -> None:
        """Mode and threshold, between two requests. Raises ParameterError as `modes.check_mode`; ContractError: in a
        pass."""
        threshold = self.stager.threshold if threshold is None else threshold
        check_mode(mode, threshold=threshold, calibrated=self.stager.calibration is not None)
        if self.engine.forward.phase is not None:
            raise ContractError("a pass is running", field="mode", got=mode, expected="between two requests")
        self._forget()
        self.stager.mode, self.stager.threshold = mode, threshold

    def reset(self) -> None:
        """A new request begins. `StreamingEngine.reset` calls it, and so does `run` on another attention cache."""
        self._cache = None
        self.stager.reset()

    def uninstall(self) -> None:
        """Take everything off. Safe to call twice."""
        network = self.engine.loaded.model
        if getattr(network, INSTALLED, None) is not self:
            return
        self._forget()
        self.fill.close()
        while self._attached:
            detach(self._attached.pop())
        self.engine.forward.listeners.remove(self.stager)
        for name in ("reset", *PASSES):
            delattr(self.engine, name)
        self._cache = None
        object.__delattr__(network, INSTALLED)

    def _install(self) -> None:
        network, engine = self.engine.loaded.model, self.engine
        object.__setattr__(network, INSTALLED, self)
        engine.forward.listeners.append(self.stager)
        plain_reset = engine.reset

        def reset() -> None:
            plain_reset()
            self.reset()

        def following(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(tokens: mx.array, cache: list[Any], *rest: Any) -> Any:
                if cache is not self._cache:  # another sequence: whoever asks for passes himself need not say so
                    self.reset()
                    self._cache = cache
                return plain(tokens, cache, *rest)

            return call

        engine.reset = reset
        for name in PASSES:
            setattr(engine, name, following(getattr(engine, name)))
        for layer in self.wiring.consumer_index:
            hook = _hook(self.stager, layer, engine.switches[layer])
            attach(self.stager.parts[layer].module, hook, patch=self.spec.patch_call)
            self._attached.append(self.stager.parts[layer].module)

    def _forget(self) -> None:
        """Predictions, what they protect, and what was asked for on their account."""
        self.reset()
        self.fill.forget()
        for layer in self.wiring.consumer_index:
            self.stager.protection.lift(layer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: Any) -> None:
        self.uninstall()


@known_names
def install_prerouter(
    model: LoadedModel | nn.Module,
    spec: PrerouterSpec,
    store: StreamingEngine | Any,
    *,
    heads: HeadBank | Mapping[int, Head] | None = None,
    weights: str | Path | None = None,
    model_names: Sequence[str] = (),
    mode: str = DEFAULT_MODE,
    threshold: float = DEFAULT_THRESHOLD,
    calibration: Mapping[int, tuple[float, float]] | None = None,
    biased: bool = False,
    issue: str | None = None,
    extra: int = 0,
    protect: bool = True,
    compute_s: Sequence[float] | None = None,
    patience: float = 1.0,
    prefetcher: Prefetcher | None = None,
    precision: str = "float32",
) -> Prerouter:
    """Put heads to work on a streamed model.

    Args:
        model: the streamed model, or its mlx network.
        store: the streaming engine that holds its experts (or a `StreamedModel` inside `decoding()`).
        heads: ready made, by owner layer. None: read from a file.
        weights: that file; None = `spec.weights_file`, in the model's folder or in `artifacts/`.
        model_names: names under which the file may know the model, beside its digest (released files name the tier).
        mode, threshold: see `modes`. The default needs heads whose confidence is calibrated, as those trained here are;
            others are refused, so that nobody replaces routes without having said so.
        calibration: owner layer → (scale, offset); None = as the file says.
        biased: the router's correction bias is added to what heads say, for the choice. Not for heads trained here:
            they foretell the choice itself, bias included.
        issue: see `fills`; None = the earliest that the staged slots allow.
        extra: candidates beyond K that `advise` asks for.
        protect: predictions protect from eviction, and earn `pin_bonus` where experts are pinned.
        compute_s, patience: deadlines, see `fills.Clock`.
        prefetcher: of candidates without staged slots; None = all of them.
        precision: that the heads of a file compute in (`heads`).

    Raises:
        ContractError: the model has a prerouter. IdentityError: it is not the store's, or not the heads'.
        GeometryError: spec, heads and model do not fit. UnsupportedModelError: a block that cannot be hooked.
        ParameterError: an unknown choice, or one that the layers' options exclude.
    """
    if not isinstance(spec, PrerouterSpec):
        raise ParameterError("of another type", field="spec", got=type(spec).__name__, expected="PrerouterSpec")
    engine = _engine(store)
    loaded = engine.loaded
    if model is not loaded and model is not loaded.model:
        raise IdentityError(
            "this is not the model whose experts the store holds", field="model", got=type(model).__name__,
            expected=f"the network of {loaded.name}", fix="pass engine.loaded and the engine",
        )  # fmt: skip
    if hasattr(loaded.model, INSTALLED):
        raise ContractError(
            "the model has a prerouter", field="model", got=loaded.name, expected="none", fix="uninstall"
        )
    if spec.kind != loaded.family.kind:
        raise GeometryError("the model routes otherwise", field="kind", got=loaded.family.kind, expected=spec.kind)
    check_family(loaded.family)
    wiring = spec.wiring([block.layer_id for block in loaded.blocks], len(loaded.model.layers))
    if heads is None:
        heads, calibration = _read(weights, spec, wiring, loaded, model_names, precision, calibration)
    _check_heads(heads, wiring, loaded)
    if calibration is not None and sorted(calibration) != list(wiring.owners):
        raise GeometryError(
            "one pair an owner", field="calibration", got=sorted(calibration), expected=list(wiring.owners)
        )
    check_mode(mode, threshold=threshold, calibrated=calibration is not None)
    _check_layers(engine, extra)
    parts = [BlockParts(block) for block in loaded.blocks]
    issue = issue_of(engine, issue)
    fill = fill_of(engine, Clock(len(parts), compute_s, patience), prefetcher, protect=protect)
    stager = STAGERS[spec.kind](
        engine, wiring, heads, parts, fill, mode=mode, issue=issue, threshold=threshold, calibration=calibration,
        teacher=spec.feature_topk == "teacher", biased=biased, extra=extra, protect=protect,
    )  # fmt: skip
    prerouter = Prerouter(engine, spec, wiring, stager)
    prerouter._install()
    return prerouter


def uninstall(model: LoadedModel | nn.Module) -> None:
    """Take a model's prerouter off; nothing happens if it has none."""
    network = model.model if isinstance(model, LoadedModel) else model
    if (prerouter := getattr(network, INSTALLED, None)) is not None:
        prerouter.uninstall()


def _hook(stager: PrerouterStager, layer: int, switch: nn.Module):
    parts = stager.parts[layer]

    def hook(x: mx.array, original) -> mx.array:
        route = stager.route(layer, x)
        if route is None:
            return original(x)
        ids, weights = route
        return parts.output(x, _experts(switch, x, ids), weights)

    return hook


def _experts(switch: nn.Module, x: mx.array, ids: np.ndarray) -> mx.array:
    """Outputs `[1, 1, K, H]`. With `staged_replace` the set in the slots is the route, if it is this one."""
    if not isinstance(switch, StagedSwitch):
        return switch(x, mx.array(ids))
    if switch.options.staged_replace and switch.staged.ids == tuple(ids.reshape(-1).tolist()):
        return switch(x, None)
    return switch(x, ids)


def _engine(store: Any) -> StreamingEngine:
    engine = store if isinstance(store, StreamingEngine) else getattr(store, "engine", None)
    if not isinstance(engine, StreamingEngine):
        raise ParameterError(
            "predictions need a live engine", field="store", got=type(store).__name__,
            expected="a StreamingEngine, or a StreamedModel inside decoding()",
        )  # fmt: skip
    return engine


def _read(weights, spec, wiring, loaded, model_names, precision, calibration):
    found = read_heads(find_weights(spec.weights_file, loaded.path) if weights is None else weights)
    found.check(
        spec, owners=wiring.owners, model=(loaded.model_digest, *model_names), experts=loaded.geometry.experts,
        top_k=loaded.geometry.top_k, width=loaded.geometry.hidden,
    )  # fmt: skip
    if calibration is None and found.identity.confidence:
        calibration = dict(zip(found.identity.owners, found.identity.confidence, strict=True))
    return found.bank(precision=precision), calibration


def _check_heads(heads: HeadBank | Mapping[int, Head], wiring: Wiring, loaded: LoadedModel) -> None:
    owners = heads.owners if isinstance(heads, HeadBank) else tuple(sorted(heads))
    if owners != wiring.owners:
        raise GeometryError("not the owners' heads", field="heads", got=owners, expected=wiring.owners)
    for owner in owners:
        head = heads.head(owner) if isinstance(heads, HeadBank) else heads[owner]
        got, expected = (head.experts, head.width), (loaded.geometry.experts, loaded.geometry.hidden)
        if got != expected:
            raise GeometryError("head of another model", field=f"layer {owner}: E, H", got=got, expected=expected)


def _check_layers(engine: StreamingEngine, extra: int) -> None:
    layer = engine.options.layer
    if extra < 0 or extra + engine.loaded.family.top_k > engine.loaded.geometry.experts:
        raise ParameterError("no such candidates", field="extra", got=extra, expected="0 to E - K")
    if layer is None:
        return
    if layer.on_missing not in ("exact", "raise"):
        raise ParameterError(
            "experts would be dropped where nothing is predicted", field="on_missing", got=layer.on_missing,
            expected=("exact", "raise"),
        )  # fmt: skip
    if layer.staged and layer.staged_n < engine.loaded.family.top_k:
        raise GeometryError(
            "a predicted route does not fit the staged slots", field="staged_n", got=layer.staged_n,
            expected=f">= {engine.loaded.family.top_k}",
        )  # fmt: skip
