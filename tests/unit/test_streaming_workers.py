"""Processes beside a process that streams: DataLoader workers and torchrun ranks, started while readers run.

A forked process has the locks of its parent in whatever state they were, and none of its threads. So a store belongs
to the process that opened it, and the others are refused; a store of their own gives them the same experts.
"""

import json
import os
import pickle
import subprocess
import sys

import pytest
import store_workers
from torch.utils.data import DataLoader

from moelab.errors import StoreError
from moelab.models import tiny
from moelab.streaming import open_store, write_pack

LIMIT_S = 60
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
"""Python 3.12 and later warn of what these tests do on purpose; the others run with warnings as errors."""


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3_moe", folder / "stock", seed=1)
    write_pack(folder / "stock", folder / "pack")
    return folder / "pack"


@pytest.fixture(scope="module")
def whole(pack):
    with open_store(pack) as store:
        return store_workers.checksums(store)


@pytest.fixture(scope="module", autouse=True)
def engine(pack):
    """Streams in this process, its readers alive, while the others start."""
    with store_workers.prefilled(pack) as engine:
        yield engine


def loaded(data, method):
    return DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context=method, timeout=LIMIT_S)


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=FORKS)])
def test_workers_of_a_data_loader_read_the_same_experts(method, pack, whole, engine):
    found, processes = [], set()
    for values, readers in loaded(store_workers.Checksums(pack, len(whole)), method):
        found += values.tolist()
        processes |= set(readers.tolist())
    assert found == whole
    assert len(processes) == 2 and os.getpid() not in processes
    assert engine.generate([5, 6, 7, 8, 9], max_tokens=2)  # and the parent goes on


@FORKS
def test_a_store_of_the_parents_is_refused_in_a_forked_worker(engine, whole):
    with pytest.raises(StoreError, match="another process.*start processes by spawn"):
        list(loaded(store_workers.Checksums(engine.store, len(whole)), "fork"))
    assert store_workers.checksum(engine.store, 3) == whole[3]


def test_a_store_is_not_sent_to_a_spawned_worker(engine, whole):
    with pytest.raises(StoreError, match="belongs to the process.*pass its path"):
        pickle.dumps(engine.store)
    with pytest.raises(StoreError, match="belongs to the process"):
        list(loaded(store_workers.Checksums(engine.store, len(whole)), "spawn"))


def test_ranks_of_torchrun_read_the_same_experts(pack, whole):
    """Each has made a prefill before the group is formed."""
    command = [
        sys.executable, "-W", "error::DeprecationWarning", "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", store_workers.__file__, str(pack),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(lines[-1]) == {"world": 2, "checksums": whole}
