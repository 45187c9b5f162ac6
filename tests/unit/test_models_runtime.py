"""The BLAS in front of mlx, the runtime identity, and worker processes."""

import ctypes.util
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import worker_jobs

from moelab.errors import GeometryError, IdentityError, MissingArtifactError, MoelabError, ParameterError
from moelab.models import activate, find_openblas, in_worker, load, run_workers, runtime, runtime_identity

LINUX = platform.system() == "Linux"
KEYS = ["blas", "blas_threads", "compile", "device", "libraries", "platform", "precision", "residency"]


# ------------------------------------------------------------ finding and choosing


def test_openblas_is_found_by_variable_first_then_by_the_linker(monkeypatch, tmp_path):
    library = tmp_path / "libblas.so.3"
    library.touch()
    monkeypatch.setenv("MOELAB_OPENBLAS", str(library))
    assert find_openblas() == library
    monkeypatch.setenv("MOELAB_OPENBLAS", str(tmp_path / "gone.so"))
    with pytest.raises(MissingArtifactError, match="MOELAB_OPENBLAS"):
        find_openblas()
    monkeypatch.delenv("MOELAB_OPENBLAS")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: {"openblas": "libopenblas.so.9"}.get(name))
    assert str(find_openblas()) == "libopenblas.so.9"
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert find_openblas() is None
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: "libopenblas.dylib")
    assert find_openblas() is None


def test_bad_choices_are_refused(monkeypatch):
    with pytest.raises(ParameterError, match="blas"):
        activate("mkl")
    with pytest.raises(ParameterError, match="threads"):
        activate("reference", threads=0)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(runtime, "find_openblas", lambda: None)
    with pytest.raises(MissingArtifactError, match="OpenBLAS not found"):
        activate("openblas")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert activate("auto") == activate("reference") == "accelerate"
    with pytest.raises(ParameterError, match="Accelerate"):
        activate("openblas")


def test_a_library_that_does_not_load_is_an_error(monkeypatch, tmp_path):
    if not LINUX:
        return
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setenv("MOELAB_OPENBLAS", str(tmp_path / "broken.so"))
    for variable in runtime._THREAD_VARIABLES:
        monkeypatch.setenv(variable, "1")
    with monkeypatch.context() as patch:
        patch.setattr(runtime.sys, "modules", {k: v for k, v in runtime.sys.modules.items() if k != "mlx.core"})
        patch.setattr(runtime, "_loaded_openblas", lambda: None)
        with pytest.raises(MissingArtifactError, match="cannot load OpenBLAS"):
            activate("openblas")


def test_too_late_is_an_error_not_a_silent_other_library():
    load("softmax")  # imports mlx
    have = runtime.active_blas()
    assert activate(have if have != "accelerate" else "auto") == have
    if LINUX and have == "reference" and find_openblas() is not None:
        with pytest.raises(IdentityError, match="already loaded with another BLAS"):
            activate("openblas")


def test_identity_of_this_process():
    identity = runtime_identity("bfloat16", residency="streamed")
    assert sorted(identity) == KEYS
    assert (identity["precision"], identity["residency"]) == ("bfloat16", "streamed")
    assert identity["libraries"]["mlx"] and identity["libraries"]["mlx-lm"]


def test_compile_mode_names_what_happens(monkeypatch):
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(runtime.shutil, "which", lambda name: "found")
    assert runtime.compile_mode() == "fused"
    monkeypatch.setattr(runtime.shutil, "which", lambda name: None)
    assert runtime.compile_mode() == "unfused"
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert runtime.compile_mode() == "fused"
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    assert runtime.compile_mode() == "unfused"


# ------------------------------------------------------------ workers


def test_results_come_in_order_and_progress_arrives():
    messages = []
    results = run_workers(
        worker_jobs.square, [{"x": x} for x in range(5)], workers=2, on_progress=lambda i, m: messages.append((i, m))
    )
    assert results == [0, 1, 4, 9, 16]
    assert sorted(messages, key=lambda message: message[0]) == [(x, {"began": x}) for x in range(5)]
    assert run_workers(worker_jobs.square, []) == []
    with pytest.raises(ParameterError, match="workers"):
        run_workers(worker_jobs.square, [{"x": 1}], workers=0)


def test_errors_arrive_with_their_type_and_fields():
    with pytest.raises(GeometryError, match="made to fail") as caught:
        run_workers(worker_jobs.refuse, [{"field": "ids"}], workers=1)
    assert (caught.value.field, caught.value.expected, caught.value.fix) == ("ids", 2, "none")


def test_a_killed_worker_is_an_error_not_a_hang():
    with pytest.raises(MoelabError, match="died while running worker_jobs.die"):
        run_workers(worker_jobs.die, [{}], workers=1)


def test_an_error_stops_what_has_not_begun(tmp_path):
    def jobs():
        yield {"folder": None, "name": "first", "seconds": 0}  # fails: None / "first"
        yield from ({"folder": tmp_path, "name": str(n), "seconds": 0.2} for n in range(8))

    with pytest.raises(TypeError):
        run_workers(worker_jobs.sleep_then_mark, jobs(), workers=1)
    assert len(list(tmp_path.iterdir())) < 8


@pytest.mark.parametrize("blas", ["reference", "openblas"])
def test_workers_run_the_library_that_was_asked_for(blas):
    if not LINUX or (blas == "openblas" and find_openblas() is None):
        return
    (identity,) = run_workers(worker_jobs.identity, [{}], blas=blas, workers=1, threads=1)
    assert identity["early"] is False and identity["threads"] == "1"
    assert identity["blas"].split()[0] == blas and identity["blas_threads"] == 1
    (moved,) = run_workers(worker_jobs.matmul_rows, [{"rows": 40}], blas=blas, workers=1)
    # The reason the reference library exists here: its bits do not depend on the number of rows.
    assert (moved == 0.0) == (blas == "reference")


def test_known_routes_are_the_same_under_every_library_and_without_a_compiler(monkeypatch, tmp_path):
    tokens = list(range(40, 56))
    results = [run_workers(worker_jobs.routes, [{"name": "sigmoid", "tokens": tokens}], workers=1)]
    monkeypatch.setenv("PATH", str(tmp_path))  # no g++: kernels stay unfused
    (identity,) = run_workers(worker_jobs.identity, [{}], workers=1)
    assert identity["compile"] == ("unfused" if LINUX else "fused")
    results.append(run_workers(worker_jobs.routes, [{"name": "sigmoid", "tokens": tokens}], workers=1))
    monkeypatch.undo()
    if LINUX and find_openblas() is not None:
        results.append(
            run_workers(worker_jobs.routes, [{"name": "sigmoid", "tokens": tokens}], blas="openblas", workers=1)
        )
    for result in results:
        assert result == results[0] and result[0][0] == 3


def test_workers_end_with_a_killed_parent():
    support = Path(worker_jobs.__file__).parent
    job = "worker_jobs.sleep_then_mark, [dict(folder=None, name='', seconds=300)], workers=1"
    script = (
        f"import sys; sys.path.insert(0, {str(support)!r})\n"
        "import worker_jobs\nfrom moelab.models import run_workers\n"
        f"if __name__ == '__main__':\n    run_workers({job})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    family = psutil.Process(parent.pid)
    deadline = time.monotonic() + 60
    # the tracker of resources, and the worker
    while len(found := family.children(recursive=True)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(found, timeout=60)  # the job alone would take five times as long
    assert len(found) >= 2 and not alive


def test_a_worker_that_opens_a_model_and_trains_nothing_has_no_torch():
    assert not in_worker()
    (found,) = run_workers(worker_jobs.loaded_with, [{"name": "softmax"}], workers=1)
    assert found == {"torch": False, "worker": True, "text": "a word"}
