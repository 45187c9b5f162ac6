"""One set of pins in three files, and the environment that runs the tests is that set."""

import re
import sys
import tomllib
from importlib import metadata

import yaml
from repository import PACKAGE, ROOT, imports, modules

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
PIN = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(\[(?P<extra>[a-z,]+)\])?==(?P<version>[^;\s]+)(\s*;\s*(?P<marker>.+))?")


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines):
    found = {}
    for line in lines:
        match = PIN.fullmatch(line.strip())
        assert match, f"not an exact pin: {line}"
        found.setdefault(normal(match["name"]), set()).add(match["version"])
    assert all(len(versions) == 1 for versions in found.values()), found
    return {name: versions.pop() for name, versions in found.items()}


CONSTRAINTS = pins(
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip() and not line.startswith("#")
)
DIRECT = pins(PYPROJECT["project"]["dependencies"])
DEVELOPMENT = pins(PYPROJECT["project"]["optional-dependencies"]["dev"])
PEERS = pins(PYPROJECT["project"]["optional-dependencies"]["peers"])


def test_direct_pins_agree_with_the_constraints():
    for name, version in (DIRECT | DEVELOPMENT).items():
        assert CONSTRAINTS.get(name) == version, name


def test_conda_carries_the_same_pins():
    (pip,) = [entry["pip"] for entry in ENVIRONMENT["dependencies"] if isinstance(entry, dict)]
    assert pip[:2] == ["-c constraints.txt", "-e ."]
    assert pip[2:] == PYPROJECT["project"]["dependencies"] + PYPROJECT["project"]["optional-dependencies"]["dev"]
    python = next(entry for entry in ENVIRONMENT["dependencies"] if str(entry).startswith("python="))
    assert PYPROJECT["project"]["requires-python"] == f">={python.removeprefix('python=')}"


def test_installed_is_pinned():
    for distribution in metadata.distributions():
        name = normal(distribution.metadata["Name"])
        if name in ("moelab", "pip"):
            continue
        # A local label (a CPU build) is part of an installed version and not of the pin.
        assert CONSTRAINTS.get(name) == distribution.version.split("+")[0], name


def test_torch_is_pinned_without_a_label_and_mlx_by_platform():
    assert re.fullmatch(r"[\d.]+", DIRECT["torch"])
    lines = PYPROJECT["project"]["dependencies"]
    assert any(line.startswith("mlx[cpu]==") and "linux" in line for line in lines)
    assert any(line.startswith("mlx==") and "darwin" in line for line in lines)
    assert re.search(r"^mlx-cpu==.*; sys_platform == 'linux'$", (ROOT / "constraints.txt").read_text(), re.M)


def test_every_library_that_the_package_imports_is_a_direct_dependency():
    owners = metadata.packages_distributions()
    missing = set()
    for path in modules():
        for name, _ in imports(path):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top != "moelab":
                direct = {normal(owner) for owner in owners.get(top, [])} & set(DIRECT)
                direct |= {normal(top)} & set(PEERS) if path.is_relative_to(PACKAGE / "lab" / "peers") else set()
                missing |= set() if direct else {(path.relative_to(PACKAGE).as_posix(), top)}
    assert not missing


def test_peers_are_pinned_apart():
    """Exact, and of no other group: what only a comparison needs must not weigh on every install."""
    assert PEERS and not set(PEERS) & (set(DIRECT) | set(DEVELOPMENT) | set(CONSTRAINTS))


def test_readme_commands_exist_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert {"flywheel", "test", "lab"} <= targets
    for target in re.findall(r"`?make ([a-z-]+)", (ROOT / "README.md").read_text()):
        assert target in targets, target


def test_ci_calls_make_test():
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("exec make test")
    assert "MOELAB_DATA" in script
