"""Texts in lock step are what the streaming engine and a plain loop do to one of them, token by token."""

import mlx.core as mx
import numpy as np
import prerouter_world as world
import pytest

from moelab.errors import ContractError, GeometryError, ParameterError, UnsupportedModelError
from moelab.prerouter import install_prerouter
from moelab.prerouter.lockstep import Lockstep
from moelab.prerouter.steps import OWN, Arm
from moelab.routes import DECODED, PREFILLED

PHASES = ["pppppddddddd", "pppddppppddd", "ppppppppdddd"]
"""Three texts: an answer; two answers with a question between; a long prompt."""
ROUNDING = 2e-5
"""Nats: float32 sums of another order, through three layers."""
CALIBRATION = (0.5, -0.5)


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def case(request, tmp_path_factory):
    folder = world.tiny_model(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=4)
    streamed = world.engine(folder, cycles=4.0)
    spec = world.spec_for(streamed)
    bank = world.heads_for(streamed, spec)
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 250, (len(PHASES), len(PHASES[0]))).astype(np.int32)
    decoded = np.array([[phase == "d" for phase in line] for line in PHASES])
    yield folder, streamed, spec, bank, tokens, decoded
    streamed.close()


def lockstep(case, arms, **options):
    folder, _, spec, bank, tokens, decoded = case
    loaded = world.resident(folder)
    wiring = spec.wiring(loaded.geometry.layer_ids, len(loaded.model.layers))
    pairs = {owner: CALIBRATION for owner in bank.owners}
    return Lockstep(loaded, bank, wiring, arms, calibration=pairs, **options)


def loss(logits, token):
    wide = np.array(logits, np.float64).reshape(-1)
    return np.log(np.exp(wide - wide.max()).sum()) + wide.max() - wide[token]


def pieces(decoded):
    """Runs of a text as a conversation feeds them: prompts whole, decoded tokens one by one."""
    start = 0
    for t in range(len(decoded)):
        if decoded[t] or t + 1 == len(decoded) or decoded[t + 1]:
            yield slice(start, t + 1), DECODED if decoded[t] else PREFILLED
            start = t + 1


def test_every_mode_has_the_engines_losses(case):
    _, streamed, spec, bank, tokens, decoded = case
    pairs = {owner: CALIBRATION for owner in bank.owners}
    with install_prerouter(streamed.loaded, spec, streamed, heads=bank, calibration=pairs, mode="replace") as prerouter:
        world.tokens(streamed, tokens[0, :5].tolist(), 6)
        sure = float(np.median([p.confidence for p in prerouter.stager.predictions.values()]))
        modes = [(mode, 0.0) for mode in ("off", "replace", "replace_true_weights")]
        modes += [("gated", 0.0), ("gated", sure), ("gated", 1.0)]
        steps = lockstep(case, [Arm(name=m, mode=m, threshold=t) for m, t in modes]).run(tokens, decoded)
        for number, (mode, threshold) in enumerate(modes):
            prerouter.set(mode, threshold=threshold)
            for row, text in enumerate(tokens):
                streamed.reset()
                cache, told = streamed.loaded.make_cache(), []
                for part, phase in pieces(decoded[row]):
                    logits = streamed.run(mx.array(text[None, part]), cache, phase)[0]
                    if phase == DECODED and part.stop < len(text):
                        told.append(loss(logits, text[part.stop]))
                        at = number, row, part.start
                        assert abs(told[-1] - steps.loss[at]) < ROUNDING, (mode, at)
                        assert int(mx.argmax(logits[-1])) == steps.greedy[at]
                consumers = list(prerouter.wiring.consumer_index)
                replaced = steps.replaced[number, row][decoded[row]][:, consumers]
                expected = prerouter.supply.map[:, consumers] == 1
                assert mode == "off" or (replaced == expected).all(), mode
                assert np.isfinite(steps.loss[number, row, :-1][decoded[row, :-1]]).all()
    share = [steps.replaced[n][decoded][:, consumers].mean() for n in range(len(modes))]
    assert share[:4] == [0, 1, 1, 1] and 0 < share[4] < 1 and share[5] == 0


def test_a_native_past_is_a_text_whose_last_token_alone_is_routed_by_prediction(case):
    folder, _, spec, bank, tokens, decoded = case
    arms = [Arm(name="off", mode="off"), Arm(name="one", mode="replace", native_history=True)]
    arms.append(Arm(name="all", mode="replace"))
    steps = lockstep(case, arms).run(tokens, decoded)
    for row, text in enumerate(tokens):
        for t in np.flatnonzero(decoded[row, :-1]):
            with world.Plain(folder, bank, spec) as plain:
                cache = plain.loaded.make_cache()
                plain.run(text[:t].tolist(), cache, False)
                got = loss(plain.run([int(text[t])], cache, True), text[t + 1])
            assert abs(got - steps.loss[1, row, t]) < ROUNDING
    both = decoded.copy()
    both[:, -1] = False
    assert not np.allclose(steps.loss[1][both], steps.loss[2][both])


def test_its_own_tokens_are_those_of_the_engine(case):
    _, streamed, spec, bank, tokens, _ = case
    asked = np.concatenate([tokens[:, :6], np.full((len(tokens), 7), OWN, np.int32)], axis=1)
    decoded = np.broadcast_to(np.arange(asked.shape[1]) >= 6, asked.shape)
    modes = ("off", "replace", "replace_true_weights")
    steps = lockstep(case, [Arm(name=mode, mode=mode) for mode in modes]).run(asked, decoded)
    assert np.isnan(steps.loss).all()
    with install_prerouter(streamed.loaded, spec, streamed, heads=bank, mode="replace") as prerouter:
        for number, mode in enumerate(modes):
            prerouter.mode = mode
            for row, text in enumerate(tokens):
                streamed.reset()
                cache = streamed.loaded.make_cache()
                logits = streamed.run(mx.array(text[None, :6]), cache, PREFILLED)
                for t in range(6, asked.shape[1]):
                    token = int(mx.argmax(logits[0, -1]))
                    assert steps.tokens[number, row, t] == token
                    logits = streamed.run(mx.array([[token]]), cache, DECODED)
                    assert steps.greedy[number, row, t] == int(mx.argmax(logits[0, -1]))


def test_another_k_is_that_of_a_model_with_it(case):
    folder, *_, tokens, decoded = case
    try:
        steps = lockstep(case, [Arm(name="off", mode="off")], top_k=2).run(tokens, decoded)
        few = world.resident(folder, 2)
        for row, text in enumerate(tokens):
            logits = few.model(mx.array(text[None]))[0]
            for t in np.flatnonzero(decoded[row, :-1]):
                assert abs(loss(logits[t], text[t + 1]) - steps.loss[0, row, t]) < ROUNDING
    finally:
        world.resident.cache_clear()  # `with_top_k` changed the network in place


def test_single_layers_groups_and_drift(case, monkeypatch):
    *_, tokens, decoded = case
    found = lockstep(case, [Arm(name="off", mode="off")])
    first, *_, last = found.head_of
    arms = [Arm(name="off", mode="off"), Arm(name="first", mode="replace", layers=(first,))]
    arms += [Arm(name="last", mode="replace", layers=(last,)), Arm(name="all", mode="replace")]
    steps = lockstep(case, arms).run(tokens, decoded)
    count = steps.replaced[:, decoded].sum(1)
    assert (count[1] > 0).nonzero()[0].tolist() == [first] and (count[2] > 0).nonzero()[0].tolist() == [last]
    drift = steps.drift[:, decoded].max(1)
    assert (drift[0] == 0).all() and (drift[3, first + 1 :] > 0).all() and (drift[3, 0] > 0) == (first < 0)
    monkeypatch.setattr("moelab.prerouter.lockstep.ROWS", 4)  # one text at a time
    alone = lockstep(case, arms).run(tokens, decoded)
    both = decoded & ~np.isnan(steps.loss[0])
    np.testing.assert_allclose(alone.loss[:, both], steps.loss[:, both], atol=ROUNDING)
    assert (alone.hits[:, decoded] == steps.hits[:, decoded]).all()


def test_a_past_that_is_no_list_of_keys_is_refused(tmp_path):
    folder = world.tiny_model("qwen3_5_moe", tmp_path)
    with world.engine(folder) as streamed:
        spec = world.spec_for(streamed)
        case = (folder, streamed, spec, world.heads_for(streamed, spec), None, None)
        with pytest.raises(UnsupportedModelError, match="keys and values"):
            lockstep(case, [Arm(name="off", mode="off")])


def test_what_cannot_be_asked_is_refused(case):
    *_, tokens, decoded = case
    off = Arm(name="off", mode="off")
    with pytest.raises(ParameterError, match="native model"):
        lockstep(case, [Arm(name="replace", mode="replace")])
    with pytest.raises(ParameterError, match="no such mode"):
        Arm(name="x", mode="sometimes")
    with pytest.raises(GeometryError, match="phase"):
        lockstep(case, [off]).run(tokens, decoded[1:])
    with pytest.raises(ContractError, match="begin with a prompt"):
        lockstep(case, [off]).run(tokens, np.ones_like(decoded))
    with pytest.raises(ContractError, match="nothing is decoded"):
        lockstep(case, [off]).run(tokens, np.zeros_like(decoded))
    own = tokens.copy()
    own[0, 0] = OWN
    with pytest.raises(ContractError, match="likeliest token"):
        lockstep(case, [off]).run(own, decoded)
