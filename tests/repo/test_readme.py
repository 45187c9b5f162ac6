"""The README's gate table says what the committed run decided, and when."""

import json
import re

from repository import ROOT

from moelab.studies.streaming_claims import waiting_hidden

COMMITTED = ROOT / "reports" / "committed" / "reference" / "verdicts.json"


def test_gate_table_is_that_of_the_committed_run():
    run = json.loads(COMMITTED.read_text())
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| (\d) [^|]*\| (\w+ \| \w+) \|", readme, flags=re.M))
    for gate in range(4):
        found = {v["model"]: v["status"] for v in run["verdicts"] if v["gate"] == gate}
        assert rows[str(gate)] == f"{found['softmax']} | {found['sigmoid']}"
    assert run["finished"][:10] in readme
    assert all(entry["status"] == "done" for entry in run["notebooks"])
    assert set(run["verdicts"][0]) >= {"figures", "n", "standard_errors", "inputs", "runtime"}
    digests = {v["inputs"]["snapshot"] for v in run["verdicts"] if v["gate"] == 2}
    assert len(digests) == 2  # one a model


def test_figures_quoted_are_those_of_the_run():
    run = json.loads(COMMITTED.read_text())
    readme = (ROOT / "README.md").read_text()
    for verdict in run["verdicts"]:
        if verdict["gate"] == 3:
            gain, error = verdict["figures"]["recall_gain"], verdict["standard_errors"]["recall_gain"]
            assert f"+{gain:.3f} ± {error:.3f}".replace("0.", ".") in readme
        if verdict["gate"] == 1:
            assert f"{verdict['n']['rows']:,}" in readme


def test_peers_quoted_are_those_of_the_run():
    run = json.loads((ROOT / "reports" / "committed" / "peers.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert run["date"] in readme and f"*{run['outcome']['status']}*" in readme
    quoted = re.findall(
        r"^\| ([^|]+) \| ([\d.]+) ± ([\d.]+) \| ([\d,]+) \| ([\d.]+) \| ([\d,]+) \|$", readme, flags=re.M
    )
    rows = {
        r["arm"]: (f"{r['seconds_per_token']:.3f}", f"{r['seconds_spread']:.3f}", f"{r['bytes_per_token'] / 1e6:,.0f}",
                   f"{r['amplification']:.2f}", f"{r['peak_rss'] / 1e6:,.0f}")
        for r in run["outcome"]["rows"] if r["seconds_per_token"] and r["role"] != "reference"
    }  # fmt: skip
    assert {name: tuple(figures) for name, *figures in quoted} == rows


def section(title):
    return (ROOT / "README.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def test_weight_files_are_called_what_the_readme_says():
    from moelab.flywheel.head_training import FILES
    from moelab.prerouter import TIERS

    text = section("Models and adapters")
    named = set(re.findall(r"`(prerouter\w*\.safetensors)`", text))
    assert named == {*FILES.values(), *(make().spec.weights_file for make in TIERS.values())}
    for name in FILES.values():
        assert all((ROOT / "artifacts" / "models" / model / name).is_file() for model in ("softmax", "sigmoid"))
    for word in re.findall(r"`(\w+)\(|`([a-z]\w+_legacy)`", text):
        import moelab.prerouter as prerouter
        import moelab.streaming as streaming

        assert any(hasattr(module, "".join(word)) for module in (prerouter, streaming)), word


def test_as_many_families_are_refused_as_the_readme_says():
    from moelab.prerouter.hooks import OTHERWISE

    assert "Six families" in section("Models and adapters") and len(OTHERWISE) == 6


def test_weight_files_are_looked_for_in_the_order_that_the_readme_says(tmp_path):
    from moelab.prerouter import find_weights

    assert "in the model's folder first, then in `artifacts/`" in section("Models and adapters").replace("\n", " ")
    beside, general = tmp_path / "model", tmp_path / "artifacts"
    for folder in (general, beside):
        folder.mkdir()
        (folder / "prerouter.safetensors").touch()
        assert find_weights("prerouter.safetensors", beside, fallback=general).parent == folder


def test_the_example_of_installing_heads_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = "\n".join(line[4:] for line in section("Models and adapters").splitlines() if line.startswith("    "))
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    names["engine"].close()
    assert capsys.readouterr().out.rstrip().endswith("True")  # every layer with a head was fed


def test_on_policy_figures_quoted_are_those_of_the_run():
    run = json.loads((ROOT / "reports" / "committed" / "on_policy.json").read_text())
    text = section("Models and adapters")
    assert run["date"] in text
    last = f"on-policy, pass {run['recipe']['passes']}"
    found = {(r["model"], r["metric"]): r for r in run["rows"] if (r["heads"], r["mode"]) == (last, "replace")}
    for model in ("softmax", "sigmoid"):
        row, loss = (found[model, f"{metric} less teacher-forced"] for metric in ("recall", "loss"))
        assert f"{row['value']:+.3f} ± {row['se']:.3f}".replace("0.", ".") in text
        assert abs(loss["value"]) < 2 * loss["se"]


def test_times_quoted_are_those_of_the_run():
    run = json.loads((ROOT / "reports" / "committed" / "timing.json").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert run["date"] in readme and f"`{run['command']}`" in readme

    def best(model):
        rows = [r for r in run["models"][model]["overlap"]["rows"] if r["arm"].startswith("in_forward")]
        return [f"{max(r['share'] for r in rows if r['ratio'] == ratio):.2f}" for ratio in (0.5, 1.0, 2.0)]

    measured = [
        (claim["claim"], claim["measured"], claim["holds"])
        for claim in run["claims"] if claim["claim"].endswith("measured")
    ]  # fmt: skip
    assert f"{sum(claim['holds'] for claim in run['claims'])} of {len(run['claims'])} claims hold" in readme
    assert len(measured) == 3 and all(holds for _, _, holds in measured)
    waiting = [
        max(waiting_hidden(rows, row) for row in rows if row["ratio"] == ratio and row["arm"].startswith("in_forward"))
        for rows in (model["overlap"]["rows"] for model in run["models"].values()) for ratio in (0.5, 1.0, 2.0)
    ]  # fmt: skip
    assert f"hides at least {min(waiting):.3f} of the waiting" in readme
    assert "wins {}, {} and {} of the possible".format(*(f"{value:.2f}" for _, value, _ in measured)) in readme
    one_ahead = {
        row["ratio"]: f"{row['share']:.2f}"
        for row in run["models"]["stand-in"]["overlap"]["rows"] if row["arm"] == "in_forward, 1 layer ahead"
    }  # fmt: skip
    assert "one layer: {}, {}, {};".format(*(one_ahead[ratio] for ratio in (0.5, 1.0, 2.0))) in readme
    (worst,) = (claim for claim in run["claims"] if claim["claim"].endswith("slowed store, worst arm"))
    assert f"the worst of 18 arms is {worst['measured']:.0%} off".replace("%", " %") in readme
    short = min(row["difference"] for m in ("softmax", "sigmoid") for row in run["models"][m]["overlap"]["rows"])
    assert f"simulated tokens were up to {-short:.0%} too short".replace("%", " %") in readme
    assert (
        "{}, {}, {} (softmax) and {}, {}, {} (sigmoid) of the possible".format(*best("softmax"), *best("sigmoid"))
        in readme
    )
    rates = [row["ratio"] for row in run["models"]["stand-in"]["throughput"]]
    assert f"at {rates[0]:.2f} of a raw probe one at a time and at {rates[1]:.2f} four at a time" in readme
    check = run["models"]["stand-in"]["check"]
    off = {store: max(abs(r["ratio"] - 1) for r in check if r["store"] == store) for store in ("declared", "this disk")}
    assert (
        f"within {off['declared']:.0%}".replace("%", " %") in readme
        and f"{off['this disk']:.0%}".replace("%", " %") in readme
    )
    (racing,) = (
        claim for claim in run["claims"]
        if claim["claim"] == "simulated against real hits, declared, prediction: perfect, a layer ahead"
    )  # fmt: skip
    assert f"while prefetches race, simulated hits are {100 * racing['measured']:.1f} points off" in readme


def test_overlap_quoted_is_that_of_the_run():
    run = json.loads((ROOT / "reports" / "committed" / "overlap.json").read_text())
    readme, won = " ".join((ROOT / "README.md").read_text().split()), {}
    for model, figures in run["models"].items():
        rows = [row for row in figures["overlap"]["rows"] if row["arm"].startswith("in_forward")]
        won[model] = [max(row["share"] for row in rows if row["ratio"] == ratio) for ratio in (0.5, 1.0, 2.0)]
        assert figures["overlap"]["cores_apart"] and min(won[model]) >= 0.9
        repeats = {row["n"] for row in rows}
        assert repeats == ({7} if model == "stand-in" else {14})
    said = {model: ", ".join(f"{share:.2f}" for share in shares) for model, shares in won.items()}
    assert f"medians of 14): {said['softmax']} (softmax), {said['sigmoid']} (sigmoid) and, in 7," in readme
    assert f"and, in 7, {said['stand-in']} (0.55 MB)" in readme
    short = min(r["difference"] for m in ("softmax", "sigmoid") for r in run["models"][m]["overlap"]["rows"])
    assert f"simulated ones are up to {-short:.0%} too short".replace("%", " %") in readme
    assert f"{run['date']}, `{run['command']}`, page 80" in readme


def test_what_a_prerouter_buys_is_as_measured():
    run = json.loads((ROOT / "reports" / "committed" / "prerouter_gain.json").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert run["date"] in readme and f"`{run['command']}`" in readme
    waits, faster, right = [], {"heads": [], "gated": []}, []
    for model in ("softmax", "sigmoid"):
        found = run["models"][model]
        claims = {claim["claim"]: claim for claim in found["claims"]}
        overlap = claims["heads: in_forward waits less than step_boundary by more than the spread, at equal bytes"]
        waits.append(" of ".join(re.match(r"(\d+) of (\d+)", overlap["spread"]).groups()))
        cells = len({(row["cycles"], row["ratio"]) for row in found["rows"]})
        for arm, counts in faster.items():
            share = claims[f"{arm}, in_forward: faster than off in every cell"]["measured"]
            counts.append(f"{share * cells:.0f}")
        (row,) = [r for r in found["rows"] if r["arm"] == "perfect, in_forward" and (r["ratio"] or 0) > 3]
        right.append(f"{row['share']:.2f}")
    assert f"in {waits[0]} and {waits[1]} cells" in readme
    heads, gated = faster["heads"], faster["gated"]
    assert f"in {heads[0]} of {cells} cells and in {heads[1]} of {cells}, under" in readme
    assert f"under the gated default in {gated[0]} and in {gated[1]}" in readme
    assert f"would win {right[0]} and {right[1]} of the possible" in readme
