"""Frames of notebook 41's heads part: pairs, bytes, and where the files lie."""

from types import SimpleNamespace

import pandas as pd
import pytest

from moelab import artifacts, models
from moelab.flywheel.baselines import BaselineOptions
from moelab.flywheel.head_recipe import HeadRecipe
from moelab.flywheel.head_training import FILES, HISTORY
from moelab.flywheel.training import TrainingOptions
from moelab.lab import views


def row(ranking, metric, value, *, group="all", se=0.01):
    return {
        "model": "softmax", "horizon": "1 token + 1 layer", "ranking": ranking, "set": "validation", "metric": metric,
        "group": group, "value": value, "se": se, "n": 40, "threads": 4,
    }  # fmt: skip


@pytest.fixture
def judged():
    return pd.DataFrame(
        [
            row(views.FULL, "recall@1x", 0.39),
            row(views.SHARED, "recall@1x", 0.375),
            row("random", "recall@1x", 0.06),
            row(views.FULL, "recall@1x less", 0.33, group="random (1 token + 1 layer)"),
            row(views.FULL, "recall@1x less", 0.015, group=f"{views.SHARED} (1 token + 1 layer)", se=0.002),
        ]
    )


@pytest.fixture
def heads(tmp_path):
    for form, name in FILES.items():
        (tmp_path / name).write_bytes(form.encode())
    each = {
        "loss": [2.0, 1.0], "overfit_recall": 1.0, "parameters": 7, "examples_per_second": 100.0, "seconds": 3.0,
        "weight_error": {"heads": 0.1, "equal": 0.2},
    }  # fmt: skip
    artifacts.write_json(tmp_path / HISTORY, dict.fromkeys(FILES, each))
    counts = {"full_bytes": 1000, "shared_bytes": 90}
    return {"softmax": SimpleNamespace(file=lambda name: tmp_path / name, counts=counts)}


def test_history_has_a_row_an_epoch_and_a_row_a_form(heads):
    losses, summary = views.head_history(heads)
    assert losses["loss"].tolist() == [2.0, 1.0, 2.0, 1.0] and losses["epoch"].tolist() == [1, 2, 1, 2]
    assert summary["form"].tolist() == ["full", "shared"] and summary["bytes"].tolist() == [1000, 90]
    assert set(summary["error of a weight"]) == {0.1} and set(summary["of equal weights"]) == {0.2}


def test_gains_are_the_paired_rows_in_standard_errors(judged):
    gains = views.head_gains(judged)
    assert gains["less"].tolist() == ["random (1 token + 1 layer)", f"{views.SHARED} (1 token + 1 layer)"]
    assert gains["standard errors"].tolist() == pytest.approx([33.0, 7.5])


def test_bytes_and_whether_the_small_form_is_within_a_standard_error(heads, judged):
    (found,) = views.head_bytes(heads, judged).to_dict("records")
    assert found["share of bytes"] == 0.09 and found["full less shared"] == 0.015
    assert found["within one standard error"] == "no"  # .015 less, .010 the error
    judged.loc[judged["ranking"] == views.FULL, "se"] = 0.02
    assert views.head_bytes(heads, judged)["within one standard error"].tolist() == ["yes"]


def test_files_say_where_they_lie_and_whether_they_are_equal(heads):
    name = FILES["full"]
    found = views.head_files(heads).set_index("form")
    assert found.loc["full", "beside the model"] == f"artifacts/models/softmax/{name}"
    assert found["equal"].tolist() == ["no", "no"]
    heads["softmax"].file(name).write_bytes((models.find("softmax") / name).read_bytes())
    assert views.head_files(heads)["equal"].tolist() == ["yes", "no"]


def test_the_reference_profile_trains_what_is_committed_and_heads_are_no_part_of_the_predictors():
    reference, tiny = (TrainingOptions.from_profile(profile) for profile in ("reference", "tiny"))
    assert reference.heads() == HeadRecipe() != tiny.heads()
    assert BaselineOptions.from_profile("reference").upstream(TrainingOptions).heads() == reference.heads()
    assert not any(key.startswith("head_") for key in reference.own()) and "rank" in reference.own()
