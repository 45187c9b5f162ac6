"""Public names of the rooms: each is where its room says, and one that is not there is an AttributeError."""

import importlib

import pytest

from moelab.lazy import exports

ROOMS = ("models", "streaming", "prerouter", "reference", "lab", "lab.peers")


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_of_a_room_is_there(room):
    package = importlib.import_module(f"moelab.{room}")
    names = [name for names in package._HOMES.values() for name in names]
    assert dir(package) == package.__all__ == sorted(set(names)) and len(set(names)) == len(names)
    assert all(hasattr(package, name) for name in names)


def test_a_name_that_is_not_there_is_said_and_nothing_is_imported():
    get, names, listed = exports("moelab.nowhere", {"module": ("name",)})
    with pytest.raises(AttributeError, match=r"module 'moelab\.nowhere' has no attribute 'other'"):
        get("other")
    assert names() == listed == ["name"]
    with pytest.raises(ModuleNotFoundError):
        get("name")
