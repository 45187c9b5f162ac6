"""What a set of heads is and may be used with, and the checks that hold it to that.

A `HeadFile` is consistent in itself (`validate`: every tensor there, of the right shape and type, finite) before it is
compared with what a spec asks for on a model (`HeadFile.check`), and only then becomes heads that run (`bank`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import GeometryError, IdentityError, RecordError
from .spec import DTYPES, PrerouterSpec

if TYPE_CHECKING:
    from .heads import HeadBank

TRUNK = "shared.trunk.weight"


@dataclass(frozen=True, kw_only=True)
class HeadIdentity:
    """What heads may be used with.

    Attributes:
        model: digest of the model's files; in released files the name of the tier.
        top_k, experts, width, hidden: K, E, H, and D (full form) or R (shared).
        owners: layers with a head, ascending.
        form: `full` or `shared`. feature_topk: as in `PrerouterSpec`.
        snapshot: content of the snapshot that the heads were trained on, "" if unknown.
        policy: on whose states: "" = the native model's (teacher-forced), otherwise in words.
        confidence: a pair (scale, offset) an owner: sigmoid(scale · logit + offset) is the calibrated probability
            that an expert is used; empty = not calibrated.
    """

    model: str
    top_k: int
    experts: int
    width: int
    hidden: int
    owners: tuple[int, ...]
    form: str = "full"
    feature_topk: str = "executed"
    snapshot: str = ""
    policy: str = ""
    confidence: tuple[tuple[float, float], ...] = ()

    @property
    def layers(self) -> int:
        """How many heads."""
        return len(self.owners)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Part → its shape."""
        D, E, F = self.hidden, self.experts, self.width + 2 * self.experts
        if self.form == "full":
            return {"fc1": (D, F), "fc2": (E, D), "linear_init": (E, F)}
        return {"scale": (D,), "fc2": (E, D)}


@dataclass(frozen=True, eq=False)
class HeadFile:
    """A file, read and consistent in itself: `tensors[owner][part]`, the `trunk` of the shared form, both float16
    or float32."""

    path: Path
    identity: HeadIdentity
    tensors: dict[int, dict[str, np.ndarray]]
    trunk: np.ndarray | None = None

    @property
    def dtype(self) -> str:
        return str(next(iter(self.tensors[self.identity.owners[0]].values())).dtype)

    def check(self, spec: PrerouterSpec, *, owners: Sequence[int], model: Sequence[str], **geometry: int) -> None:
        """That these heads are those which a spec asks for on a model. `geometry`: top_k, experts, width.

        Raises:
            IdentityError: another model, or the other `feature_topk`.
            GeometryError: other owners (the missing named), K, E, H, width of the heads or number type.
        """
        own = self.identity
        if own.model not in model:
            raise IdentityError("heads of another model", file=self.path, field="model", got=own.model, expected=model)
        if missing := sorted(set(owners) - set(own.owners)):
            raise GeometryError(
                "layer without a head", file=self.path, field="owners", got=list(own.owners), expected=missing
            )
        if extra := sorted(set(own.owners) - set(owners)):
            raise GeometryError(
                "head nobody asked for", file=self.path, field="owners", got=extra, expected=list(owners)
            )
        wanted = {**geometry, **({"hidden": spec.hidden} if own.form == "full" else {})}
        for field, expected in wanted.items():
            if (got := getattr(own, field)) != expected:
                raise GeometryError(
                    "heads of another geometry", file=self.path, field=field, got=got, expected=expected
                )
        if own.feature_topk != spec.feature_topk:
            raise IdentityError(
                "heads trained on other experts",
                file=self.path,
                field="feature_topk",
                got=own.feature_topk,
                expected=spec.feature_topk,
            )
        if self.dtype == "float32" and DTYPES[spec.dtype] != "float32":
            raise GeometryError(
                "weights would lose digits",
                file=self.path,
                field="dtype",
                got=self.dtype,
                expected=DTYPES[spec.dtype],
                fix="dtype='fp32' in the spec",
            )

    def bank(self, *, precision: str = "float32") -> HeadBank:
        """The heads, ready to run; see `heads` for `precision`."""
        import mlx.core as mx

        from .heads import HeadBank, PrerouterHead, SharedHead

        made = {}
        for owner, parts in self.tensors.items():
            arrays = {name: mx.array(value) for name, value in parts.items()}
            if self.trunk is None:
                made[owner] = PrerouterHead(
                    arrays["fc1"], arrays["fc2"], arrays.get("linear_init"), precision=precision
                )
            else:
                made[owner] = SharedHead(mx.array(self.trunk), **arrays, precision=precision)
        return HeadBank(made)


def validate(found: HeadFile) -> None:
    own = found.identity
    if type(own.top_k) is not int or not 1 <= own.top_k < own.experts or own.width < 1:
        raise GeometryError(
            "impossible geometry",
            file=found.path,
            field="top_k, experts, width",
            got=(own.top_k, own.experts, own.width),
            expected="0 < top_k < experts, 0 < width",
        )
    if tuple(found.tensors) != own.owners:
        raise GeometryError(
            "owners of the header and layers of the tensors differ",
            file=found.path,
            field="owners",
            got=list(found.tensors),
            expected=own.owners,
        )
    if own.confidence and len(own.confidence) != len(own.owners):
        raise GeometryError(
            "one pair an owner", file=found.path, field="confidence", got=len(own.confidence), expected=len(own.owners)
        )
    if (found.trunk is not None) != (own.form == "shared"):
        raise GeometryError("trunk and form disagree", file=found.path, field="form", got=own.form, expected="shared")
    shapes = own.shapes()
    linear = any("linear_init" in parts for parts in found.tensors.values())
    if own.form == "full" and not linear:
        del shapes["linear_init"]
    named = {
        f"layers.{o}.{part}.weight": (found.tensors[o].get(part), s) for o in own.owners for part, s in shapes.items()
    }
    if found.trunk is not None:
        named[TRUNK] = (found.trunk, (own.hidden, own.width + 2 * own.experts))
    for name, (value, shape) in named.items():
        if value is None or value.shape != shape:
            got = None if value is None else value.shape
            problem = "tensor missing" if value is None else "tensor of another shape"
            raise GeometryError(problem, file=found.path, field=name, got=got, expected=shape)
        if str(value.dtype) not in ("float16", "float32") or str(value.dtype) != found.dtype:
            raise RecordError(
                "number types are mixed or unknown", file=found.path, field=name, got=str(value.dtype),
                expected=f"all {found.dtype}, of float16 or float32",
            )  # fmt: skip
        if not np.isfinite(value).all():
            raise RecordError("tensor is not finite", file=found.path, field=name, got="nan or inf", expected="finite")
