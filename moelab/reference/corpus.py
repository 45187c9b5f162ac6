r"""Text to train on: any folder of `.txt` files, one domain a file.

    <domain>.<split>.txt[.gz]     split is train, val or test
    <domain>.txt[.gz]             no split: the last tenth is held out as val

A file holds documents separated by the character U+001E (record separator); a file without one is a
single document. Routing differs by domain more than by anything else, so the domain of every document is
kept to the end: windows are sampled by domain, losses and expert use are reported by domain.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..artifacts import digest_bytes, digest_json, write_bytes
from ..errors import MissingArtifactError, RecordError
from ..threads import Thread

SEPARATOR = "\x1e"
SPLITS = ("train", "val", "test")
_NAME = re.compile(r"(?P<domain>.+?)(\.(?P<split>train|val|test))?\.txt(\.gz)?")
_HELD_OUT = 10
"""One document in so many of a file without split, and at least one, is validation text."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents by domain and split.

    Attributes:
        documents: split → domain → documents. Every domain has `train` and `val`; `test` where there is one.
        digest: of the plain text of every file, by name.
    """

    documents: Mapping[str, Mapping[str, tuple[str, ...]]]
    digest: str

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(sorted(self.documents["train"]))

    def bytes(self, split: str, domain: str) -> int:
        """UTF-8 bytes of a domain's documents."""
        return sum(len(document.encode()) for document in self.documents[split].get(domain, ()))


def read_corpus(folder: str | Path) -> Corpus:
    """Read a folder of text.

    Raises:
        MissingArtifactError: no such folder, or no `.txt` or `.txt.gz` file in it.
        RecordError: a file that is not whole gzip or not UTF-8, a domain both with and without split, twice,
            or without training or validation text.
    """
    folder = Path(folder)
    files = sorted(path for path in folder.glob("*") if _NAME.fullmatch(path.name) and not path.name.startswith("."))
    if not files:
        raise MissingArtifactError("no text here", file=folder, expected="<domain>.<split>.txt.gz or <domain>.txt")
    found: dict[str, dict[str, tuple[str, ...]]] = {split: {} for split in SPLITS}
    digests: dict[str, str] = {}
    for path in files:
        name = _NAME.fullmatch(path.name)
        domain, split = name["domain"], name["split"]
        text = _read(path)
        digests[path.name.removesuffix(".gz")] = digest_bytes(text.encode())
        documents = tuple(part for part in text.split(SEPARATOR) if part.strip())
        parts = {split: documents} if split else dict(zip(("train", "val"), hold_out(documents), strict=True))
        for key, value in parts.items():
            if domain in found[key]:
                raise RecordError("a domain has two files for one split", file=path, field="domain", got=domain)
            found[key][domain] = value
    for domain in sorted(set().union(*found.values())):
        for split in ("train", "val"):
            if not found[split].get(domain):
                raise RecordError(
                    "a domain lacks text", file=folder, field=f"{domain}.{split}", got=0, expected="documents"
                )
    return Corpus(found, digest_json(digests))


def hold_out(documents: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`(train, val)`: the last tenth of the documents, or of the lines where there are too few documents."""
    if len(documents) >= _HELD_OUT:
        cut = len(documents) - len(documents) // _HELD_OUT
        return documents[:cut], documents[cut:]
    lines = SEPARATOR.join(documents).splitlines(keepends=True)
    cut = len(lines) - max(1, len(lines) // _HELD_OUT)
    halves = ("".join(part).split(SEPARATOR) for part in (lines[:cut], lines[cut:]))
    train, val = (tuple(part for part in half if part.strip()) for half in halves)
    return train, val


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise RecordError("not a complete gzip file", file=path, got=str(error), expected="gzip") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RecordError("not UTF-8 text", file=path, got=str(error), expected="UTF-8") from None


def write_thread_texts(folder: str | Path, threads: Iterable[Thread]) -> None:
    """Write threads as a folder that `read_corpus` reads: one `.txt` a domain, one document a thread.

    A message is written as the house chat template writes it. A thread without a domain goes to `other`, one
    with several to the first by name.
    """
    folder, domains = Path(folder), defaultdict(list)
    for thread in threads:
        text = "".join(f"<|{message.role}|> {message.body}\n" for message in thread.messages)
        if SEPARATOR in text:
            raise RecordError("a message holds the separator of documents", field=thread.id, got=SEPARATOR)
        domains[min(thread.domains, default="other")].append(text)
    for domain, texts in domains.items():
        write_bytes(folder / f"{domain}.txt", SEPARATOR.join(texts).encode())
