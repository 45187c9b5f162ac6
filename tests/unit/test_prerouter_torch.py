"""The trained form of the heads: what they are told, their gradients, files, and the loop that trains them."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from moelab.errors import GateRefusedError, GeometryError, IdentityError, RecordError
from moelab.flywheel.train import Examples, Recipe, fit
from moelab.prerouter import HeadIdentity, TorchHeads, read_heads, told, write_heads
from moelab.prerouter.torch_form import NONE

E, H, K, OWNERS = 12, 8, 3, (2, 3, 4, 5)
FULL = HeadIdentity(model="m", top_k=K, experts=E, width=H, hidden=6, owners=OWNERS)
SHARED = HeadIdentity(model="m", top_k=K, experts=E, width=H, hidden=4, owners=OWNERS, form="shared")
ROUNDING = 2e-6
"""Float32 sums of some 30 terms of size about 1, in another order."""
both = pytest.mark.parametrize("identity", [FULL, SHARED], ids=["full", "shared"])


def rows(count=20, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(2 * count * len(OWNERS))]).reshape(2, count, len(OWNERS), K)
    ids[1, ::5] = NONE
    return rng.normal(size=(count, len(OWNERS), H)).astype(dtype), ids[0], ids[1]


@torch.no_grad()
def shaken(identity, seed=1):
    """Heads with no parameter at its start."""
    heads = TorchHeads(identity)
    draw = torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        p += torch.randn(p.shape, generator=draw) * 0.3
    return heads.eval()


@both
def test_an_untrained_head_says_nothing(identity):
    heads = TorchHeads(identity)
    assert not heads.scores(told(*rows())).any()
    again = TorchHeads(identity)
    assert all((a == b).all() for a, b in zip(heads.parameters(), again.parameters(), strict=True))
    other = TorchHeads(identity, seed=1)
    assert (heads.map != other.map).any()


@both
def test_torch_mlx_and_the_file_agree(identity, tmp_path):
    heads = shaken(identity)
    write_heads(tmp_path / "a", identity, *heads.tensors(np.float32))
    bank = read_heads(tmp_path / "a").bank()
    hidden, current, previous = rows()
    got = heads.scores(told(hidden, current, previous))
    for t in range(len(hidden)):
        before = None if previous[t, 0, 0] == NONE else mx.array(previous[t])[:, None]
        expected = bank(mx.array(hidden[t])[:, None], mx.array(current[t])[:, None], before)[:, 0]
        assert np.abs(got[t] - np.array(expected)).max() < 5 * ROUNDING  # logits up to 5


@both
def test_exported_heads_reload_to_the_logits_of_what_was_written(identity, tmp_path):
    heads, features = shaken(identity), told(*rows())
    write_heads(tmp_path / "wide", identity, *heads.tensors(np.float32))
    assert (TorchHeads.of(read_heads(tmp_path / "wide")).scores(features) == heads.scores(features)).all()
    write_heads(tmp_path / "a", identity, *heads.tensors())
    rounded = TorchHeads.of(read_heads(tmp_path / "a"))
    # float16 keeps 11 bits of each weight, features and sums stay float32
    assert np.abs(rounded.scores(features) - heads.scores(features)).max() < 1e-2
    write_heads(tmp_path / "b", identity, *rounded.tensors())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@both
def test_a_scale_is_folded_into_the_weights(identity):
    heads, features = shaken(identity), told(*rows())
    before, scale = heads.scores(features), np.array([1.0, 0.5, 0.25, 2.0])  # powers of two round nothing
    heads.fold(scale)
    assert (heads.scores(features) == before * scale[:, None].astype(np.float32)).all()
    for wrong in (np.ones(3), np.array([1, 1, 0, 1.0])):
        with pytest.raises(GeometryError):
            heads.fold(wrong)


@both
def test_every_parameter_is_trained(identity):
    heads = shaken(identity)
    heads(torch.from_numpy(told(*rows()))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in heads.parameters())
    assert heads.decayed <= dict(heads.named_parameters()).keys()


def test_a_head_hears_its_own_row_only():
    heads, (hidden, current, previous) = shaken(FULL), rows()
    before = heads.scores(told(hidden, current, previous))
    for changed in range(len(OWNERS)):
        other = hidden.copy()
        other[:, changed] += 1
        moved = np.abs(heads.scores(told(other, current, previous)) - before).max((0, 2)) > 0
        assert moved.tolist() == [i == changed for i in range(len(OWNERS))]


def test_what_heads_are_told_is_checked():
    hidden, current, previous = rows()
    with pytest.raises(GeometryError, match="line up"):
        told(hidden, current[:, :, :2], previous)
    with pytest.raises(GeometryError, match="line up"):
        told(hidden[:5], current, previous)
    with pytest.raises(RecordError, match="too large"):
        told(hidden.astype(np.float16), current + 2048, previous)
    assert (told(hidden.astype(np.float16), current, previous)[..., H : H + K] == current).all()
    with pytest.raises(GeometryError, match="another shape"):
        TorchHeads(FULL).scores(told(hidden[:, :2], current[:, :2], previous[:, :2]))
    hidden[3, 1, 2] = np.nan
    with pytest.raises(RecordError, match="not finite"):
        shaken(FULL).scores(told(hidden, current, previous))


def lesson(count=160, seed=3):
    """Labels that depend on the hidden state and on the executed experts."""
    hidden, current, previous = rows(count, seed)
    wanted = hidden @ np.random.default_rng(9).normal(size=(H, E)) + 2 * np.eye(E)[current].sum(-2)
    return Examples(told(hidden, current, previous), np.argsort(-wanted, axis=-1)[..., :K].astype(np.uint16))


RECIPE = Recipe(epochs=6, batch=32, learning_rate=2e-2, weight_decay=0.01)


@both
def test_the_flywheels_loop_trains_heads(identity):
    examples = lesson()
    heads = TorchHeads(identity)
    losses = fit(heads, examples, RECIPE, gate1="pass")
    assert losses[-1] < 0.85 * losses[0]
    with pytest.raises(GateRefusedError):
        fit(TorchHeads(identity), examples, RECIPE)


@both
def test_a_training_that_was_killed_ends_with_the_same_heads(identity, tmp_path):
    class Killed(Exception):
        pass

    def kill(step, steps, loss):
        if step == 17:
            raise Killed

    examples, whole = lesson(), TorchHeads(identity)
    losses = fit(whole, examples, RECIPE, gate1="pass")
    state = tmp_path / "state"
    with pytest.raises(Killed):
        fit(TorchHeads(identity), examples, RECIPE, gate1="pass", checkpoint=state, checkpoint_steps=4, on_step=kill)
    again = TorchHeads(identity)
    assert fit(again, examples, RECIPE, gate1="pass", checkpoint=state, checkpoint_steps=4) == losses
    assert all((a == b).all() for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    other = HeadIdentity(**{**identity.__dict__, "model": "other"})
    with pytest.raises(IdentityError, match="another training"):
        fit(TorchHeads(other), examples, RECIPE, gate1="pass", checkpoint=state)
