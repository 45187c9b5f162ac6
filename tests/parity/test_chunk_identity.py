"""Equality is claimed per runtime identity and chunk; where a chunk breaks it, Gate 1 fails and says by what margin.

A hybrid of linear and full attention, 512 tokens, replayed one at a time, in odd chunks and in large ones.
"""

import numpy as np
import pytest
import worker_jobs

from moelab.flywheel.gates import gate1
from moelab.flywheel.qualification import COUNTS, ReplayOptions, label_identity
from moelab.models import find_openblas, run_workers
from moelab.models.tiny import save

TOKENS = np.random.default_rng(8).integers(5, 250, 512).astype(np.int32)
CHUNKS = (1, 7, 64)
OPTIONS = ReplayOptions(smallest_n=400)


@pytest.fixture(scope="module")
def by_identity(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_next")
    save("qwen3_next", folder)
    job = {"folder": folder, "tokens": TOKENS, "prompt": 64, "chunks": CHUNKS}
    names = ["reference", *(["openblas"] if find_openblas() else [])]
    return {blas: run_workers(worker_jobs.gate1_by_chunk, [job], blas=blas)[0] for blas in names}


def test_the_reference_blas_gives_the_same_routes_in_every_chunk(by_identity):
    for chunk, figures in by_identity["reference"].items():
        assert figures["decoded_tokens"] == 448 and figures["order_mismatches"] == 0, chunk
        assert figures["weight_error"] == 0.0


def test_an_identity_labels_exactly_where_it_is_exact_and_a_margin_excuses_nothing(by_identity):
    for blas, chunks in by_identity.items():
        for chunk, figures in chunks.items():
            exact = not any(figures[name] for name in COUNTS)
            verdict = gate1(
                model="qwen3_next",
                decoded_tokens=figures["decoded_tokens"],
                rows=figures["rows"],
                **{name: figures[name] for name in COUNTS},
                weight_error=figures["weight_error"],
                weight_tolerance=OPTIONS.weight_tolerance,
                smallest_n=OPTIONS.smallest_n,
            )
            assert verdict.status == ("pass" if exact else "fail"), (blas, chunk)
            assert (figures["largest_margin_at_disagreement"] is None) == exact
            found = {blas: {**figures, "speeds": {"replay": [1.0]}}}
            assert label_identity(found, OPTIONS) == (blas if exact else None)


def test_one_swapped_pair_at_a_near_tie_is_a_failure(by_identity):
    figures = {**by_identity["reference"][7], "order_mismatches": 1, "speeds": {"replay": [1.0]}}
    figures["largest_margin_at_disagreement"] = 1e-9
    assert label_identity({"reference": figures}, OPTIONS) is None
