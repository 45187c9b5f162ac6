"""Replay in batches equals one sequence at a time, and equals a cached decode: exact ids, on tiny models.

The process runs under the reference BLAS, which gives the same bits for any number of rows.
"""

import mlx.core as mx
import numpy as np
import pytest

from moelab.errors import ContractError
from moelab.flywheel.batches import BatchShape, batches, replay
from moelab.models import load

FEATURES = ("pre_attention", "moe_input")
RNG = np.random.default_rng(5)


@pytest.fixture(scope="module", params=["softmax", "sigmoid"])
def lm(request, world):
    return load(world.model if request.param == "softmax" else world.sigmoid)


def sequences(lengths):
    return [np.random.default_rng(n).integers(5, 260, length).astype(np.int32) for n, length in enumerate(lengths)]


def alone(lm, tokens, features=()):
    """One sequence, one forward pass, no cache, no padding."""
    with lm.tap(features) as tap:
        mx.eval(lm.model(mx.array(tokens)[None]), *tap.pending())
        return tap.take()


def stepwise(lm, tokens, prompt):
    """A prompt at once, then one token at a time through the cache."""
    cache = lm.make_cache()
    with lm.tap() as tap:
        for piece in [tokens[:prompt], *tokens[prompt:, None]]:
            mx.eval(lm.model(mx.array(piece)[None], cache=cache), *tap.pending())
        return tap.take()


def test_a_batch_of_65_with_a_member_of_length_one(lm):
    """Nothing is lost or shifted beyond 32 rows, at unequal lengths, or at length 1."""
    lengths = [1, *RNG.integers(1, 13, 64).tolist()]
    given = sequences(lengths)
    found = dict(replay(lm, given, BatchShape(65 * 12, 5)))
    assert batches(lengths, 65 * 12)[0].shape == (65,), "one batch"
    assert sorted(found) == list(range(65))
    for index, tokens in enumerate(given):
        got, expected = found[index], alone(lm, tokens)
        assert len(got.ids) == len(got.weights) == len(got.margin) == len(tokens)
        np.testing.assert_array_equal(got.ids, expected.ids[0])
        np.testing.assert_allclose(got.weights, expected.weights[0], atol=1e-6)  # softmax of sums in another order


@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9])
def test_padded_chunked_replay_equals_decode_at_edge_lengths(lm, prompt):
    """Prompts of 1, 2, chunk - 1, chunk, chunk + 1 tokens; end-of-text (id 0) in mid-turn."""
    given = sequences([prompt + 6, 20, prompt + 1])
    given[0][prompt + 2] = 0
    found = dict(replay(lm, given, BatchShape(64, 8)))
    for index in (0, 2):
        expected = stepwise(lm, given[index], prompt)
        np.testing.assert_array_equal(found[index].ids, expected.ids[0])
        np.testing.assert_allclose(found[index].weights, expected.weights[0], atol=1e-6)
        np.testing.assert_allclose(found[index].margin, expected.margin[0], atol=1e-6)


@pytest.mark.parametrize("shape", [BatchShape(24, 24), BatchShape(1, 7), BatchShape(200, 1), BatchShape(60, 5)])
def test_every_batch_shape_gives_the_same_routes(lm, shape):
    given = sequences([24, 3, 17, 9, 1])
    for index, record in replay(lm, given, shape, features=FEATURES):
        expected = alone(lm, given[index], FEATURES)
        np.testing.assert_array_equal(record.ids, expected.ids[0])
        for name in FEATURES:
            np.testing.assert_allclose(record.features[name], expected.features[name][0], atol=1e-5)


def test_no_row_knows_the_future(lm):
    """Other tokens after row t, and other neighbours in the batch, move no bit of rows up to t."""
    given = sequences([20, 13, 16])
    shape = BatchShape(64, 6)
    before = dict(replay(lm, given, shape, features=FEATURES))
    t = 9
    changed = [tokens.copy() for tokens in given]
    changed[0][t + 1 :] = (changed[0][t + 1 :] + 50) % 200 + 10
    changed[2][:] = (changed[2] + 31) % 200 + 10
    after = dict(replay(lm, changed, shape, features=FEATURES))
    for index, rows in ((0, t + 1), (1, 13)):
        a, b = before[index], after[index]
        for x, y in [(a.ids, b.ids), (a.weights, b.weights), (a.margin, b.margin)]:
            np.testing.assert_array_equal(x[:rows], y[:rows])
        for name in FEATURES:
            np.testing.assert_array_equal(a.features[name][:rows], b.features[name][:rows])
    for name in FEATURES:
        assert (before[0].features[name][t + 1] != after[0].features[name][t + 1]).any(), "the change is seen at all"


def test_batches_are_a_function_of_the_lengths():
    lengths = [3, 9, 1, 9, 4, 2]
    made = batches(lengths, 18)
    assert [b.tolist() for b in made] == [[1, 3], [4, 0, 5, 2]]
    assert [b.tolist() for b in batches(lengths, 1)] == [[1], [3], [4], [0], [5], [2]], "too long: alone"
    assert batches([], 10) == []


@pytest.mark.parametrize("seed", range(5))
def test_batches_hold_everything_once_within_the_limit(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, 70)
    made = batches(lengths, 150)
    assert sorted(np.concatenate(made).tolist()) == list(range(70))
    assert all(len(b) == 1 or len(b) * lengths[b].max() <= 150 for b in made)


def test_an_empty_sequence_is_refused():
    with pytest.raises(ContractError, match="empty sequence") as caught:
        batches([4, 0, 2], 10)
    assert caught.value.field == "lengths[1]"
