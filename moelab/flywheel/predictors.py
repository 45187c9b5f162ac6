"""Small learned predictors of expert routes.

The near-term predictor reads one representation per layer that exists before the layer's experts are
needed, and scores that layer's experts:

    trunk   u = gelu(scale_l * (A · rms(x_l)) + shift_l)      one A shared by all layers
    head    z = gain_l * gate_l + B_l · u + bias_l            gate_l: the layer's own gate, applied early

At initialisation B and bias are zero and gain is one, so the untrained predictor *is* the training-free
control "target gate applied early", and training can only be credited with what it adds. Without gate
scores (`gate=False`) the head starts from a small random B.

Legend: `T` tokens, `L` MoE layers, `E` experts, `H` feature width, `R` rank.
Source: AFN-021, "What feature should the sidecar see?" (shared low-rank trunk, layer embedding).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..artifacts import read_tensors, write_tensors
from ..errors import GeometryError, IdentityError

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PredictorIdentity:
    """What a checkpoint may be used with. Compared field by field on load.

    `horizon` is one of DESIGN's ("half layer", "1 layer", "1 token", "1 token + 1 layer"); `feature` names
    the representation and `shift` how many layers before its target it is taken.
    """

    model: str
    layers: int
    experts: int
    top_k: int
    width: int
    horizon: str
    feature: str
    shift: int
    snapshot: str


class NearTermPredictor(nn.Module):
    """Shared low-rank trunk with per-layer heads. See the module text for the formula."""

    def __init__(self, identity: PredictorIdentity, *, rank: int = 64, gate: bool = True, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        L, E, H = identity.layers, identity.experts, identity.width
        self.identity, self.rank, self.gate = identity, rank, gate
        self.trunk = nn.Parameter(torch.randn(rank, H, generator=generator) / H**0.5)
        self.scale = nn.Parameter(torch.ones(L, rank))
        self.shift = nn.Parameter(torch.zeros(L, rank))
        head = torch.zeros(L, E, rank) if gate else torch.randn(L, E, rank, generator=generator) / rank**0.5
        self.head = nn.Parameter(head)
        self.bias = nn.Parameter(torch.zeros(L, E))
        self.gain = nn.Parameter(torch.ones(L, 1))

    def forward(self, features: torch.Tensor, gate_scores: torch.Tensor | None = None) -> torch.Tensor:
        """`features` [T, L, H] and, with `gate=True`, `gate_scores` [T, L, E] → scores [T, L, E].

        Row `l` of both belongs to *target* layer `l`; sigmoid(score) is the predicted probability that the
        expert is selected. Raises GeometryError on another shape.
        """
        expected = (self.identity.layers, self.identity.width)
        if tuple(features.shape[1:]) != expected:
            raise GeometryError(
                "features of another shape",
                field="features",
                got=tuple(features.shape),
                expected=f"[T, {expected[0]}, {expected[1]}]",
            )
        if self.gate != (gate_scores is not None):
            raise GeometryError(
                "gate scores given to a predictor without them, or missing",
                field="gate_scores",
                got=gate_scores is not None,
                expected=self.gate,
            )
        normed = features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-6)
        hidden = nn.functional.gelu(torch.einsum("tlh,rh->tlr", normed, self.trunk) * self.scale + self.shift)
        scores = torch.einsum("tlr,ler->tle", hidden, self.head) + self.bias
        return scores + self.gain * gate_scores if self.gate else scores

    @torch.no_grad()
    def scores(self, features: np.ndarray, gate_scores: np.ndarray | None = None, *, batch: int = 4096) -> np.ndarray:
        """numpy in, numpy out, in batches: f32[T, L, E]."""
        out = np.empty((len(features), self.identity.layers, self.identity.experts), np.float32)
        for start in range(0, len(features), batch):
            rows = slice(start, start + batch)
            gate = None if gate_scores is None else torch.from_numpy(gate_scores[rows].astype(np.float32, copy=False))
            out[rows] = self(torch.from_numpy(features[rows].astype(np.float32, copy=False)), gate).numpy()
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the float32 parameters: what the predictor costs in memory."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def save(self, path: str | Path) -> None:
        tensors = {name: value.detach().cpu().numpy() for name, value in self.state_dict().items()}
        write_tensors(path, tensors, _header(self))

    @classmethod
    def load(cls, path: str | Path, *, expected: PredictorIdentity | None = None) -> NearTermPredictor:
        """Raises IdentityError naming the first field that differs, GeometryError on a foreign tensor set."""
        tensors, header = read_tensors(path)
        if header.get("format_version") != FORMAT_VERSION or header.get("kind") != cls.__name__:
            raise IdentityError(
                "not a predictor this version reads",
                file=path,
                field="kind, format_version",
                got=(header.get("kind"), header.get("format_version")),
                expected=(cls.__name__, FORMAT_VERSION),
            )
        identity = PredictorIdentity(**header["identity"])
        if expected is not None:
            for name, value in asdict(expected).items():
                if getattr(identity, name) != value:
                    raise IdentityError(
                        "predictor of another identity",
                        file=path,
                        field=name,
                        got=getattr(identity, name),
                        expected=value,
                    )
        model = cls(identity, rank=header["rank"], gate=header["gate"])
        own = model.state_dict()
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        if (got := {name: tuple(value.shape) for name, value in tensors.items()}) != shapes:
            raise GeometryError("tensors of another shape", file=path, got=got, expected=shapes)
        if bad := [name for name, value in tensors.items() if not np.isfinite(value).all()]:
            raise GeometryError("tensor is not finite", file=path, field=bad[0])
        model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
        return model


def _header(model: NearTermPredictor) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "kind": type(model).__name__,
        "identity": asdict(model.identity),
        "rank": model.rank,
        "gate": model.gate,
    }
