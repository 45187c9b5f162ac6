"""What a bank's manifest says of its specialists, and what no entry may say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from moelab.errors import ArtifactError

VERSION = 1
KINDS = ("complete", "delta", "lora")
EXPECTED = {
    "id": "a non-empty string, once in a layer",
    "layer": "a number >= 0",
    "kind": "complete, delta or lora",
    "hidden_size": "a number > 0, one in a layer",
    "intermediate_size": "a number > 0",
    "dtype": "float16, bfloat16 or float32",
    "sha256": "64 hexadecimal digits",
}
"""What a manifest's entry must be."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


class Specialist(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One installed specialist, as the manifest has it.

    id: its name, unique in its layer, such as `code:0`.
    layer: the layer of the base model that it belongs to.
    kind: `complete`, `delta` or `lora`.
    hidden_size, intermediate_size: H and F of the base layer's MLP.
    dtype: of its tensors.
    base_digest: the base model that it was made for.
    sha256: of its file.
    """

    id: str
    layer: int
    kind: str
    hidden_size: int
    intermediate_size: int
    dtype: str
    base_digest: str
    sha256: str

    @property
    def file(self) -> str:
        """Its file's name in the bank's folder."""
        return f"{self.sha256[:32]}.safetensors"

    @property
    def header(self) -> dict[str, object]:
        """What the header of its file says: everything but the digest of that file."""
        facts = msgspec.to_builtins(self)
        del facts["sha256"]
        return {"schema_version": VERSION, "record": "specialist", **facts}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The specialists of one base model in append order."""

    version: int
    base_digest: str
    specialists: tuple[Specialist, ...] = ()


def check_entries(entries: Iterable[Specialist], file: Path) -> None:
    """Refuse a manifest that `install` could not have written: whoever edits one by hand learns which entry is wrong.

    That a file holds what its entry says is seen when it is loaded.
    """
    seen: dict[tuple[int, str], int] = {}
    widths: dict[int, int] = {}
    for number, entry in enumerate(entries):
        rules = {
            "id": bool(entry.id) and seen.setdefault((entry.layer, entry.id), number) == number,
            "layer": entry.layer >= 0,
            "kind": entry.kind in KINDS,
            "hidden_size": entry.hidden_size > 0
            and widths.setdefault(entry.layer, entry.hidden_size) == entry.hidden_size,
            "intermediate_size": entry.intermediate_size > 0,
            "dtype": entry.dtype in DTYPES,
            "sha256": len(entry.sha256) == 64 and set(entry.sha256) <= set("0123456789abcdef"),
        }
        for name, holds in rules.items():
            if not holds:
                field, expected = f"specialists[{number}].{name}", EXPECTED[name]
                got = getattr(entry, name)
                raise ArtifactError("not an entry of a bank", file=file, field=field, got=got, expected=expected)
