"""Specialists on disk: a folder with one safetensors file each and a manifest that orders them.

A specialist belongs to one layer of one base model. The manifest keeps append order, which is the
order of candidates in every policy: candidate k of a layer is its k-th specialist. Removing one
moves the later ones down; installing adds at the end.

    bank.json                 base digest, and each specialist's id, layer, kind, geometry and file
    <digest>.safetensors      its tensors, with the same facts in the header

Kinds:
    complete    a whole MLP, which replaces the anchor's output
    delta       an MLP whose output is added to the anchor's
    lora        low-rank updates of the anchor's projections, as `<projection>.down` and `.up`

In the shape descriptions, `H` is the hidden width, `F` the intermediate width and `r` the rank of an
update.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from filelock import FileLock
from torch import Tensor, nn

from moelab.artifacts import digest_file, digest_tensors, read_tensors, write_json, write_tensors
from moelab.errors import ArtifactError, GeometryError, IdentityError, MissingArtifactError, PolicyError
from moelab.policies import LoRASpecialist, LoRAUpdate
from moelab.specialists.manifest import DTYPES, KINDS, VERSION, Manifest, Specialist, check_entries

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class GatedMlp(nn.Module):
    """The gated MLP of most mixture-of-experts models, `down(silu(gate x) * up x)`, without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` to `[..., H]`."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class SpecialistBank:
    """A folder of specialists for one base model. Every call reads the folder as it is now.

    folder: where it is.
    base_digest: digest of the base model; a bank of another model is refused.
    """

    folder: Path
    base_digest: str

    @classmethod
    def create(cls, folder: str | Path, *, base_digest: str) -> SpecialistBank:
        """Make an empty bank. Raises `ArtifactError` where there is one."""
        folder = Path(folder)
        if not isinstance(base_digest, str) or not base_digest:
            raise PolicyError("no base digest", field="base_digest", got=base_digest, expected="a digest")
        if (folder / "bank.json").exists():
            raise ArtifactError("there is a bank already", file=folder, fix="open it, or choose another folder")
        bank = cls(folder, base_digest)
        bank._write(())
        return bank

    @classmethod
    def open(cls, folder: str | Path, *, base_digest: str) -> SpecialistBank:
        """Open a bank. Raises `MissingArtifactError` without one, `IdentityError` for another base."""
        bank = cls(Path(folder), base_digest)
        bank.list()
        return bank

    def list(self, layer: int | None = None) -> tuple[Specialist, ...]:
        """The specialists in append order, of one layer or of all."""
        file = self.folder / "bank.json"
        if not file.is_file():
            raise MissingArtifactError("no bank here", file=self.folder, fix="SpecialistBank.create")
        try:
            manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
        except msgspec.MsgspecError as error:
            raise ArtifactError(
                "not a bank manifest", file=file, got=str(error), expected=f"version {VERSION}"
            ) from None
        if manifest.version != VERSION:
            raise ArtifactError("unknown version", file=file, field="version", got=manifest.version, expected=VERSION)
        for digest in (manifest.base_digest, *(entry.base_digest for entry in manifest.specialists)):
            if digest != self.base_digest:
                raise IdentityError(
                    "made for another base model", file=file, field="base_digest", got=digest, expected=self.base_digest
                )
        check_entries(manifest.specialists, file)
        return tuple(entry for entry in manifest.specialists if layer is None or entry.layer == layer)

    def expert_ids_for_layer(self, layer: int) -> tuple[str, ...]:
        """The ids of a layer's specialists in append order: candidate k is number k - 1."""
        return tuple(entry.id for entry in self.list(layer))

    def install(
        self, id: str, layer: int, specialist: nn.Module | LoRASpecialist, *, kind: str = "complete"
    ) -> Specialist:
        """Store a specialist at the end of its layer.

        specialist: a `GatedMlp` or a module with the same parameters, or, with kind `lora`, a
            `LoRASpecialist` with updates of the three projections or some of them.
        Raises `PolicyError` for an id that is taken or a kind that does not fit, `GeometryError` for
        tensors that do not fit each other or the layer's other specialists.
        """
        if not isinstance(specialist, nn.Module | LoRASpecialist):
            got = type(specialist).__name__
            raise PolicyError("not a specialist", field="specialist", got=got, expected="a module or a LoRASpecialist")
        if kind not in KINDS or (kind == "lora") != isinstance(specialist, LoRASpecialist):
            got = f"{kind!r} with {type(specialist).__name__}"
            raise PolicyError("the kind does not fit", field="kind", got=got, expected=" or ".join(map(repr, KINDS)))
        if not isinstance(id, str) or not id:
            raise PolicyError("not an id", field="id", got=id, expected="a non-empty string")
        if type(layer) is not int or layer < 0:
            raise PolicyError("not a layer", field="layer", got=layer, expected="a number >= 0")
        tensors = specialist_tensors(specialist)
        hidden, intermediate = geometry(tensors, kind)
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        with self._lock():
            installed = self.list()
            neighbours = [entry for entry in installed if entry.layer == layer]
            if any(entry.id == id for entry in neighbours):
                raise PolicyError(f"layer {layer} has this id", field="id", got=id, expected="an id that is not taken")
            for entry in neighbours:
                if entry.hidden_size != hidden:
                    raise GeometryError(
                        f"layer {layer} has another width", field="hidden_size", got=hidden, expected=entry.hidden_size
                    )
            entry = Specialist(id, layer, kind, hidden, intermediate, dtype, self.base_digest, "")
            aside = self.folder / ".installing.safetensors"
            write_tensors(aside, {name: to_array(value) for name, value in tensors.items()}, entry.header)
            entry = msgspec.structs.replace(entry, sha256=digest_file(aside))
            os.replace(aside, self.folder / entry.file)
            self._write((*installed, entry))
        return entry

    def remove(self, id: str, layer: int) -> Specialist:
        """Take a specialist out. Raises `MissingArtifactError` when the layer has none of that id."""
        with self._lock():
            installed = self.list()
            for entry in installed:
                if (entry.id, entry.layer) == (id, layer):
                    self._write(tuple(other for other in installed if other is not entry))
                    (self.folder / entry.file).unlink(missing_ok=True)  # gone already, as was wanted
                    return entry
            expected = [other.id for other in installed if other.layer == layer]
        raise MissingArtifactError("not installed", file=self.folder, field=f"layer {layer}", got=id, expected=expected)

    def load(self, entry: Specialist, *, dtype: torch.dtype | None = None) -> GatedMlp | LoRASpecialist:
        """Read a specialist, frozen, in its own dtype or in `dtype`.

        Raises `ArtifactError` when its file is not what was installed.
        """
        file = self.folder / entry.file
        arrays, header = read_tensors(file)
        if header != entry.header or (got := digest_file(file)) != entry.sha256:
            got = header if header != entry.header else got
            expected = entry.header if header != entry.header else entry.sha256
            raise ArtifactError("not the specialist that was installed", file=file, got=got, expected=expected)
        tensors = {
            name: from_array(array, entry.dtype).to(dtype or DTYPES[entry.dtype]) for name, array in arrays.items()
        }
        if entry.kind == "lora":
            names = dict.fromkeys(name.rsplit(".", 1)[0] for name in tensors)
            return LoRASpecialist({n: LoRAUpdate(tensors[f"{n}.down"], tensors[f"{n}.up"]) for n in names})
        with torch.device("meta"):
            mlp = GatedMlp(entry.hidden_size, entry.intermediate_size)
        mlp.load_state_dict(tensors, assign=True)
        return mlp.eval().requires_grad_(False)

    def _lock(self) -> FileLock:
        return FileLock(self.folder / ".lock")

    def _write(self, specialists: tuple[Specialist, ...]) -> None:
        manifest = Manifest(VERSION, self.base_digest, specialists)
        write_json(self.folder / "bank.json", msgspec.to_builtins(manifest))


def specialist_tensors(specialist: nn.Module | LoRASpecialist) -> dict[str, Tensor]:
    """What a specialist's file holds. A LoRA's scale is folded into `up`."""
    if not isinstance(specialist, LoRASpecialist):
        return {name: value.detach() for name, value in specialist.state_dict().items()}
    tensors = {}
    for name, update in specialist.updates.items():
        tensors |= {f"{name}.down": update.down.detach(), f"{name}.up": (update.up * update.scale).detach()}
    return tensors


def geometry(tensors: Mapping[str, Tensor], kind: str) -> tuple[int, int]:
    """(H, F) of a specialist's tensors. Raises `GeometryError` unless they fit one gated MLP."""
    dtypes = {value.dtype for value in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES.values()):
        got = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise GeometryError("tensors of a wrong dtype", field="dtype", got=got, expected=" or ".join(DTYPES))
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise GeometryError("a weight is not finite", field=name, got="NaN or infinity", expected="finite weights")
    if kind == "lora":
        shapes = {}
        for name in {name.rsplit(".", 1)[0] for name in tensors}:
            shapes[f"{name}.weight"] = (tensors[f"{name}.up"].shape[0], tensors[f"{name}.down"].shape[1])
    else:
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    names = {f"{name}.weight" for name in PROJECTIONS}
    if not shapes or not shapes.keys() <= names or (kind != "lora" and shapes.keys() != names):
        raise GeometryError("not a gated MLP", field="tensors", got=sorted(shapes), expected=sorted(names))
    sizes = {shape if name.startswith("down") else shape[::-1] for name, shape in shapes.items()}
    if len(sizes) != 1:
        expected = "gate and up [F, H], down [H, F]"
        raise GeometryError("projections do not fit each other", field="tensors", got=shapes, expected=expected)
    return sizes.pop()


def to_array(value: Tensor):
    """A tensor as numpy; bfloat16, which numpy lacks, as the same bits in uint16."""
    value = value.detach().cpu().contiguous()
    return (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()


def from_array(array, dtype: str) -> Tensor:
    """The inverse of `to_array`."""
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def state_digest(module: nn.Module) -> str:
    """Digest of a module's parameters and buffers, by name: the base digest of a torch model."""
    return digest_tensors({name: to_array(value) for name, value in module.state_dict().items()})
