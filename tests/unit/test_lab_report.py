"""A published verdict is seen, compared and collected; pages keep formulas, alt text and errors without a network."""

import lab_world
import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from moelab.errors import RecordError
from moelab.flywheel.gates import GATES, NOT_YET, QUESTIONS, Verdict, from_json, to_json
from moelab.lab import render, report, views
from moelab.lab.record import RunRecord
from moelab.lab.run import summary

VERDICT = Verdict(
    gate=3,
    model="softmax",
    status="fail",
    question="Is it worth it?",
    figures={"recall": 0.123456, "bytes": 1234567, "control": "gate <early>", "none": None},
    measured={"seconds": 1.5},
    standard_errors={"recall": 0.01},
    n={"recall": 2000, "threads": 7},
    thresholds={"recall": 0.2, "smallest_effect": 0.01},
    inputs={"snapshot": "ab"},
    runtime={"blas": "reference"},
    reason="recall is below its threshold",
)


def executed(*outputs, path=None):
    cells = [new_markdown_cell("# A title"), new_code_cell("x", outputs=list(outputs), execution_count=1)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    if path:
        nbformat.write(notebook, path)
    return notebook


def verdict_output(verdict=VERDICT):
    return new_output(
        "display_data",
        {report.VERDICT_MIME: report.compared(verdict), "text/html": report.card(verdict)},
        metadata={report.METADATA_KEY: to_json(verdict)},
    )


# ---------------------------------------------------------------- verdicts


def test_compared_part_leaves_out_what_varies_by_machine():
    payload = report.compared(VERDICT)
    assert payload["figures"] == {"recall": 0.1235, "bytes": 1234567, "control": "gate <early>", "none": None}
    assert payload["n"] == VERDICT.n and payload["thresholds"] == VERDICT.thresholds
    assert not {"measured", "runtime", "inputs", "standard_errors", "reason"} & set(payload)
    assert to_json(VERDICT)["measured"] == {"seconds": 1.5}  # but the record keeps them


def test_published_collects_the_whole_verdict():
    assert report.published(executed(verdict_output())) == [VERDICT]
    assert report.published(executed(new_output("stream", text="nothing"))) == []


def test_altered_or_absent_record_is_refused():
    output = verdict_output()
    output.metadata[report.METADATA_KEY]["status"] = "maybe"
    with pytest.raises(RecordError, match="status.*'maybe'"):
        report.published(executed(output))
    output.metadata = {}
    with pytest.raises(RecordError, match="not a verdict"):
        report.published(executed(output))


def test_publish_displays_each_verdict_once(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **kwargs: shown.append((data, kwargs)))
    report.publish([VERDICT, VERDICT])
    assert [set(data) for data, _ in shown] == [{report.VERDICT_MIME, "text/html"}] * 2
    assert from_json(shown[0][1]["metadata"][report.METADATA_KEY]) == VERDICT
    with pytest.raises(RecordError, match="nothing to publish"):
        report.publish([])


def test_card_shows_word_figures_n_errors_thresholds_and_escapes():
    html = report.card(VERDICT)
    texts = ["Gate 3 (offline value), softmax: fail", "0.1235", "1,234,567", "2,000", "0.01", "0.2", "seconds"]
    for text in [*texts, "recall is below its threshold", "threads = 7", "threshold smallest_effect = 0.01"]:
        assert text in html, text
    assert "gate &lt;early&gt;" in html and "<early>" not in html


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "ok"}, "field: status; got: 'ok'"),
        ({"gate": 7}, "field: gate; got: 7"),
        ({"question": ""}, "field: question"),
        ({"reason": ""}, "field: reason.*why it is fail"),
        ({"figures": {"recall": float("nan")}}, "field: figures.recall; got: nan"),
        ({"figures": {"recall": True}}, "field: figures.recall; got: True"),
        ({"figures": {}}, "field: standard_errors.recall"),
    ],
)
def test_impossible_verdicts_are_refused(change, message):
    value = {name: getattr(VERDICT, name) for name in VERDICT.__struct_fields__}
    with pytest.raises(RecordError, match=message):
        Verdict(**{**value, "standard_errors": {"recall": 0.01}, "measured": {}, **change})


def test_unknown_field_of_a_verdict_is_refused():
    with pytest.raises(RecordError, match="unknown field `surprise`"):
        from_json({**to_json(VERDICT), "surprise": 1})
    with pytest.raises(RecordError, match="missing required field `gate`"):
        from_json({key: value for key, value in to_json(VERDICT).items() if key != "gate"})


# ---------------------------------------------------------------- pages


def page(tmp_path, notebook, **kwargs):
    nbformat.write(notebook, tmp_path / "20.ipynb")
    render.render(tmp_path / "20.ipynb", tmp_path / "20.html", **kwargs)
    return (tmp_path / "20.html").read_text()


def test_page_links_nothing_outside(tmp_path):
    html = page(tmp_path, executed(verdict_output()))
    assert "<script" not in html and "<link" not in html
    assert "src=http" not in html.replace('"', "") and "@import" not in html
    assert "<title>A title</title>" in html


def test_formulas_become_mathml_with_their_source(tmp_path):
    notebook = executed()
    notebook.cells[0].source = (
        "# T\nInline $U_B < K \\cdot \\tau(B)$, stars $a * b * c$.\n\n$$\\frac{a}{b}$$\n\n"
        "\\begin{align} x &= 1 \\end{align}\n\n`$not math$`"
    )
    html = page(tmp_path, notebook)
    assert html.count("<math") == 4 and 'alttext="U_B &lt; K \\cdot \\tau(B)"' in html
    assert "<mfrac>" in html and 'display="block"' in html
    assert "$not math$" in html and "<em>" not in html
    assert "$$" not in html


def test_code_is_folded_not_removed_and_open_where_it_failed(tmp_path):
    failing = new_output(
        "error", ename="ValueError", evalue="no expert 64", traceback=["\x1b[31mValueError\x1b[39m: no <expert> 64"]
    )
    notebook = executed()
    notebook.cells.append(new_code_cell("boom()", outputs=[failing], execution_count=2))
    html = page(tmp_path, notebook, failure="code cell 2: ValueError")
    assert html.count("<details") == 2 and html.count("<summary>Code</summary>") == 2
    assert html.count("open=") == 1 and "boom" in html
    assert "ValueError: no &lt;expert&gt; 64" in html  # without the terminal's colours, which white makes unreadable
    assert "This notebook did not finish" in html and "code cell 2: ValueError" in html


def test_figures_keep_their_description(tmp_path):
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
    figure = new_output("display_data", {"image/png": pixel}, metadata={"image/png": {"alt": 'Recall "rises" & falls'}})
    html = page(tmp_path, executed(figure))
    assert 'alt="Recall &quot;rises&quot; &amp; falls"' in html or "alt='Recall \"rises\" &amp; falls'" in html


# ---------------------------------------------------------------- in a kernel


def test_figure_and_table_display_with_what_a_page_needs():
    import pandas as pd

    from moelab.lab import plots, tables

    format = DisplayFormatter().format
    frame = pd.DataFrame({"k": [1, 2], "recall": [0.5, 0.6]})
    data, metadata = format(plots.lines(frame, x="k", y="recall", alt="Recall rises"))
    assert metadata["image/png"]["alt"] == "Recall rises" and data["text/plain"] == "Recall rises"
    data, _ = format(tables.table(frame, id="t", caption="Recall"))
    assert 'id="t"' in data["text/html"]


def test_world_notebooks_are_what_the_tests_say():
    # the formulas and the figure that the browser test looks for
    assert "$U_B" in lab_world.FIRST[0].source and "plots.lines" in lab_world.FIRST[4].source


def test_how_far_a_stage_was_is_not_on_the_page(tmp_path, capsys):
    progress = views.progress("softmax", "sigmoid")
    for done in (100, 2000):
        for job in (0, 1, 2):
            progress(job, {"done": done, "total": 2000})
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "2: 100% of 2,000" and len(said.splitlines()) == 3
    said += "round 1 of 5: engine, pack\n"
    outputs = [
        new_output("stream", text=said),
        new_output("stream", text=f"{said}softmax: 5% of it is kept.\n{said}"),
        new_output("display_data", {"text/plain": "softmax: 10% of 20"}),
    ]
    render.render(_written(tmp_path, *outputs), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "100% of 2,000" not in page and "engine, pack" not in page
    assert "softmax: 5% of it is kept." in page and "softmax: 10% of 20" in page


def _written(folder, *outputs):
    executed(*outputs, path=folder / "ran.ipynb")
    return folder / "ran.ipynb"


# ---------------------------------------------------------------- all gates


def a_run(*verdicts):
    return RunRecord(
        schema_version=1, run="a-run", profile="tiny", finished="2026-11-30", notebooks=[], verdicts=list(verdicts)
    )


def test_the_index_has_a_row_of_every_gate_and_invents_no_verdict(tmp_path):
    render.index(tmp_path, a_run(VERDICT))
    index = (tmp_path / "index.html").read_text()
    rows = {row.split("<", 1)[0]: row for row in index.split('<th scope="row">')[1:]}
    for gate, question in QUESTIONS.items():
        row = rows[f"{gate} {GATES[gate]}"]
        if gate == 3:
            assert "✗ fail: recall is below its threshold" in row and "Is it worth it?" in row
        elif gate in NOT_YET:
            assert f"– refused: {NOT_YET[gate]}" in row and question in row
        else:
            assert "· not judged here: no verdict in this run" in row and question in row


def test_the_summary_of_a_run_has_a_line_of_every_gate():
    lines = summary(a_run(VERDICT)).splitlines()
    found = {int(line.split()[1]): line for line in lines if line.startswith("gate ")}
    assert list(found) == list(GATES)
    assert "not judged here no verdict in this run" in found[0] and "fail " in found[3]
    assert "refused " in found[6] and found[6].endswith("no end-to-end measurement yet")
    assert "no verdicts" in summary(a_run())
