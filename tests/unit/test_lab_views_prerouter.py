"""Frames of notebook 81 from a few figures written by hand, and the frontier that is drawn of them."""

import matplotlib
import pytest

from moelab.errors import ContractError
from moelab.lab import frontier
from moelab.lab.views import prerouter as views


def estimate(value, se=0.01):
    return {"value": value, "se": se, "n": 50, "threads": 5}


def ranking(name, recall, lead, nbytes=0):
    words = {"exact": 0.1, "top1": 0.3, "rank": 4.0, "covered": recall / 2, "read": 5e5, "wasted": 4e5}
    return {
        "ranking": name, "lead_layers": lead, "lead_s": lead * 1e-3, "nbytes": nbytes, "recall": estimate(recall),
        **{word: estimate(value) for word, value in words.items()},
    }  # fmt: skip


def cost(loss, **own):
    return {**own, "loss": estimate(loss), "greedy": estimate(0.6), "replaced": estimate(0.5), "recall": estimate(0.4)}


FIGURES = {
    "m": {
        "agreement": {
            "rows": [ranking("own gate", 0.7, 1.0), ranking("heads, full", 0.4, 9.0, nbytes=3_000_000)],
            "layers": [{**ranking("heads, full", 0.1 * n, 9.0), "layer": n} for n in (1, 2)],
            "less": [{"ranking": "own gate", "recall": estimate(-0.3)}],
        },
        "modes": [cost(0.0, arm="off"), cost(0.2, arm="replace"), cost(0.0, arm="gated at 0.6")],
        "top_k": [cost(0.1, arm="replace", top_k=2, over_gate=estimate(0.05))],
        "depth": {"rows": [cost(0.1, layer=1, layers="up to this layer")]},
        "drift": [{"arm": arm, "layer": 1, "drift": estimate(0.2)} for arm in ("off", "replace", "gated at 0.6")],
        "position": [
            {"arm": arm, "from": 4, "to": 7, "loss": estimate(0.1), "past": estimate(0.02), "greedy": estimate(0.5)}
            for arm in ("replace", "replace, past native", "replace_true_weights")
        ],
        "own": {
            "rows": [{"arm": "replace", "equal_tokens": estimate(2.0), "loss": estimate(1.0), "agrees": estimate(0.7)}],
            "apart": [{"arm": arm, "tokens": 1, "equal": estimate(0.5)} for arm in ("off", "replace")],
            "position": [{"arm": arm, "from": 1, "agrees": estimate(0.9, None)} for arm in ("off", "replace")],
        },
        "engine": [{"arm": "advise", "tokens": 3, "loss": 0.0, "largest": 1e-6, "equal_bits": True}],
        "texts": {"texts": 5, "threads": 5, "tokens": 50},
        "seconds": {"modes": 1.5},
    }
}  # fmt: skip


def test_agreement_stands_beside_lead_and_both_kinds_of_bytes():
    found = views.prerouter_agreement(FIGURES).set_index("predicted by")
    assert found.loc["heads, full", "lead, layers"] == 9 and found.loc[
        "heads, full", "lead, ms of compute"
    ] == pytest.approx(9)
    assert found.loc["own gate", ["value", "se", "n"]].tolist() == [0.7, 0.01, 50]
    found = views.prerouter_bytes(FIGURES).set_index("predicted by")
    assert found.loc["heads, full", "weights, kB"] == 3000 and found["value"].tolist() == [0.35, 0.2]
    assert found["read ahead, kB a token"].tolist() == [500, 500] and set(found["of that unused, kB"]) == {400}
    assert views.prerouter_less(FIGURES)["value"].tolist() == [-0.3]
    assert views.prerouter_layer_table(FIGURES, "heads, full")["layer"].tolist() == [1, 2]
    assert views.prerouter_layer_table(FIGURES, "no such").empty
    assert views.prerouter_layers(FIGURES["m"])["recall"].tolist() == pytest.approx([0.1, 0.2])


def test_a_loss_is_also_a_factor_of_perplexity():
    found = views.prerouter_modes(FIGURES).set_index("mode")
    assert found.loc["replace", "perplexity, ×"] == pytest.approx(1.2214, abs=1e-4)
    assert views.prerouter_mode_points(FIGURES)["mode"].tolist() == ["replace", "gated at 0.6"]
    found = views.prerouter_top_k(FIGURES)
    assert found["over the gate's own, nats"].tolist() == [0.05] and "routes replaced" not in found


def test_growth_is_shown_by_layer_by_token_and_by_answer():
    assert views.prerouter_depth(FIGURES)["predicted"].tolist() == ["m, up to this layer"]
    assert views.prerouter_drift(FIGURES)["mode"].tolist() == ["m, replace"]
    assert views.prerouter_position(FIGURES)["mode"].tolist() == ["m, replace", "m, replace, past native"]
    assert views.prerouter_past(FIGURES)[["decoded tokens", "value"]].to_numpy().tolist() == [["5 to 8", 0.02]]
    assert views.prerouter_own(FIGURES)["native agrees"].tolist() == [0.7]
    assert views.prerouter_apart(FIGURES)["mode"].tolist() == ["m, replace"]
    assert views.prerouter_own_agreement(FIGURES)[["mode", "se"]].to_numpy().tolist() == [["m, replace", 0.0]]
    assert views.prerouter_engine(FIGURES)["logits have the bits of off"].tolist() == ["yes"]
    assert views.prerouter_seconds(FIGURES)["modes, s"].tolist() == [1.5]


def drawn(frame):
    return frontier(
        frame, x="lead, ms of compute", y="share", size="read ahead, kB a token", hue="predicted by", panel="panel",
        alt="a description",
    )  # fmt: skip


def test_the_frontier_has_a_panel_a_kind_and_says_what_weights_take():
    frame = views.prerouter_frontier(FIGURES)
    assert frame["predicted by"].unique().tolist() == ["own gate", "heads, full (3,000 kB)"]
    frame.loc[0, "read ahead, kB a token"] = 100.0
    figure = drawn(frame)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["m: agreement", "m: misses covered"]
    areas = [c.get_sizes()[0] for c in shown[0].collections if len(c.get_offsets())]
    assert min(areas) < max(areas)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["own gate", "heads, full (3,000 kB)", "100", "500"]
    assert "image/png" in figure._repr_mimebundle_()[0] and isinstance(figure, matplotlib.figure.Figure)
    with pytest.raises(ContractError, match="no such column"):
        drawn(frame.drop(columns="share"))
