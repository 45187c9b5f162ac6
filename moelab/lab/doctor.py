"""`moelab doctor`: what this machine is, how fast it is, and whether it computes the right thing.

Speeds come from processes of their own, one a BLAS, since the choice is made once a process. They are
measurements of one moment on a machine that may be shared: they say which identity is faster, and by about
how much, never whether a gate passes.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import artifacts
from ..errors import IdentityError, MoelabError
from ..models.runtime import synchronisation_s

PREFILL_TOKENS, DECODE_TOKENS, REPEATS = 256, 32, 3


def machine(model: str = "softmax", *, say: Callable[[str], None] = print) -> int:
    """Print the report; 0 if every known answer is right, 1 if one is wrong or an identity cannot run."""
    from ..models import find_openblas, run_workers

    for line in description():
        say(line)
    healthy = True
    choices = ["reference"] if platform.system() == "Linux" else ["auto"]
    if platform.system() == "Linux":
        if find_openblas():
            choices.append("openblas")
        else:
            say("OpenBLAS    not found: prefill will be several times slower (Debian: libopenblas0-pthread)")
    for blas in choices:
        try:
            (found,) = run_workers(speed, [{"model": model}], blas=blas, workers=1)
        except MoelabError as error:
            say(f"{blas:<11} {error}")
            healthy = False
            continue
        say(speed_line(found))
        say(f"{'':<11} {found['self_test']}")
        healthy &= found["right"]
    if line := huge_pages():
        say(line)
    for line in disk():
        say(line)
    return 0 if healthy else 1


def description() -> list[str]:
    """Machine, memory and libraries, one line each."""
    import psutil

    from ..models.runtime import LIBRARIES, compile_mode

    versions = {name: _version(name) for name in (*LIBRARIES, "torch")}
    memory = psutil.virtual_memory().total / 2**30
    return [
        f"machine     {platform.system()} {platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB memory",
        f"libraries   {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"compile     {compile_mode()} (mx.compile makes kernels with g++ at run time; without it they stay unfused)",
    ]


def huge_pages() -> str | None:
    """What the system does for memory that a disk fills; None where it has no such setting."""
    from .. import pages

    if (given := pages.setting()) is None:
        return None
    refused = ": experts of a MB and more may be read at half the disk's rate (see transparent_hugepage)"
    return f"huge pages  {given}{refused if given == 'never' else ', which the slots of experts use'}"


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def speed(model: str) -> dict[str, Any]:
    """Rates, cost of one synchronisation and the self-test; run in a process of its own.

    Keys: `identity`, `prefill_tok_s`, `decode_tok_s`, `sync_us`, `right` (bool), `self_test` (in words).
    """
    import mlx.core as mx
    import numpy as np

    from ..models import load, runtime_identity

    loaded = load(model)
    vocabulary = loaded.model(mx.array([[0]])).shape[-1]
    tokens = mx.array(np.random.default_rng(0).integers(0, vocabulary, (1, PREFILL_TOKENS)))

    def prefill() -> float:
        cache, began = loaded.make_cache(), time.perf_counter()
        mx.eval(loaded.model(tokens, cache=cache))
        return time.perf_counter() - began

    def decode() -> float:
        cache = loaded.make_cache()
        mx.eval(loaded.model(tokens[:, :8], cache=cache))
        began = time.perf_counter()
        for position in range(DECODE_TOKENS):
            mx.eval(loaded.model(tokens[:, position : position + 1], cache=cache))
        return time.perf_counter() - began

    prefill()  # kernels are made and weights are touched on the first pass
    decode()
    return {
        "identity": runtime_identity(),
        "prefill_tok_s": PREFILL_TOKENS / statistics.median(prefill() for _ in range(REPEATS)),
        "decode_tok_s": DECODE_TOKENS / statistics.median(decode() for _ in range(REPEATS)),
        "sync_us": 1e6 * synchronisation_s(),
        **_self_test(loaded),
    }


def _self_test(loaded: Any) -> dict[str, Any]:
    from ..models import self_test

    try:
        found = self_test(loaded)
    except IdentityError as error:
        return {"right": False, "self_test": f"WRONG: {error}"}
    answers = f"{found['answers']} known answers right" if found["answers"] else "no known answers shipped"
    return {"right": True, "self_test": f"self-test: {answers}, kernel error {found['kernel_error']:.1g}"}


def speed_line(found: dict[str, Any]) -> str:
    identity = found["identity"]
    return (
        f"{identity['blas'].split()[0]:<11} prefill {found['prefill_tok_s']:,.0f} tok/s, "
        f"decode {found['decode_tok_s']:,.0f} tok/s, sync {found['sync_us']:.0f} us "
        f"({identity['blas']}, {identity['blas_threads']} threads, {identity['precision']}, {identity['device']})"
    )


def disk(folder: Path | None = None) -> list[str]:
    """The disk under the artefacts, by read size and queue depth."""
    from ..disk import measure

    folder = folder or artifacts.artifacts_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        profile = measure(scratch, seconds=0.2, repeats=3)
    lines = [f"disk        {profile.method}, read size by reads in flight: MB/s (median ms of one read)"]
    for size in profile.sizes:
        cells = [cell for cell in profile.cells if cell.size == size]
        rates = ", ".join(f"{cell.depth}: {cell.mb_per_s:,.0f} ({cell.ms:.2f})" for cell in cells)
        lines.append(f"{size // 1024:>6} KiB   {rates}")
    if profile.device_share is not None and profile.device_share < 0.5:
        lines.append("            most of it came from memory, not from the device: these are not the disk's figures")
    return lines
