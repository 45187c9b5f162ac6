"""A stage is asked once: the same request opens what it left, and anything that could change it asks again."""

import os
from dataclasses import dataclass
from typing import ClassVar

import flywheel_world
import pytest

from moelab import artifacts, models
from moelab.errors import ArtifactError
from moelab.flywheel import stage
from moelab.flywheel.vault import Vault
from moelab.params import Options, param


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Options):
    notebook: ClassVar[str] = "20"
    size: int = param(3, "something to change", min=1)


@pytest.fixture
def calls(world, tmp_path, monkeypatch):
    """Calls made, in a folder of its own and without worker processes."""
    made = []

    def run_workers(fn, kwargs_list, *, blas="reference", on_progress=None):
        made.extend((kwargs["model"], blas) for kwargs in kwargs_list)
        return [fn(**kwargs) for kwargs in kwargs_list]

    monkeypatch.setattr(models, "run_workers", run_workers)
    with world.entered(tmp_path):
        yield made


def options(world, **changes):
    return StudyOptions(**{"models": [world.model], "threads": str(world.threads), **changes})


def ask(world, job=None, blas="reference", **changes):
    made = stage.run(flywheel_world.stage_job, options(world, **changes), {world.model: job or {}}, blas=blas)
    return made[world.model]


def test_the_same_request_starts_nothing(world, calls):
    first = ask(world)
    assert ask(world) == first and len(calls) == 1
    assert artifacts.read_json(first.file("asked.json"))["size"] == 3


@pytest.mark.parametrize("change", ["option", "seed", "job", "blas", "forgotten", "threads", "model", "library"])
def test_whatever_could_change_the_answer_asks_again(world, calls, change, monkeypatch, tmp_path):
    ask(world, {"depth": 1})
    changes = {"depth": 1}, "reference", {}
    if change == "option":
        changes = {"depth": 1}, "reference", {"size": 4}
    elif change == "seed":
        changes = {"depth": 1}, "reference", {"seed": 4}
    elif change == "job":
        changes = {"depth": 2}, "reference", {}
    elif change == "blas":
        changes = {"depth": 1}, "auto", {}
    elif change == "forgotten":
        Vault().destroy("0123456789abcdef")
    elif change == "library":
        monkeypatch.setattr(stage.metadata, "version", lambda name: "another")
    else:
        path = world.threads if change == "threads" else world.root / "model" / "config.json"
        before = path.stat()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    job, blas, own = changes
    ask(world, job, blas, **own)
    assert len(calls) == 2
    ask(world, job, blas, **own)
    assert len(calls) == 2


def test_a_thread_file_that_grew_asks_again(world, calls, tmp_path):
    path = tmp_path / "threads" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("{}\n")
    folder = {"threads": str(path.parent)}
    ask(world, **folder)
    ask(world, **folder)
    assert len(calls) == 1
    (path.parent / "b.jsonl").write_text("{}\n")
    ask(world, **folder)
    assert len(calls) == 2


def test_an_upstream_artefact_counts_by_its_content(world, calls):
    def upstream(text):
        return artifacts.build(
            "up", inputs={"text": text}, params={}, make=lambda f: artifacts.write_json(f / "x.json", text) or {}
        )

    one = ask(world, {"before": upstream("a")})
    assert ask(world, {"before": upstream("a")}) == one and len(calls) == 1
    ask(world, {"before": upstream("b")})
    assert len(calls) == 2
    asked = artifacts.read_json(one.file("asked.json"))["job"]["before"]
    assert asked == str(upstream("a").path), "the worker is given its folder"


def test_an_altered_artefact_is_refused_not_rebuilt(world, calls):
    made = ask(world)
    made.file("asked.json").write_text("{}")
    with pytest.raises(ArtifactError, match="file altered"):
        ask(world)
    made.file("asked.json").unlink()
    with pytest.raises(ArtifactError):
        ask(world)
    assert len(calls) == 1


def test_an_artefact_that_was_cleaned_away_is_built_again(world, calls):
    import shutil

    made = ask(world)
    shutil.rmtree(made.path)
    assert ask(world).content == made.content and len(calls) == 2


def test_models_keep_their_order_and_only_the_missing_ones_run(world, calls):
    both = {world.model: {}, world.sigmoid: {}}
    ask(world)
    found = stage.run(flywheel_world.stage_job, options(world), both)
    assert list(found) == [world.model, world.sigmoid]
    assert [model for model, _ in calls] == [world.model, world.sigmoid]


def test_with_a_worker_process(world, tmp_path):
    with world.entered(tmp_path):
        first, again = ask(world), ask(world)
        assert first == again and (tmp_path / "calls").read_text() == "called\n"
