"""Sentences and the default are made of the figures: other figures, other words."""

import copy

import pytest

from moelab.prerouter.modes import DEFAULT_THRESHOLD
from moelab.studies.prerouter_verdict import SMALLEST, choose, free, sentences


def estimate(value, se=0.001):
    return {"value": value, "se": se, "n": 100, "threads": 5}


def mode(arm, loss, replaced, *, kind=None, threshold=0.0, se=0.001, less=0.0):
    return {
        "arm": arm, "mode": kind or arm, "threshold": threshold, "loss": estimate(loss, se), "greedy": estimate(0.5),
        "replaced": estimate(replaced), "less_replace": estimate(less), "greedy_less_replace": estimate(0.0),
    }  # fmt: skip


def ranking(name, recall, lead, covered=0.2):
    return {
        "ranking": name, "lead_layers": lead, "lead_s": lead * 1e-3, "recall": estimate(recall),
        "covered": estimate(covered), "read": estimate(100.0), "wasted": estimate(60.0),
    }  # fmt: skip


@pytest.fixture
def figures():
    rows = [ranking("own gate, 1 layer early", 0.7, 1.0), ranking("previous token, same layer", 0.2, 8.0, 0.01)]
    rows += [ranking("some table", 0.25, 9.0), ranking("heads, full", 0.4, 9.0), ranking("heads, shared", 0.39, 9.0)]
    depth = [{"layers": "up to this layer", "layer": n, "loss": estimate(0.1 * n)} for n in (1, 2)]
    depth += [{"layers": "this layer alone", "layer": n, "loss": estimate(0.05)} for n in (1, 2)]
    own = {"arm": "replace", "equal_tokens": estimate(2.5), "agrees": estimate(0.6)}
    return {
        "agreement": {"rows": rows, "less": [{"ranking": "some table", "recall": estimate(0.15)}]},
        "modes": [
            mode("off", 0.0, 0.0), mode("replace", 0.3, 1.0),
            mode("replace, past native", 0.0, 1.0, kind="replace"), mode("replace_true_weights", 0.2, 1.0, less=-0.1),
            mode("gated at 0.3", 0.01, 0.8, kind="gated", threshold=0.3, se=0.01),
            mode("gated at 0.5", 0.01, 0.3, kind="gated", threshold=0.5),
            mode("gated at 0.7", 0.0, 0.1, kind="gated", threshold=0.7),
        ],
        "top_k": [
            {"top_k": k, "arm": arm, "loss": estimate(loss * (k != 4) + 0.1 * n, 0.001 * (k + n != 4))}
            for k, loss in ((2, 0.2), (4, 0.0))
            for n, arm in enumerate(("off", "replace", "replace_true_weights"))
        ],
        "depth": {"rows": depth, "together": estimate(0.1)},
        "past": estimate(0.0005),
        "own": {"tokens": 8, "rows": [own]},
    }  # fmt: skip


def test_a_mode_is_free_with_two_standard_errors_to_spare():
    assert free(mode("x", SMALLEST - 0.003, 1.0)) and not free(mode("x", SMALLEST - 0.001, 1.0))
    assert free(mode("x", -1.0, 1.0)) and not free(mode("x", 0.0, 1.0, se=None))


def test_the_default_replaces_most_of_what_is_free_everywhere(figures):
    assert choose({"a": figures}) == ("gated", 0.5)
    other = copy.deepcopy(figures)
    other["modes"][5]["loss"] = estimate(0.1)
    assert choose({"a": figures, "b": other}) == ("gated", 0.7)
    figures["modes"][3]["loss"] = estimate(0.0)
    assert choose({"a": figures}) == ("replace_true_weights", 0.0)
    for row in figures["modes"]:
        row["loss"] = estimate(1.0)
    assert choose({"a": figures}) is None


def test_a_page_names_one_default_and_what_it_does_here(figures):
    figures["modes"].append(mode("gated at 0.55", 0.0, 0.25, kind="gated", threshold=DEFAULT_THRESHOLD))
    other = copy.deepcopy(figures)
    other["modes"][-1]["loss"] = estimate(0.1)
    last = sentences({"a": figures, "b": other})[-1]
    assert last.startswith("The default is gated at a confidence of 0.55, by the committed study of 28 texts")
    assert last.endswith("25% of routes on a, within 0.02 nats; 25% of routes on b, not within 0.02 nats.")
    assert choose({"a": figures}) == ("gated", 0.5) and "0.5," not in last  # what this page alone would choose


def test_words_follow_the_figures(figures):
    text = "\n".join(sentences({"m": figures}))
    for words in (
        "40.0 ± 0.1 % of a layer's experts, 9 layers or 9.0 ms of compute ahead: more than the best",
        "some table, 25.0", "only 1 layer or 1.0 ms", "60% is not used", "it has most of them already",
        "perplexity × 1.35", "less than replace", "gated at 0.3 replaces 80.0 ± 0.1 % of routes",
        "With 2 experts a token the gate's loss over the native model's is +0.200",
        "tokens: not within 0.02 nats", "of greedy tokens it takes 0.0",
        "tokens: within 0.02 nats", "more than the sum of its parts",
        "which cannot be told from nothing", "of 8 greedy tokens the first 2.5",
        "confidence of 0.55, by the committed", "it routes by prediction nothing, as it was not among what was tried",
    ):  # fmt: skip
        assert words in text, words
    figures["agreement"]["less"][0]["recall"] = estimate(-0.1)
    figures["agreement"]["rows"][1]["covered"] = estimate(0.3)
    figures["modes"][3]["less_replace"] = estimate(0.1)
    figures["depth"]["together"], figures["past"] = estimate(-0.1), estimate(0.2)
    text = "\n".join(sentences({"m": figures}))
    for words in ("fewer than the best", "more than replace", "less than the sum", "error grows with tokens"):
        assert words in text, words
    assert "already" not in text and "With 4 experts" not in text  # the model's own number is no other
