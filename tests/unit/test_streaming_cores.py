"""Cores of one's own: chosen, taken for a pass and given back, and the same tokens on them."""

import os
import sys
import threading

import pytest

from moelab.errors import ContractError, ParameterError
from moelab.models import tiny
from moelab.streaming import EngineOptions, StreamingEngine, write_pack
from moelab.streaming.memory import cores
from moelab.streaming.memory.cores import Cores

CHOOSES = sys.platform == "linux"
"""Elsewhere a thread cannot choose its core, and `apart` is refused."""


def usable(monkeypatch, numbers):
    monkeypatch.setattr(cores.sys, "platform", "linux")
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(numbers), raising=False)


def test_the_last_core_reads_and_the_others_compute(monkeypatch):
    usable(monkeypatch, [3, 5])
    assert Cores.choose("apart") == Cores.choose("auto") == Cores(frozenset({3}), frozenset({5}))
    usable(monkeypatch, range(8))
    assert Cores.choose("apart") == Cores(frozenset(range(7)), frozenset({7}))
    assert Cores.choose("shared") is None


@pytest.mark.parametrize("numbers", [[0], range(3), range(8)])
def test_auto_is_for_two_cores_only(monkeypatch, numbers):
    usable(monkeypatch, numbers)
    assert Cores.choose("auto") is None


def test_one_core_cannot_be_divided(monkeypatch):
    usable(monkeypatch, [0])
    with pytest.raises(
        ParameterError, match="cannot have cores of their own here; field: cores; got: 'apart'"
    ) as raised:
        Cores.choose("apart")
    assert "cores='shared'" in str(raised.value)


def test_other_systems_share(monkeypatch):
    monkeypatch.setattr(cores.sys, "platform", "darwin")
    assert Cores.choose("auto") is None
    with pytest.raises(ParameterError, match="Linux"):
        Cores.choose("apart")


def test_an_unknown_choice_is_refused():
    with pytest.raises(ParameterError, match="unknown cores; field: cores; got: 'own'"):
        EngineOptions(cache_bytes=1 << 20, cores="own")


def test_a_pass_runs_on_its_cores_and_gives_them_back(tmp_path):
    """Readers, the asking thread and mlx's thread, looked at from inside a pass; tokens as with shared cores."""
    tiny.save("qwen3_moe", tmp_path / "stock", seed=1)
    write_pack(tmp_path / "stock", tmp_path / "pack", precision="float32")
    prompt, size = list(range(20, 40)), 1 << 20
    with StreamingEngine.load(tmp_path / "pack", EngineOptions(cache_bytes=size)) as engine:
        want = [token for token, _ in engine.stream_tokens(prompt, max_tokens=12)]
    if not CHOOSES or len(os.sched_getaffinity(0)) < 2:
        with pytest.raises(ParameterError, match="cores"):
            StreamingEngine.load(tmp_path / "pack", EngineOptions(cache_bytes=size, cores="apart"))
        return
    cores._of_thread.__dict__.clear()  # else an earlier pass of this thread may have made mlx's thread already
    before, seen = (os.sched_getaffinity(0), os.sched_getscheduler(0)), []
    threads = set(os.listdir("/proc/self/task"))

    class Look:
        def routed(self, **_):
            seen.append((os.sched_getaffinity(0), os.sched_getscheduler(0)))

        def ended(self, *, step):
            pass

    with StreamingEngine.load(tmp_path / "pack", EngineOptions(cache_bytes=size, cores="apart")) as engine:
        apart = engine.memory.cores
        engine.forward.listeners.append(Look())
        assert [token for token, _ in engine.stream_tokens(prompt, max_tokens=12)] == want
        batch = os.SCHED_BATCH if len(apart.compute) == 1 else before[1]
        assert seen and all(look == (apart.compute, batch) for look in seen)
        assert all(os.sched_getaffinity(thread.native_id) == apart.reading for thread in engine.memory._threads)
        readers = {thread.native_id for thread in engine.memory._threads}
        made = {int(thread) for thread in set(os.listdir("/proc/self/task")) - threads} - readers
        assert [(os.sched_getaffinity(thread), os.sched_getscheduler(thread)) for thread in made] == [
            (apart.compute, batch)  # mlx's thread, made by the first pass
        ]
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == before


def test_cores_that_were_taken_away_are_named(tmp_path, monkeypatch):
    """At the start of a reader, which then ends, and of a pass."""
    if not CHOOSES or len(os.sched_getaffinity(0)) < 2:
        return
    tiny.save("qwen3_moe", tmp_path, seed=1)
    options, real = EngineOptions(cache_bytes=1 << 20, cores="apart"), os.sched_setaffinity

    def taken_away(thread, numbers):
        if len(numbers) < 2:
            raise OSError(22, "Invalid argument")
        real(thread, numbers)

    with StreamingEngine.load(tmp_path, options) as engine:
        monkeypatch.setattr(cores.os, "sched_setaffinity", taken_away)
        with pytest.raises(ContractError, match="may not be used any more; field: cores"):
            list(engine.stream_tokens([1, 2, 3], max_tokens=2))
        assert engine.forward.phase is None
        readers = threading.active_count()
        with pytest.raises(ContractError, match="may not be used any more"):
            StreamingEngine.load(tmp_path, options)
        assert threading.active_count() == readers


def test_a_failed_pass_gives_its_cores_back(tmp_path):
    tiny.save("qwen3_moe", tmp_path / "stock", seed=1)
    with StreamingEngine.load(tmp_path / "stock", EngineOptions(cache_bytes=1 << 20, cores="auto")) as engine:
        before = os.sched_getaffinity(0) if CHOOSES else None

        class Broken:
            def routed(self, **_):
                raise RuntimeError("no listener")

        engine.forward.listeners.append(Broken())
        with pytest.raises(RuntimeError, match="no listener"):
            list(engine.stream_tokens([1, 2, 3], max_tokens=2))
        assert engine.forward.phase is None and (not CHOOSES or os.sched_getaffinity(0) == before)
