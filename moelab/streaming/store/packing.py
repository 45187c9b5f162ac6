"""Writing a pack: one expert at a time, in bounded memory, and again from where it was stopped.

Experts are read in place where they lie as they are run (`checkpoint`); of any other checkpoint mlx-lm makes
them, a layer at a time. Bytes go to disk as they come: a kernel that keeps dirty pages counts
them against a container's memory, so every few MiB are flushed and given up.

Everything is written below `OUT.partial/`. A layer counts as done when its file has been flushed, read back
and compared, and its record in `state/` written after that; a later run keeps such layers if their checksums
still hold. The last step renames the finished folder to OUT, which therefore is complete or not there.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from filelock import FileLock, Timeout

from ... import __version__
from ...errors import ArtifactError, ParameterError, StoreError
from ...files import digest_file, read_json, write_bytes, write_json
from ...pages import aligned
from ...params import known_names
from .layout import PRECISIONS
from .origin import Origin, give_back
from .pack import CONFIG, MANIFEST, VERSION, WEIGHTS, Pack, PackedLayer, PackedTensor, checksum, is_copied
from .readers import open_reader
from .shards import encode_header, host_bytes

__all__ = ["write_pack"]

FLUSH = 16 << 20
COPIED = ("*.json", "*.jinja", "*.txt", "*.jsonl", "*.model", "*.tiktoken")
NOT_COPIED = ("config.json", "model.safetensors.index.json", MANIFEST)


@known_names
def write_pack(
    model: str | Path,
    out: str | Path,
    *,
    precision: str = "stored",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pack:
    """Convert a checkpoint to a pack at `out`, or go on with one that was stopped.

    Args:
        model: what `models.load` takes.
        out: folder to make; must not be there.
        precision: `stored` leaves every tensor as it is; `float32`, `float16`, `bfloat16` cast floating ones. A
            pack in the precision of the run is read without any conversion.
        progress: called with the bytes written so far and in all.

    Raises:
        ParameterError: `out` exists, or an unknown precision.
        ArtifactError: a shard is shorter than its header says; another process is packing to `out`, or what
            it left there is of another model, precision or version.
        UnsupportedModelError: mlx-lm cannot load this checkpoint.
        StoreError: the disk is full, or returned other bytes than were written. What is done stays for the next run.
    """
    out = Path(out)
    if precision not in PRECISIONS:
        raise ParameterError("unknown precision", field="precision", got=precision, expected=PRECISIONS)
    if out.name.endswith(".partial"):
        raise ParameterError(
            "this name is kept for unfinished packs", field="out", got=out.name, expected="another name"
        )
    if out.exists():
        raise ParameterError("there is something here already", field="out", got=str(out), expected="a new folder")
    origin = Origin(model, precision)
    partial = out.with_name(out.name + ".partial")
    with _claimed(partial), closing(origin):
        _begin(partial, {"version": VERSION, "moelab": __version__, "model": origin.digest, "precision": precision})
        pack = _fill(partial, origin, progress)
        for folder in (partial / "pack", partial):
            _sync_folder(folder)
        os.rename(partial / "pack", out)
        _sync_folder(out.absolute().parent)
    shutil.rmtree(partial)
    return pack


@contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(
            "no pack can be written here",
            file=partial.parent,
            field="out",
            got=error.strerror,
            expected="a writable folder",
        ) from error
    try:
        with FileLock(partial / "lock", timeout=0):
            yield
    except Timeout:
        raise ArtifactError("another process is packing here", file=partial, fix="wait for it to end") from None


def _begin(partial: Path, identity: dict[str, Any]) -> None:
    """Take over what an earlier run left, if it was making the same pack."""
    for folder in ("pack", "state"):
        (partial / folder).mkdir(exist_ok=True)
    note = partial / "state" / "identity.json"
    if not note.is_file():
        write_json(note, identity)
    elif (found := read_json(note)) != identity:
        raise ArtifactError(
            "an unfinished pack of something else is here", file=partial, field="identity", got=found,
            expected=identity, fix="remove this folder, or pack to another name",
        )  # fmt: skip


def _fill(partial: Path, origin: Origin, progress: Callable[[int, int], None]) -> Pack:
    folder, state = partial / "pack", partial / "state"
    here = sum(file.stat().st_size for file in folder.iterdir())
    total, free = origin.nbytes, shutil.disk_usage(folder).free
    if free < total - here:
        raise _disk_full(folder, f"{free} bytes free", total - here)
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    weights = _weights(folder / WEIGHTS, state / "weights.json", origin, report)
    layers = tuple(_layer(folder, state, number, origin, report) for number in range(len(origin.layouts)))
    _copy(origin, folder)
    pack = Pack(
        version=VERSION, moelab=__version__, model=origin.digest, precision=origin.precision, experts=origin.experts,
        layers=layers, absent=origin.absent, quantised=origin.quantised, weights=weights,
        copied={file.name: digest_file(file) for file in sorted(folder.iterdir()) if is_copied(file.name)},
    ).sealed()  # fmt: skip
    write_json(folder / MANIFEST, msgspec.to_builtins(pack))
    return pack


def _weights(path: Path, note: Path, origin: Origin, report: Callable[[int], None]) -> str:
    """Write the parameters that are no experts', in order of name, holding one at a time; digest of the file."""
    if note.is_file() and path.is_file() and digest_file(path) == read_json(note):
        report(path.stat().st_size)
        return read_json(note)
    header = encode_header(origin.tensors)
    with _sink(path) as write:
        write(np.frombuffer(header, np.uint8))
        for name in sorted(origin.others):
            values = host_bytes(origin.others.pop(name))
            write(values)
            report(values.size)
            give_back()
    digest = digest_file(path)
    write_json(note, digest)
    return digest


def _layer(folder: Path, state: Path, number: int, origin: Origin, report: Callable[[int], None]) -> PackedLayer:
    layout, parameters = origin.layouts[number], origin.parameters[number]
    path = folder / f"experts-{number:03d}.bin"
    note = state / f"{path.stem}.json"
    if note.is_file():
        packed = msgspec.convert(read_json(note), PackedLayer, strict=True)
        if _intact(path, packed):
            report(origin.experts * packed.record_bytes)
            return packed
    checksums, end = [], layout.offsets[-1] + layout.tensors[-1].run_bytes
    with _sink(path) as write:
        for record in origin.records(number):
            checksums.append(checksum(record[:end]))
            write(record)
            report(record.size)
    packed = PackedLayer(
        layer_id=parameters.layer_id, switch=parameters.switch, file=path.name, record_bytes=layout.slot_bytes,
        checksums=tuple(checksums),
        tensors=tuple(
            PackedTensor(name=tensor.name, shape=tensor.shape, dtype=tensor.run, offset=offset)
            for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
        ),
    )  # fmt: skip
    if not _intact(path, packed):
        raise StoreError("the disk returned other bytes than were written", file=path)
    write_json(note, msgspec.to_builtins(packed))
    return packed


def _intact(path: Path, packed: PackedLayer) -> bool:
    """Whether a file holds the records that its note says, read past the page cache where that is possible."""
    size, experts = packed.record_bytes, len(packed.checksums)
    if not path.is_file() or path.stat().st_size != size * experts:
        return False
    layout, record = packed.layout("stored"), aligned(size)
    end = layout.offsets[-1] + layout.tensors[-1].run_bytes
    reader = open_reader("auto", [path])
    try:
        for expert, expected in enumerate(packed.checksums):
            reader.fetch(0, expert * size, size, record)
            if checksum(record[:end]) != expected:
                return False
    finally:
        reader.close()
    return True


def _copy(origin: Origin, folder: Path) -> None:
    """Configuration and tokenizer. What mlx-lm made of a foreign quantisation is what the weights are now in."""
    config = read_json(origin.path / "config.json")
    if "quantization" in origin.config and "quantization" not in config:
        config = {k: v for k, v in origin.config.items() if k != "quantization_config"}
    write_json(folder / CONFIG, config)
    for pattern in COPIED:
        for file in sorted(origin.path.glob(pattern)):
            if file.name not in NOT_COPIED:
                write_bytes(folder / file.name, file.read_bytes())


@contextmanager
def _sink(path: Path) -> Iterator[Callable[[np.ndarray], None]]:
    """A new file, written through in small parts; removed if it cannot be finished."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    pending = 0

    def write(data: np.ndarray) -> None:
        nonlocal pending
        left = memoryview(data)
        while left:
            wrote = os.write(fd, left[:FLUSH])
            left, pending = left[wrote:], pending + wrote
            if pending >= FLUSH:
                _flush(fd)
                pending = 0

    try:
        yield write
        _flush(fd)
    except BaseException as error:
        path.unlink()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(path, error.strerror, None) from error
        raise
    finally:
        os.close(fd)


def _flush(fd: int) -> None:
    getattr(os, "fdatasync", os.fsync)(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _disk_full(path: Path, got: str, need: int | None) -> StoreError:
    return StoreError(
        "the disk is full", file=path, got=got, expected="room" if need is None else f"{need} bytes",
        fix="make room and run the same command again: finished layers are kept",
    )  # fmt: skip
