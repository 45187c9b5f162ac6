"""Every page of a report opens offline, is accessible, and keeps its formulas and its figures' descriptions."""

import lab_world
import pytest
from page_checks import check, pages
from repository import ROOT

from moelab.lab import run as running


@pytest.fixture(scope="module")
def world_report(tmp_path_factory):
    """The report of the small world, with one notebook made to fail after a formula, a figure and a table."""
    with pytest.MonkeyPatch.context() as patch:
        world = lab_world.enter(lab_world.make(tmp_path_factory.mktemp("world")), patch)
        cell = lab_world.FIRST[4].source.replace("plots.lines(", "figure = plots.lines(")
        cell += "\nfrom IPython.display import Math, display\ndisplay(figure, Math(r'\\sum_i x_i'))"
        cell += "\nfrom moelab.lab import tables\ntables.table(frame, id='recall', caption='Recall by token')"
        world.edit("20_first.ipynb", 4, cell)
        running.run("tiny", dag=lab_world.DAG, say=lambda _: None)
        world.edit("21_second.ipynb", 4, "# a comment in the code\nraise ValueError('no expert 64')")
        running.run("tiny", name="failed", dag=lab_world.DAG, say=lambda _: None)
        yield world.root / "reports"


def test_small_report(page, world_report):
    found = pages(world_report)
    assert {path.name for path in found} == {"20.html", "21.html", "index.html"} and len(found) == 6
    for path in found:
        check(page, path)


def test_formulas_are_drawn_and_can_be_read(page, world_report):
    page.goto((world_report / "tiny" / "20.html").as_uri())
    assert page.locator("math").count() == 3
    block = page.locator("math[display=block]").first
    inline = page.locator("math:not([display=block])").first
    assert block.locator("mfrac").count() == 1 and block.locator("munderover").count() == 1
    assert "U_B" in inline.get_attribute("alttext")
    # a fraction is drawn, not spelt out: its parts stand above each other
    top, bottom = (block.locator("mfrac > *").nth(k).bounding_box() for k in (0, 1))
    assert top["y"] + top["height"] <= bottom["y"] + 1


def test_code_is_folded_and_opens_without_script(page, world_report):
    page.goto((world_report / "tiny" / "20.html").as_uri())
    fold = page.locator("details.moelab-code").first
    assert not fold.locator("pre").first.is_visible()
    fold.locator("summary").click()
    assert fold.locator("pre").first.is_visible()


def test_failed_notebook_says_which_cell(page, world_report):
    page.goto((world_report / "failed" / "21.html").as_uri())
    alert = page.get_by_role("alert").inner_text()
    assert "did not finish" in alert and "code cell 3" in alert and "no expert 64" in alert
    page.goto((world_report / "failed" / "index.html").as_uri())
    assert page.get_by_role("row").filter(has_text="21 Second").inner_text().count("failed") == 1


def test_index_leads_to_every_notebook(page, world_report):
    page.goto((world_report / "tiny" / "index.html").as_uri())
    gates = page.locator("table").first.inner_text()
    assert "replay correctness" in gates and gates.count("✓ pass") == 2
    page.get_by_role("link", name="20 First").first.click()
    assert page.title() == "First"
    page.get_by_role("link", name="All notebooks of this run").click()
    assert page.title() == "moelab: tiny"


def test_committed_reports(page):
    for path in pages(ROOT / "reports" / "committed"):
        check(page, path)
