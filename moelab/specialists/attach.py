"""Attach a bank to a model: the layers that a manifest names run through their policies.

A layer's own MLP becomes the anchor of a `RoutedMlp` that stands in its place. Nothing of the model is
copied or changed: detaching puts the same modules back, so the model is restored bit for bit.

What policies do not do is given as plain callables: a router gives the scores, and an availability
says which specialists may run now, for instance those that a cache holds or will hold in time.

In the shape descriptions, `B` is the batch, `T` the tokens, `H` the hidden width and `N` the
specialists of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moelab.errors import GeometryError, IdentityError, PolicyError
from moelab.policies import (
    AlwaysOnAnchorCombination,
    DispatchResult,
    LoRASpecialist,
    PolicyConfig,
    PolicyManifest,
)
from moelab.policies.lora import check_specialists, merged
from moelab.specialists.bank import Specialist, SpecialistBank, state_digest

# (layer, hidden states `[B, T, H]`) to calibrated scores `[B, T, N]`.
Router = Callable[[int, Tensor], Tensor]
# (layer, expert ids) to bool `[N]` or `[B, T, N]`, or None when all are available.
Availability = Callable[[int, tuple[str, ...]], Tensor | None]
# (layer, result): called after every dispatch, for telemetry.
Observer = Callable[[int, DispatchResult], None]


class RoutedMlp(nn.Module):
    """Stands where a layer's MLP stood, and runs it as the anchor of the layer's policies."""

    def __init__(self, layer: int, anchor: nn.Module, expert_ids, experts, config: PolicyConfig, callables):
        super().__init__()
        self.layer, self.anchor, self.expert_ids, self.experts = layer, anchor, expert_ids, experts
        self.dispatcher = config.build()
        self.router, self.availability, self.observer = callables

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[B, T, H]` to `[B, T, H]`."""
        result = self.dispatcher.dispatch(
            hidden_states,
            expert_scores=self.router(self.layer, hidden_states),
            expert_ids=self.expert_ids,
            anchor_mlp=self.anchor,
            experts=self.experts,
            expert_availability=self.availability and self.availability(self.layer, self.expert_ids),
        )
        if self.observer is not None:
            self.observer(self.layer, result)
        return result.output


@dataclass(frozen=True)
class Attachment:
    """A model with routed layers. Detach by `detach()`, or by leaving a `with` block.

    model: the model, changed in place.
    anchors: by module path, the MLPs that were there.
    """

    model: nn.Module
    anchors: Mapping[str, nn.Module]

    def detach(self) -> None:
        """Put the model's own MLPs back; a second call does nothing."""
        for path, anchor in self.anchors.items():
            _replace(self.model, path, anchor)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_) -> None:
        self.detach()


def attach(
    model: nn.Module,
    bank: SpecialistBank,
    manifest: PolicyManifest,
    *,
    mlp_paths: Mapping[int, str],
    router: Router,
    availability: Availability | None = None,
    observer: Observer | None = None,
) -> Attachment:
    """Route the layers that the manifest names.

    model: the base model, with the digest that bank and manifest were made for.
    mlp_paths: by layer, where its MLP is in the model, such as `layers.3.mlp`.
    Raises `IdentityError` for another base model, `GeometryError` for specialists of another width than
    the layer's MLP or a path that is not there, `PolicyError` for a policy that cannot run the layer's
    specialists. The model is unchanged then.
    """
    digest = state_digest(model)
    for name, expected in (("bank", bank.base_digest), ("manifest", manifest.base_digest)):
        if expected != digest:
            raise IdentityError(f"the {name} was made for another base model", got=digest, expected=expected)
    routed = {}
    for layer, config in sorted(manifest.layers.items()):
        if layer not in mlp_paths:
            raise GeometryError("a layer has no path", field="mlp_paths", got=sorted(mlp_paths), expected=layer)
        try:
            anchor = model.get_submodule(mlp_paths[layer])
        except AttributeError:
            got = mlp_paths[layer]
            raise GeometryError("no module there", field="mlp_paths", got=got, expected="a module's path") from None
        entries = bank.list(layer)
        ids = tuple(entry.id for entry in entries)
        config.selection.check_experts(ids)
        dtype = next((value.dtype for value in anchor.parameters()), None)
        experts = []
        for entry in entries:
            _check_width(entry, anchor)
            experts.append(as_expert(entry, bank.load(entry, dtype=dtype), anchor, config))
        routed[mlp_paths[layer]] = RoutedMlp(layer, anchor, ids, experts, config, (router, availability, observer))
    attachment = Attachment(model, {path: mlp.anchor for path, mlp in routed.items()})
    for path, mlp in routed.items():
        _replace(model, path, mlp)
    return attachment


def as_expert(entry: Specialist, specialist: nn.Module | LoRASpecialist, anchor: nn.Module, config: PolicyConfig):
    """The specialist in the form that the policies run: a whole output, a correction, or updates."""
    if entry.kind == "lora":
        check_specialists(anchor, [specialist], [entry.id])
    if config.execution == "parameters":
        if entry.kind != "lora":
            got = f"{entry.id}: {entry.kind}"
            raise PolicyError("parameters cannot be merged", field="execution", got=got, expected="kind lora")
        return specialist
    combination = config.combination
    wants_delta = isinstance(combination, AlwaysOnAnchorCombination) and combination.expert_outputs == "delta"
    run = partial(_run_merged, anchor, specialist) if entry.kind == "lora" else specialist
    if (entry.kind == "delta") == wants_delta:
        return run
    if wants_delta:
        return lambda rows: run(rows) - anchor(rows)
    return lambda rows: anchor(rows) + run(rows)


def _run_merged(anchor: nn.Module, specialist: LoRASpecialist, rows: Tensor) -> Tensor:
    """The anchor with one specialist's updates merged whole."""
    indices = torch.ones(len(rows), 1, dtype=torch.int64, device=rows.device)
    with merged(anchor, [specialist], indices, torch.ones_like(indices, dtype=torch.float32)):
        return anchor(rows)


def _check_width(entry: Specialist, anchor: nn.Module) -> None:
    """Refuse a specialist of another width than the first projection of the layer's MLP."""
    for layer in anchor.modules():
        if isinstance(layer, nn.Linear):
            if layer.in_features != entry.hidden_size:
                raise GeometryError(
                    f"{entry.id} does not fit layer {entry.layer}",
                    field="hidden_size",
                    got=entry.hidden_size,
                    expected=layer.in_features,
                )
            return


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
