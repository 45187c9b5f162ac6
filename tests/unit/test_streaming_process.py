"""The whole process keeps within its memory: a long prompt, imports without torch, packing a large model."""

import os
import shutil
import subprocess
import sys
import time

import memory_jobs
import mlx.core as mx
import psutil
import pytest
from mlx_lm.generate import generate_step

from moelab import models
from moelab.errors import ContractError
from moelab.lab.peers import generated
from moelab.lab.peers.cap import Refusal, enforced, open_cap
from moelab.models import tiny
from moelab.streaming import EngineOptions, StreamedModel, StreamingEngine, open_store, write_pack
from moelab.streaming.store import packing
from moelab.streaming.store.checkpoint import CheckpointSource

MiB = 1 << 20
TOKENS = 2251


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3_moe", folder, seed=1)
    return folder


def test_a_long_prompt_is_cut_to_fit_the_reserve(small):
    """In one step the scores of 2,251 tokens at 2,251 positions by 4 heads take 81 MB: more than the reserve."""
    cut = memory_jobs.run("long_prompt", small, TOKENS, 64 * MiB, 0)
    assert cut["peak"] <= cut["allowed"]
    assert 1 < cut["step"] < TOKENS
    whole = memory_jobs.run("long_prompt", small, TOKENS, 64 * MiB, 1)
    assert whole["peak"] > whole["allowed"]  # what the figure above would be if nothing were counted
    want = generate_step(
        mx.array([(7 * n) % 250 for n in range(TOKENS)]), models.load(small).model, max_tokens=4,
        prefill_step_size=cut["step"],
    )  # fmt: skip
    assert cut["tokens"] == [int(token) for token, _ in want]


def test_shorter_steps_are_those_of_mlx_lm_to_the_bit(small):
    prompt = [(11 * n) % 250 for n in range(700)]
    options = EngineOptions(reserve_bytes=20 * MiB, allocator_cache_bytes=0)
    with StreamingEngine.load(small, options, memory_budget_bytes=4 << 30) as engine:
        step = engine.prefill_step(len(prompt), 12)
        assert step < len(prompt)
        got = [(token, logprobs) for token, logprobs in engine.stream_tokens(prompt, max_tokens=12)]
    resident = models.load(small).model
    want = generate_step(mx.array(prompt), resident, max_tokens=12, prefill_step_size=step)
    for (token, logprobs), (expected, theirs) in zip(got, want, strict=True):
        assert token == int(expected) and mx.array_equal(logprobs, theirs)


def test_a_request_that_cannot_fit_is_refused_before_it_reads(small):
    with StreamingEngine.load(small, EngineOptions(reserve_bytes=16 * MiB), memory_budget_bytes=4 << 30) as engine:
        assert engine.loaded.request_bytes == 0  # a quarter for freed buffers, the rest for the process itself
        with pytest.raises(ContractError, match=r"reserve does not hold this request.*room for 0 bytes.*\d+ bytes for"):
            list(engine.stream_tokens([1, 2, 3], max_tokens=2))
        assert engine.store.reads == 0
    options = EngineOptions(reserve_bytes=20 * MiB, allocator_cache_bytes=0)
    with StreamingEngine.load(small, options, memory_budget_bytes=4 << 30) as engine:
        with pytest.raises(ContractError, match="raise reserve_bytes"):
            engine.generate([1, 2, 3], max_tokens=1 << 20)
        assert engine.store.reads == 0
        with pytest.raises(ContractError, match="raise reserve_bytes"):  # as does a pass that nobody asked about
            engine.run(mx.zeros((1, 4000), mx.int32), engine.loaded.make_cache(), 0)
        assert engine.store.reads == 0 and engine.generate([1, 2, 3], max_tokens=2)


def test_without_a_budget_of_the_process_steps_are_as_asked(small):
    with StreamingEngine.load(small, EngineOptions(cache_bytes=4 * MiB, prefill_step_size=512)) as engine:
        assert engine.prefill_step(10**6, -1) == 512 and engine.prefill_step(5, most=64) == 64


def test_imports_without_torch():
    lean, whole = memory_jobs.run("imports", 1), memory_jobs.run("imports", 0)
    assert whole["torch"] and not lean["torch"]
    assert lean["bytes"] < 130 * MiB and whole["bytes"] - lean["bytes"] > 100 * MiB  # 79 and 266 MiB were seen


def test_torch_cannot_be_left_out_afterwards():
    with pytest.raises(ContractError, match="transformers is loaded with torch.*before"):
        models.without_torch()


def test_a_budget_that_torch_spends_says_so(small):
    with pytest.raises(ContractError, match=r"spent before the first expert.*raise the budget, or leave torch out"):
        StreamingEngine.load(small, memory_budget_bytes=MiB)


def test_the_limit_of_mlx_outlives_no_engine(small):
    before = mx.set_cache_limit(123 * MiB)
    try:
        with StreamingEngine.load(small, EngineOptions(cache_bytes=4 * MiB)):
            pass
        with StreamedModel.load(small, EngineOptions(cache_bytes=4 * MiB)) as model:
            model.close()
        with pytest.raises(ContractError):
            StreamingEngine.load(small, memory_budget_bytes=1)
        first, second = (StreamedModel.load(small, EngineOptions(cache_bytes=n * MiB)) for n in (4, 5))
        first.close()  # in the order of opening
        second.close(), second.close()
        assert mx.set_cache_limit(before) == 123 * MiB
    finally:
        mx.set_cache_limit(before)


# 48 experts of 3.7 MB: 190 MB, of which packing may hold a few experts.
LARGE = generated.Shape(
    layers=4, experts=12, top_k=2, hidden=512, expert_width=600, heads=8, kv_heads=2, head_dim=64, vocabulary=1024
)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    generated.write(folder, LARGE)
    return folder


STACKED = LARGE.experts * LARGE.expert_bytes // 3
"""Bytes of one projection of all experts of a layer."""


def test_opening_in_place_takes_two_stacks_of_a_projection(large):
    found = memory_jobs.run("opening", large)
    assert found["peak"] - found["before"] < 2 * STACKED + 8 * MiB  # the headers, the files' mappings


def test_a_budget_that_opening_in_place_would_break_is_refused_before_it_reads(large, monkeypatch):
    rss = psutil.Process().memory_info().rss
    monkeypatch.setattr(CheckpointSource, "_compare", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ContractError, match=f"takes more memory than there is.*room.*>= {2 * STACKED} bytes.*pack"):
        StreamedModel.load(large, memory_budget_bytes=rss + STACKED)


def test_packing_holds_a_few_experts_and_never_the_model(large, tmp_path):
    found = memory_jobs.run("pack", large, tmp_path / "pack")
    total = sum(file.stat().st_size for file in (tmp_path / "pack").iterdir())
    assert total > 180e6
    assert found["peak"] - found["before"] < 64 * MiB  # its libraries, and two stacks of one projection
    shutil.rmtree(tmp_path / "pack")


def dirty(container):
    """Bytes of its pages that are not on disk yet."""
    counts = dict(line.split() for line in (container.folder / "memory.stat").read_text().splitlines())
    return int(counts["dirty" if container.version == 1 else "file_dirty"])


def test_a_container_smaller_than_the_model_packs_it(large, tmp_path):
    """The kernel counts imports, buffers and page cache together. Where it keeps no cap: the tests beside."""
    if isinstance(refused := enforced(), Refusal):
        pytest.skip(refused.reason)
    verb, most = [sys.executable, "-m", "moelab", "pack", str(large), str(tmp_path / "pack")], 0
    with open_cap(140 * MiB) as container:
        with subprocess.Popen(container.command(verb), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            while process.poll() is None:
                most = max(most, dirty(container))
                time.sleep(0.002)
            assert (process.returncode, container.kills) == (0, 0), process.stderr.read().decode()
        assert container.peak_bytes is None or container.peak_bytes <= container.limit_bytes
        assert sum(file.stat().st_size for file in large.iterdir()) > 1.2 * container.limit_bytes
    assert most <= 2 * packing.FLUSH
    open_store(tmp_path / "pack", verify="records").close()
    shutil.rmtree(tmp_path / "pack")


def test_what_packing_wrote_is_soon_on_disk(large, tmp_path, monkeypatch):
    """Dirty pages count against a container's memory: never more than one flush of them."""
    dirty, most, write, flush = 0, 0, os.write, packing._flush

    def written(fd, data):
        nonlocal dirty, most
        dirty += len(data)
        most = max(most, dirty)
        return write(fd, data)

    def flushed(fd):
        nonlocal dirty
        flush(fd)
        dirty = 0

    monkeypatch.setattr(packing.os, "write", written)
    monkeypatch.setattr(packing, "_flush", flushed)
    write_pack(large, tmp_path / "pack")
    assert 0 < most <= 2 * packing.FLUSH
    shutil.rmtree(tmp_path / "pack")
