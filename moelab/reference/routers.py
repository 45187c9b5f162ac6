"""What the gates of a torch model choose, and the pressure that keeps them from choosing always the same.

Left alone, a gate collapses: the experts it likes learn faster, so it likes them more. Two remedies, as
the two families use them:

* a *balance loss* (Shazeer et al. 2017; Fedus et al. 2021, eq. 4): E·Σ_e f_e·p_e, with f_e the share of
  choices that fell on expert e and p_e its mean probability; 1 when both are uniform. It is taken layer by
  layer: summed over layers first, one layer's collapse hides behind another's;
* a *correction bias* (Wang et al. 2024, arXiv:2408.15664): after each step the bias of every expert with
  less than its share of choices is raised by a constant, of every other lowered. It enters the choice, not
  the weights, so it costs the loss nothing.
"""

from __future__ import annotations

from typing import Any

import torch


class RouterTap:
    """Records every gate of a torch model while it runs; a context manager.

    `logits[l] f32[N,E]`, `weights[l] f32[N,K]` and `ids[l] i64[N,K]` of the last forward pass, N = B·T.
    """

    def __init__(self, network: Any):
        self._gates = [layer.mlp.gate for layer in network.model.layers]

    def __enter__(self) -> RouterTap:
        layers = len(self._gates)
        self.logits, self.weights, self.ids = ([None] * layers for _ in range(3))
        self._hooks = [gate.register_forward_hook(self._note(layer)) for layer, gate in enumerate(self._gates)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, layer: int):
        def hook(module, inputs, output):
            self.logits[layer], self.weights[layer], self.ids[layer] = output

        return hook


def balance_loss(logits: list[torch.Tensor], ids: list[torch.Tensor], *, sigmoid: bool) -> torch.Tensor:
    """Mean over layers of E·Σ_e f_e·p_e; 1 at uniform use. Sigmoid scores are normalised to sum to one.

    `logits[l]` is `[N,E]`, `ids[l]` is `[N,K]`; only p carries a gradient.
    """
    losses = []
    for layer_logits, layer_ids in zip(logits, ids, strict=True):
        experts = layer_logits.shape[-1]
        score = layer_logits.sigmoid() if sigmoid else layer_logits.softmax(-1)
        probability = (score / score.sum(-1, keepdim=True)).mean(0)
        share = torch.bincount(layer_ids.reshape(-1), minlength=experts) / layer_ids.numel()
        losses.append(experts * (share * probability).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def move_bias(network: Any, ids: list[torch.Tensor], step: float) -> None:
    """Raise the correction bias of experts below their share of choices by `step`, lower the others'."""
    for layer, chosen in zip(network.model.layers, ids, strict=True):
        bias = layer.mlp.gate.e_score_correction_bias
        load = torch.bincount(chosen.reshape(-1), minlength=len(bias)).float()
        bias += step * (load.mean() - load).sign()
