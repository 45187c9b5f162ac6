"""Rooms import one way, heavy libraries stay out of the way, and `import moelab` is quick."""

import subprocess
import sys

import pytest
from repository import PACKAGE, imports, modules, room

BASE = {
    "artifacts", "commands", "disk", "disk_profile", "errors", "files", "lazy", "pages", "params", "quiet", "routes",
    "threads", "traces",
}  # fmt: skip
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "models": BASE,
    "reference": BASE | {"models", "flywheel"},
    "streaming": BASE | {"models"},
    "prerouter": BASE | {"models", "streaming"},
    "flywheel": BASE | {"models", "streaming", "prerouter"},
    "studies": BASE | {"models", "streaming", "prerouter", "policies", "specialists", "flywheel"},
    "policies": {"errors"},
    "specialists": BASE | {"models", "policies"},
    "lab": BASE | {"models", "reference", "streaming", "prerouter", "flywheel", "studies", "policies", "specialists"},
    "__init__": set(),
}
MAY_IMPORT["__main__"] = MAY_IMPORT["lab"] | {"lab"}
PLAIN = {"metrics", "bounds", "breakeven", "foresight", "residency", "gates", "estimates"}
"""Modules of the flywheel that take plain arrays: of moelab they may know errors, eviction policies and each other."""


def rooms_imported(path):
    for name, line in imports(path):
        parts = name.split(".")
        if (
            parts[0] == "moelab"
            and len(parts) > 1
            and (PACKAGE / parts[1]).exists() | (PACKAGE / f"{parts[1]}.py").exists()
        ):
            yield parts[1], name, line


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_run_one_way(path):
    here = room(path)
    assert here in MAY_IMPORT, f"room {here!r} has no row in this table"
    for there, name, line in rooms_imported(path):
        assert there == here or there in MAY_IMPORT[here], f"{path}:{line} imports {name}"


def test_streaming_is_built_from_the_disk_up():
    order = ["store", "cache", "schedule", "memory", "layer", "engine", "simulation"]
    assert {path.parent.name for path in modules() if path.match("streaming/*/*.py")} == set(order)
    for path in modules():
        if not path.match("streaming/*/*.py"):
            continue
        for name, line in imports(path):
            if name.startswith("moelab.streaming."):
                there = name.split(".")[2]
                assert order.index(there) <= order.index(path.parent.name), f"{path}:{line} imports {name}"


def test_plain_modules_know_no_files_and_no_models():
    for path in modules():
        if room(path) != "flywheel" or path.stem not in PLAIN:
            continue
        for there, name, line in rooms_imported(path):
            module = (name.split(".") + [""])[2]
            named = (path.parent / f"{module}.py").exists()
            assert (
                there == "errors"
                or name.startswith("moelab.streaming.cache.eviction")
                or (there == "flywheel" and (not named or module in PLAIN))
            ), f"{path}:{line} {name}"


def test_pandas_and_plotting_stay_in_the_laboratory():
    for path in modules():
        if room(path) not in ("lab", "reference"):
            for name, line in imports(path):
                assert name.split(".")[0] not in ("pandas", "seaborn", "matplotlib", "great_tables"), f"{path}:{line}"


def test_mlx_and_torch_are_not_imported_by_light_rooms():
    light = "errors files artifacts params routes traces threads models flywheel.gates lab lab.report lab.plan"
    program = f"import importlib, sys\nfor m in {light.split()!r}: importlib.import_module('moelab.' + m)\n" + (
        "print([m for m in ('mlx.core', 'torch', 'transformers', 'pandas', 'seaborn', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_moelab_is_quick():
    # CPU time, not wall time, and the better of five: other work on the machine must not fail this test.
    program = "import time; t = time.process_time(); import moelab; print(time.process_time() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(times) < 0.3, times
