"""One small flywheel for all tests of its stages, built once a run and as far as a test asks."""

from __future__ import annotations

import shutil
from pathlib import Path

import flywheel_world
import pytest


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return flywheel_world.make(tmp_path_factory.mktemp("flywheel"))


@pytest.fixture(scope="session")
def loaded(world):
    from moelab.models import load

    return load(world.model)


@pytest.fixture(scope="session")
def captured(world) -> Path:
    from moelab.flywheel.capture import capture_model

    with world.entered():
        return capture_model(world.model, world.capture_options())


@pytest.fixture(scope="session")
def routed(world, captured) -> Path:
    from moelab.flywheel.replay import replay_model

    with world.entered():
        return replay_model(world.model, world.replay_options(), captured, True)


@pytest.fixture(scope="session")
def snapped(world, captured, routed) -> Path:
    from moelab.flywheel.snapshot import snapshot_model

    with world.entered():
        return snapshot_model(world.model, world.snapshot_options(), captured, routed)


@pytest.fixture
def inside(world):
    """The process works in the world."""
    with world.entered():
        yield world


@pytest.fixture
def elsewhere(world, captured, tmp_path):
    """The process works in a copy of the world that has its keys and its observations, and nothing else."""
    shutil.copytree(world.artifacts / "vault", tmp_path / "vault")
    shutil.copytree(captured, tmp_path / "observations" / captured.name)
    with world.entered(tmp_path):
        yield tmp_path / "observations" / captured.name


@pytest.fixture
def records(inside, captured):
    from moelab import artifacts
    from moelab.flywheel.observations import Records

    return Records(artifacts.open_artifact(captured))


@pytest.fixture
def dataset(inside, routed, snapped):
    from moelab import artifacts
    from moelab.flywheel.dataset import open_dataset

    return open_dataset(artifacts.open_artifact(snapped), artifacts.open_artifact(routed))


@pytest.fixture
def before(inside, captured, routed, snapped):
    """What training starts from, as artefacts."""
    from moelab import artifacts
    from moelab.flywheel.baselines import Upstream

    return Upstream(*(artifacts.open_artifact(path) for path in (captured, routed, snapped)))


@pytest.fixture
def fresh(world, tmp_path):
    """An empty folder for what is trained; keys stay where they are."""
    (tmp_path / "vault").symlink_to(world.artifacts / "vault")
    with world.entered(tmp_path):
        yield tmp_path
