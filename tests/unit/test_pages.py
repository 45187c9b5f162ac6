"""Memory for direct reads: where it begins, that it asks for huge pages, and that nothing beside it is touched."""

import sys
from pathlib import Path

import numpy as np
import pytest

from moelab import pages
from moelab.errors import ContractError
from moelab.pages import HUGE, PAGE, address, aligned, huge_bytes, renew, setting

LINUX = sys.platform == "linux"


def advised(array):
    """Whether all of the array's whole pages lie in mappings that ask for huge pages."""
    first, last = address(array) + -address(array) % PAGE, (address(array) + array.nbytes) // PAGE * PAGE
    start = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(edge, 16) for edge in head.split("-"))
        elif head == "VmFlags:" and start < last and first < end and "hg" not in line.split():
            return False
    return True


@pytest.mark.parametrize("nbytes", [1, PAGE, HUGE - 1, HUGE, 3 * HUGE + 5])
def test_memory_begins_at_a_page(nbytes):
    memory = aligned(nbytes)
    assert (memory.shape, memory.dtype, address(memory) % PAGE) == ((nbytes,), np.uint8, 0)
    memory[:] = 7
    assert memory.sum(dtype=int) == 7 * nbytes


def test_little_memory_may_lie_in_a_huge_page_too():
    memory = aligned(PAGE, huge=True)
    assert (memory.shape, address(memory) % HUGE) == ((PAGE,), 0)
    assert not LINUX or advised(memory)


def test_much_memory_is_in_huge_pages():
    memory = aligned(3 * HUGE)
    assert address(memory) % HUGE == 0
    assert not LINUX or advised(memory)


@pytest.mark.parametrize("before", [0, 1, PAGE, PAGE + 64])
def test_renewed_memory_is_zero_and_its_neighbours_are_as_they_were(before):
    base = np.full(4 * HUGE, 9, np.uint8)
    block = base[before : before + 2 * HUGE + 100]
    block[:] = 0
    assert renew(block) == LINUX
    assert not block.any() and (base[:before] == 9).all() and (base[before + len(block) :] == 9).all()
    assert not LINUX or advised(block)
    block[::PAGE] = 1
    assert block.sum() == len(range(0, len(block), PAGE))


def test_what_is_smaller_than_a_huge_page_stays_as_it_is():
    assert not renew(np.zeros(HUGE - 1, np.uint8))


def test_memory_in_pieces_is_refused():
    with pytest.raises(ContractError, match="contiguous bytes"):
        renew(np.zeros(4 * HUGE, np.uint8)[::2])


def test_what_is_touched_is_counted_where_the_system_gives_huge_pages():
    before, memory = huge_bytes(), aligned(8 * HUGE)
    memory[::PAGE] = 1
    after = huge_bytes()
    if setting() in ("always", "madvise"):
        assert after - before >= 4 * HUGE  # all of it but for a machine short of whole ones
    else:
        assert setting() in ("never", None) and not after


def test_the_setting_is_the_word_in_brackets(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "SETTING", tmp_path / "enabled")
    assert setting() is None
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert setting() == "madvise"


def test_slots_are_in_huge_pages_and_the_kernels_see_what_the_disk_wrote():
    import mlx.core as mx

    from moelab.streaming.store.layout import ExpertLayout, TensorSpec
    from moelab.streaming.store.slab import Slab

    layout = ExpertLayout((TensorSpec("weight", (1000, 300), "F32", "F32"),))
    slab = Slab(layout.slot_bytes, slots=4)
    assert not LINUX or advised(slab.host.reshape(-1))
    weight = slab.arrays(layout)["weight"]
    assert not weight.any()
    slab.host[2].view(np.float32)[:300_000] = np.arange(300_000)
    assert mx.array_equal(weight[2].reshape(-1), mx.arange(300_000, dtype=mx.float32))
