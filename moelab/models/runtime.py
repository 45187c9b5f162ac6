"""What runs the arithmetic: the BLAS in front of mlx, its name in every record, and worker processes.

On Linux the mlx wheel is linked to a reference BLAS that is slow (2.5 against ~100 GFLOP/s) but gives
the same bits for any number of rows, so that prefill equals decode exactly. OpenBLAS is fast and is not
bit-equal. Which one runs is therefore part of a result's identity: `activate` chooses it once per
process, before mlx is imported, and `runtime_identity` reports what is really in place.

The choice works by symbol order: a library loaded with RTLD_GLOBAL before mlx answers mlx's calls. That
is why it cannot be changed later, and why arms with different libraries run in processes of their own
(`run_workers`).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import multiprocessing
import os
import platform
import queue
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import quiet
from ..errors import IdentityError, MissingArtifactError, MoelabError, ParameterError

CHOICES = ("reference", "openblas", "auto")
LIBRARIES = ("mlx", "mlx-lm", "numpy", "transformers", "tokenizers")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def find_openblas() -> Path | None:
    """Path of an OpenBLAS with the plain C interface, or None.

    `MOELAB_OPENBLAS` if set, else what the dynamic linker knows by that name.

    Raises:
        MissingArtifactError: `MOELAB_OPENBLAS` names a file that is not there.
    """
    if named := os.environ.get("MOELAB_OPENBLAS"):
        if not Path(named).is_file():
            raise MissingArtifactError(
                "no such library", file=named, field="MOELAB_OPENBLAS", expected="an OpenBLAS library"
            )
        return Path(named)
    if platform.system() != "Linux" or not (found := ctypes.util.find_library("openblas")):
        return None
    return Path(found)


def _loaded_openblas() -> ctypes.CDLL | None:
    """The OpenBLAS that answers global symbols in this process, if any."""
    everything = ctypes.CDLL(None)
    return everything if hasattr(everything, "openblas_get_config") else None


def activate(blas: str = "reference", threads: int = 1) -> str:
    """Choose the BLAS for mlx in this process; returns the choice made (`reference`, `openblas`, `accelerate`).

    `auto` takes OpenBLAS where there is one. On macOS mlx has Accelerate and Metal and there is nothing
    to choose. Calling again with the same choice does nothing.

    Raises:
        MissingArtifactError: `openblas` asked for and not found.
        IdentityError: mlx is already loaded with another choice.
    """
    if blas not in CHOICES:
        raise ParameterError("unknown BLAS", field="blas", got=blas, expected=CHOICES)
    if threads < 1:
        raise ParameterError("threads", field="threads", got=threads, expected=">= 1")
    if platform.system() == "Darwin":
        if blas == "openblas":
            raise ParameterError("mlx uses Accelerate here", field="blas", got=blas, expected="auto")
        return "accelerate"
    library = find_openblas() if blas != "reference" else None
    if blas == "openblas" and library is None:
        raise MissingArtifactError(
            "OpenBLAS not found",
            field="blas",
            fix="install libopenblas0-pthread, or set MOELAB_OPENBLAS to the library",
        )
    want = "openblas" if library is not None else "reference"
    if "mlx.core" not in sys.modules:
        for variable in _THREAD_VARIABLES:
            os.environ[variable] = str(threads)
        if want == "openblas" and _loaded_openblas() is None:
            try:
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise MissingArtifactError("cannot load OpenBLAS", file=library, got=str(error)) from None
    if (have := active_blas()) != want:
        raise IdentityError(
            "mlx is already loaded with another BLAS" if "mlx.core" in sys.modules else "BLAS preloaded from outside",
            field="blas",
            got=have,
            expected=want,
            fix="choose before mlx is imported, or run in a fresh process (run_workers)",
        )
    if want == "openblas":
        _loaded_openblas().openblas_set_num_threads(ctypes.c_int(threads))
    return want


def active_blas() -> str:
    """`reference`, `openblas` or `accelerate`: what mlx calls in this process, chosen here or preloaded."""
    if platform.system() == "Darwin":
        return "accelerate"
    return "openblas" if _loaded_openblas() is not None else "reference"


def _blas_details() -> tuple[str, int]:
    name = active_blas()
    if name != "openblas":
        return name, 1
    library = _loaded_openblas()
    library.openblas_get_config.restype = ctypes.c_char_p
    words = library.openblas_get_config().decode().split()
    return f"openblas {words[1]} {words[-2] if words[-1].startswith('MAX') else words[-1]}", int(
        library.openblas_get_num_threads()
    )


def compile_mode() -> str:
    """`fused` or `unfused`: whether `mx.compile` makes kernels here. Without a compiler it silently does not."""
    if os.environ.get("MLX_DISABLE_COMPILE"):
        return "unfused"
    if platform.system() == "Linux" and shutil.which("g++") is None:
        return "unfused"
    return "fused"


def runtime_identity(precision: str = "float32", residency: str = "resident") -> dict[str, Any]:
    """Everything about this process that can move a bit of the result; compared, and recorded with every artefact.

    Keys: `libraries`, `platform`, `device`, `precision`, `blas`, `blas_threads`, `compile`, `residency`.
    """
    import mlx.core as mx

    blas, threads = _blas_details()
    return {
        "libraries": {name: _version(name) for name in LIBRARIES},
        "platform": f"{platform.system().lower()}-{platform.machine()}",
        "device": _device(mx),
        "precision": precision,
        "blas": blas,
        "blas_threads": threads,
        "compile": compile_mode(),
        "residency": residency,
    }


def synchronisation_s(n: int = 300) -> float:
    """Median time of evaluating the smallest possible graph: what each forced `mx.eval` costs."""
    import mlx.core as mx

    times = []
    for k in range(n):
        small = mx.array(float(k)) + 1
        began = time.perf_counter()
        mx.eval(small)
        times.append(time.perf_counter() - began)
    return statistics.median(times[n // 6 :])


@cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device(mx: Any) -> str:
    if "gpu" in str(mx.default_device()):
        return str(mx.device_info().get("device_name", "gpu"))
    return "cpu"


# ---------------------------------------------------------------- worker processes

_messages: Any = None
_task: int | None = None


def report_progress(message: Any) -> None:
    """Send a message from inside a worker to the caller's `on_progress`; does nothing elsewhere."""
    if _messages is not None:
        _messages.put((_task, message))


def in_worker() -> bool:
    """Whether this process was started by `run_workers`: what is chosen for all of it, its task may choose."""
    return _task is not None


def _start_worker(blas: str, threads: int, messages: Any) -> None:
    global _messages
    _messages = messages
    threading.Thread(target=_follow_parent, daemon=True).start()
    os.environ.setdefault(quiet.RUN, str(multiprocessing.parent_process().pid))
    activate(blas, threads)


def _follow_parent() -> None:
    """End this worker when its parent has died: a killed run must not leave captures computing behind it."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _run_task(index: int, fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    global _task
    _task = index
    return fn(**kwargs)


def run_workers(
    fn: Callable[..., Any],
    kwargs_list: Iterable[Mapping[str, Any]],
    *,
    blas: str = "reference",
    workers: int = 2,
    threads: int = 1,
    on_progress: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Call an importable `fn(**kwargs)` for each entry in fresh processes; results in the order given.

    Each process activates `blas` before it imports mlx. What `fn` passes to `report_progress` arrives as
    `on_progress(index, message)` on a thread of this process. The first error stops what has not begun
    and is raised here with its own type.

    Raises:
        MoelabError: a worker died without an error (killed, out of memory).
    """
    tasks = list(kwargs_list)
    if workers < 1:
        raise ParameterError("workers", field="workers", got=workers, expected=">= 1")
    if not tasks:
        return []
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    stop = threading.Event()
    listener = threading.Thread(target=_listen, args=(messages, stop, on_progress), daemon=True)
    listener.start()
    pool = ProcessPoolExecutor(
        min(workers, len(tasks)), context, initializer=_start_worker, initargs=(blas, threads, messages)
    )
    try:
        futures = [pool.submit(_run_task, index, fn, kwargs) for index, kwargs in enumerate(tasks)]
        for future in as_completed(futures):
            future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise MoelabError(f"a worker process died while running {fn.__module__}.{fn.__name__}") from error
    finally:
        pool.shutdown(cancel_futures=True)
        stop.set()
        listener.join()


def _listen(messages: Any, stop: threading.Event, on_progress: Callable[[int, Any], None] | None) -> None:
    while True:
        try:
            index, message = messages.get(timeout=0.1)
        except queue.Empty:
            if stop.is_set():
                return
            continue
        if on_progress is not None:
            on_progress(index, message)
