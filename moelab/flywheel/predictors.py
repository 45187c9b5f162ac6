"""Small learned predictors of expert routes.

The near-term predictor reads one representation per layer that exists before the layer's experts are
needed, and scores that layer's experts:

    trunk   u = gelu(scale_l * (A · rms(x_l)) + shift_l)      one A shared by all layers
    anchor  a = gate_l - t_l                                  gate_l: the layer's own gate, applied early
    head    z = gain_l * a + B_l · u + bias_l                 t_l: half way from its K-th to its next score

At initialisation B and bias are zero and gain is one, so the untrained predictor *is* the training-free
control "target gate applied early", and training can only be credited with what it adds. Subtracting the
threshold moves no expert past another: it says "selected" where a is positive, so that sigmoid(z) starts
near a probability, whatever the row's offset. Scores on the scale of logits serve best, and those of dropped
groups unmasked: a gap of a mask's size is more than a trunk can learn to bridge. Without gate scores
(`gate=False`) the head starts from a small random B.

`x_l` may be several vectors side by side (`parts`), each brought to unit scale by itself: the own
pre-attention state and the previous token's expert input, say, which tells what attention is about to add.

Legend: `T` tokens, `L` MoE layers, `E` experts, `K` experts per token, `H` feature width, `R` rank.
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
from ..errors import GeometryError, IdentityError, RecordError

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PredictorIdentity:
    """What a checkpoint may be used with. Compared field by field on load.

    `horizon` is one of ("half layer", "1 layer", "1 token", "1 token + 1 layer"); `feature` names
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

    def __post_init__(self):
        if min(self.layers, self.top_k, self.width) < 1 or self.top_k >= self.experts:
            got = (self.layers, self.experts, self.top_k, self.width)
            raise GeometryError(
                "impossible geometry", field="layers, experts, top_k, width", got=got, expected="0 < top_k < experts"
            )


class NearTermPredictor(nn.Module):
    """Shared low-rank trunk with per-layer heads. See the module text for the formula."""

    decayed = frozenset({"trunk", "head"})
    """Parameters that weight decay is for."""

    def __init__(
        self, identity: PredictorIdentity, *, rank: int = 64, gate: bool = True, parts: int = 1, seed: int = 0
    ):
        super().__init__()
        L, E, H = identity.layers, identity.experts, identity.width
        if parts < 1 or H % parts:
            raise GeometryError("width is not that many equal parts", field="parts", got=parts, expected=f"of {H}")
        generator = torch.Generator().manual_seed(seed)
        self.identity, self.rank, self.gate, self.parts = identity, rank, gate, parts
        self.trunk = nn.Parameter(torch.randn(rank, H, generator=generator) / H**0.5)
        self.scale = nn.Parameter(torch.ones(L, rank))
        self.shift = nn.Parameter(torch.zeros(L, rank))
        head = torch.zeros(L, E, rank) if gate else torch.randn(L, E, rank, generator=generator) / rank**0.5
        self.head = nn.Parameter(head)
        self.bias = nn.Parameter(torch.zeros(L, E))
        self.gain = nn.Parameter(torch.ones(L, 1))

    def forward(self, features: torch.Tensor, gate_scores: torch.Tensor | None = None) -> torch.Tensor:
        """`features` [T, L, H] and, with `gate=True`, finite `gate_scores` [T, L, E] → scores [T, L, E].

        Row `l` of both belongs to *target* layer `l`; sigmoid(score) is the predicted probability that the
        expert is selected. Raises GeometryError on another shape.
        """
        L, E, H = self.identity.layers, self.identity.experts, self.identity.width
        _require("features", features, (len(features), L, H))
        if self.gate != (given := gate_scores is not None):
            raise GeometryError(
                "gate scores missing, or not wanted", field="gate_scores", got=given, expected=self.gate
            )
        split = features.unflatten(-1, (self.parts, -1))
        normed = (split * torch.rsqrt(split.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2)
        hidden = nn.functional.gelu(torch.einsum("tlh,rh->tlr", normed, self.trunk) * self.scale + self.shift)
        scores = torch.einsum("tlr,ler->tle", hidden, self.head) + self.bias
        if gate_scores is None:
            return scores
        _require("gate_scores", gate_scores, (len(features), L, E))
        return scores + self.gain * anchored(gate_scores, self.identity.top_k)

    @torch.no_grad()
    def scores(self, features: np.ndarray, gate_scores: np.ndarray | None = None, *, batch: int = 1024) -> np.ndarray:
        """numpy in, numpy out, `batch` tokens at a time: f32[T, L, E].

        Raises:
            GeometryError: as `forward`. RecordError: a score is not finite.
        """
        device = self.trunk.device
        out = np.empty((len(features), self.identity.layers, self.identity.experts), np.float32)
        for start in range(0, len(features), batch):
            rows = slice(start, start + batch)
            gate = None if gate_scores is None else as_tensor(gate_scores[rows], device)
            out[rows] = self(as_tensor(features[rows], device), gate).cpu().numpy()
        if not np.isfinite(out).all():
            raise RecordError("prediction is not finite", field="features, gate_scores", expected="finite numbers")
        return out

    @torch.no_grad()
    def fold(self, scale: np.ndarray, bias: np.ndarray) -> None:
        """Put a calibration into the weights: scores of layer l become scale_l * score + bias_l; no ranking changes."""
        scale, bias = (as_tensor(np.reshape(v, (-1, 1)), self.trunk.device) for v in (scale, bias))
        _require("scale", scale, (self.identity.layers, 1))
        if not bool((scale > 0).all()):
            raise GeometryError(
                "scale would turn a ranking round", field="scale", got=float(scale.min()), expected="> 0"
            )
        self.head *= scale[..., None]
        self.gain *= scale
        self.bias.mul_(scale).add_(bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the float32 parameters: what the predictor costs in memory."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def save(self, path: str | Path) -> None:
        """One safetensors file, equal for equal weights, written aside and renamed."""
        header = {"format_version": FORMAT_VERSION, "kind": type(self).__name__, "identity": asdict(self.identity)}
        shape = {"rank": self.rank, "gate": self.gate, "parts": self.parts}
        write_tensors(path, {name: t.cpu().numpy() for name, t in self.state_dict().items()}, header | shape)

    @classmethod
    def load(cls, path: str | Path, *, expected: PredictorIdentity | None = None) -> NearTermPredictor:
        """Raises IdentityError naming the first field that differs, GeometryError on foreign or non-finite tensors."""
        tensors, header = read_tensors(path)
        got, wanted = (header.get("kind"), header.get("format_version")), (cls.__name__, FORMAT_VERSION)
        if got != wanted:
            problem = "not a predictor this version reads"
            raise IdentityError(problem, file=path, field="kind, format_version", got=got, expected=wanted)
        try:
            identity = PredictorIdentity(**header["identity"])
            model = cls(identity, **{name: header[name] for name in ("rank", "gate", "parts")})
        except (KeyError, TypeError) as error:
            raise IdentityError("header lacks or adds a field", file=path, field="identity", got=str(error)) from None
        for name, value in asdict(expected or identity).items():
            if (got := getattr(identity, name)) != value:
                raise IdentityError("predictor of another identity", file=path, field=name, got=got, expected=value)
        own = {name: (tuple(value.shape), "float32") for name, value in model.state_dict().items()}
        if (got := {name: (value.shape, str(value.dtype)) for name, value in tensors.items()}) != own:
            raise GeometryError("tensors of another shape", file=path, got=got, expected=own)
        if bad := [name for name, value in tensors.items() if not np.isfinite(value).all()]:
            raise GeometryError("tensor is not finite", file=path, field=bad[0], expected="finite numbers")
        model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
        return model.eval()


def anchored(gate_scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Gate scores [..., E] less the row's own threshold, half way between its K-th and its next score."""
    return gate_scores - gate_scores.topk(top_k + 1, -1).values[..., -2:].mean(-1, keepdim=True)


def as_tensor(array: Any, device: torch.device | str) -> torch.Tensor:
    """A float32 copy on `device`; a copy always, since torch can neither wrap read-only nor reversed arrays."""
    return torch.from_numpy(np.array(array, np.float32, order="C")).to(device)


def _require(field: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise GeometryError("array of another shape", field=field, got=tuple(value.shape), expected=shape)
