"""Prerouter heads in torch: the form that is trained, for all heads at once.

The same formula as `heads`, column gather included, on float32 parameters. What a head is told travels as one array
`[T, n, H + 2K]`, row i for `owners[i]`: the hidden state, then the ids of the experts executed at this token and at
the one before, as numbers, `NONE` where there was no token. (A number is exact up to 2^24 in float32 and 2048 in
float16; `told` refuses more.)

`tensors` gives what a weight file holds, rounded to the file's type; `of` takes it back.

Initialisation: `linear_init` and `fc2` are zero, so that an untrained head says nothing about any expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..errors import GeometryError, RecordError

if TYPE_CHECKING:
    from .identity import HeadFile, HeadIdentity

NONE = -1
"""Id of an expert that was not there: the token before the first."""


def told(hidden: np.ndarray, current: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """`f16|f32 [T, n, H + 2K]` of `hidden [T, n, H]` and ids `[T, n, K]`; `previous` is `NONE` where there is none.

    Raises:
        GeometryError: arrays that do not belong together. RecordError: an id that the type of `hidden` cannot carry.
    """
    if current.shape != previous.shape or current.shape[:-1] != hidden.shape[:-1]:
        got = (hidden.shape, current.shape, previous.shape)
        raise GeometryError("rows do not line up", field="hidden, current, previous", got=got)
    limit = 2 ** (np.finfo(hidden.dtype).nmant + 1)
    if current.size and max(current.max(), previous.max()) > limit:
        raise RecordError("id too large", field="current", got=int(current.max()), expected=f"<= {limit}")
    return np.concatenate([hidden, current.astype(hidden.dtype), previous.astype(hidden.dtype)], axis=-1)


class TorchHeads(nn.Module):
    """Heads of a `HeadIdentity`, of its form. `decayed`: the parameters that weight decay is for."""

    decayed = frozenset({"map", "columns", "fc2"})
    gate = False  # no gate scores are wanted: see `flywheel.train.fit`

    def __init__(self, identity: HeadIdentity, *, seed: int = 0):
        super().__init__()
        self.identity = identity
        n, E, H, D = len(identity.owners), identity.experts, identity.width, identity.hidden
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float) -> torch.Tensor:
            return torch.randn(*shape, generator=draw) * scale

        # Normed hidden states have unit entries, so H of them and 2K columns add to about unit variance.
        if identity.form == "full":
            map_, columns = torch.zeros(n, D + E, H), torch.zeros(n, 2 * E, D + E)
            map_[:, :D], columns[..., :D] = normal(n, D, H, scale=H**-0.5), normal(n, 2 * E, D, scale=0.05)
            parts = {"map": map_, "columns": columns}
        else:
            parts = {"map": normal(D, H, scale=H**-0.5), "columns": normal(2 * E, D, scale=0.3)}
            parts |= {"scale": torch.ones(n, D)}
        for name, value in (parts | {"fc2": torch.zeros(n, E, D)}).items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, features: torch.Tensor, gate_scores: None = None) -> torch.Tensor:
        """`features [T, n, H + 2K]` (`told`) → logits `[T, n, E]`. Raises GeometryError on another shape."""
        own = self.identity
        n, E, H, K = len(own.owners), own.experts, own.width, own.top_k
        if features.shape[1:] != (n, H + 2 * K):
            raise GeometryError(
                "features of another shape", field="features", got=tuple(features.shape), expected=("T", n, H + 2 * K)
            )
        hidden, ids = features[..., :H], features[..., H:].to(torch.int64)
        ids = torch.where(ids < 0, -1, ids + torch.arange(2).repeat_interleave(K).to(ids.device) * E)
        rows = self.columns.reshape(-1, self.columns.shape[-1])
        if own.form == "full":
            first = torch.einsum("tnh,nah->tna", hidden, self.map)
            ids = torch.where(ids < 0, ids, ids + torch.arange(n, device=ids.device)[:, None] * (2 * E))
        else:
            first = hidden @ self.map.T
        none = len(rows)
        table = torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])
        flat = torch.where(ids < 0, none, ids).reshape(-1, 2 * K)
        gathered = nn.functional.embedding_bag(flat, table, mode="sum", padding_idx=none)
        return self._second(first + gathered.reshape(first.shape))

    def _second(self, first: torch.Tensor) -> torch.Tensor:
        D = self.identity.hidden
        if self.identity.form == "full":
            bent = nn.functional.gelu(first[..., :D])
            return first[..., D:] + torch.einsum("tnd,ned->tne", bent, self.fc2)
        return torch.einsum("tnd,ned->tne", nn.functional.gelu(first * self.scale), self.fc2)

    @torch.no_grad()
    def scores(self, features: np.ndarray, gate_scores: None = None, *, batch: int = 2048) -> np.ndarray:
        """numpy in, numpy out, `batch` tokens at a time: `f32[T, n, E]`.

        Raises:
            GeometryError: as `forward`. RecordError: a logit is not finite.
        """
        out = np.empty((len(features), len(self.identity.owners), self.identity.experts), np.float32)
        for start in range(0, len(features), batch):
            rows = slice(start, start + batch)
            out[rows] = self(torch.from_numpy(features[rows].astype(np.float32)).to(self.fc2.device)).cpu().numpy()
        if not np.isfinite(out).all():
            raise RecordError("prediction is not finite", field="features", expected="finite numbers")
        return out

    @torch.no_grad()
    def fold(self, scale: np.ndarray) -> None:
        """Multiply the logits of head i by `scale[i] > 0`, in the weights. No ranking changes.

        Raises:
            GeometryError: not one positive number a head.
        """
        if scale.shape != (len(self.identity.owners),) or not (scale > 0).all():
            raise GeometryError("not one positive scale a head", field="scale", got=scale, expected="> 0")
        factor = torch.from_numpy(np.asarray(scale, np.float32)).to(self.fc2.device)[:, None, None]
        self.fc2 *= factor
        if self.identity.form == "full":
            D = self.identity.hidden
            self.map[:, D:] *= factor
            self.columns[..., D:] *= factor

    def tensors(self, dtype: Any = np.float16) -> tuple[dict[int, dict[str, np.ndarray]], np.ndarray | None]:
        """What `files.write_heads` takes: tensors of each owner, and the trunk of the shared form."""
        whole = {name: p.detach().cpu().numpy().astype(dtype) for name, p in self.named_parameters()}
        D = self.identity.hidden
        joined = np.concatenate([whole["map"], np.swapaxes(whole["columns"], -1, -2)], axis=-1)
        if self.identity.form == "shared":
            return {o: {k: whole[k][i] for k in ("scale", "fc2")} for i, o in enumerate(self.identity.owners)}, joined
        return {
            owner: {"fc1": joined[i, :D], "fc2": whole["fc2"][i], "linear_init": joined[i, D:]}
            for i, owner in enumerate(self.identity.owners)
        }, None

    @classmethod
    @torch.no_grad()
    def of(cls, file: HeadFile) -> TorchHeads:
        """The heads of a weight file."""
        heads, H = cls(file.identity), file.identity.width
        each = [file.tensors[owner] for owner in file.identity.owners]
        parts = {name: np.stack([t[name] for t in each]) for name in each[0]}
        if file.trunk is None:
            linear = parts.pop("linear_init", None)
            if linear is None:
                linear = np.zeros((len(each), file.identity.experts, parts["fc1"].shape[-1]), parts["fc1"].dtype)
            joined = np.concatenate([parts.pop("fc1"), linear], axis=1)
        else:
            joined = file.trunk
        parts |= {"map": joined[..., :H], "columns": np.swapaxes(joined[..., H:], -1, -2)}
        for name, value in parts.items():
            getattr(heads, name).copy_(torch.from_numpy(np.array(value, np.float32, order="C")))
        return heads.eval()
