"""What streaming is asked to do in time, on an idle machine: hide reads, be predicted by the simulator, lose nothing.

    make timing        # about half an hour, and nothing else may run meanwhile

is the same as

    python -m moelab.studies.streaming_timing reports/committed/timing.json

Three models. The *stand-in* has experts of half a megabyte at 4 bits (`models.stand_in`) and is the one that is judged:
its reads take what reads of streamed models take. The embedded reference models stand beside it: their experts are so
small that the interpreter's own work on a read shows, and their figures say how much.

The claims: a perfect oracle in the forward hides at least nine tenths of the waiting that can be hidden, and wins as
much of the time that can be won, at reads of half, once and twice the compute, simulated and measured; a simulated
token takes as long as the measured one, on a slowed store and on this disk; the store reads as fast as a raw probe.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import artifacts, models
from ..commands import Parser
from .streaming_claims import waiting_hidden
from .streaming_stand_in import PROMPT, SHORT, STAND_IN, prompt

RATIOS = (0.5, 1.0, 2.0)
CYCLES = 1.5
READ_S = 1e-3
"""Latency of the declared device of the checks, and time of an expert's bytes: a layer's misses take a layer's time."""
HIDDEN, SLOWED, THIS_DISK, RACING, RATE = 0.90, 0.10, 0.20, 0.02, 0.95
"""Share of the possible at least; simulated against measured time on a slowed store and on this disk; hits and bytes
while prefetches race; the store's rate ÷ the raw probe's."""


def timing(model: str, *, tokens: int, repeats: int, seed: int = 0) -> dict[str, Any]:
    """One model in this process: `overlap`, and of the stand-in `check` and `throughput`."""
    from ..streaming import open_store, write_pack
    from ..streaming.store.pack import PackSource
    from . import simulation_check, streaming_overlap, streaming_rates

    with tempfile.TemporaryDirectory() as scratch:
        source, pack = Path(scratch) / "model", Path(scratch) / "pack"
        if model == STAND_IN:
            from ..models import stand_in

            source.mkdir()
            stand_in.write(source)
        write_pack(source if model == STAND_IN else models.find(model), pack, precision="float32")
        tokens_given = prompt(seed, 4 * PROMPT)
        found = {
            "overlap": streaming_overlap.overlap(
                pack, tokens_given[:PROMPT], tokens=tokens, repeats=repeats, ratios=RATIOS, cycles=CYCLES,
                policy_name="lru", readers=2, precision="float32", arms=tuple(streaming_overlap.ARMS),
            ),
        }  # fmt: skip
        if model == STAND_IN:
            found["check"] = simulation_check.runs(pack, tokens_given, repeats=repeats, read_s=READ_S)
            with open_store(pack, precision="float32") as store:
                found["expert_bytes"] = store.nbytes(0)
                found["throughput"] = streaming_rates.throughput(
                    store, PackSource(pack, "float32"), depths=(1, 4), reads=128, repeats=12 * repeats + 1, seed=seed
                )
        return found | {"runtime": models.runtime_identity("float32", "streamed")}


def judged(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The claims about the stand-in: `claim`, `measured`, `asked`, `n`, `spread`, `holds`."""
    rows, found = figures["overlap"]["rows"], []

    def claim(words: str, measured: float, asked: float, n: int, holds: bool, spread: str = "") -> None:
        found.append({"claim": words, "measured": measured, "asked": asked, "n": n, "spread": spread, "holds": holds})

    for ratio in RATIOS:
        ahead = [row for row in rows if row["ratio"] == ratio and row["arm"].startswith("in_forward")]
        hidden = {row["arm"]: waiting_hidden(rows, row) or 0.0 for row in ahead}
        arm = max(hidden, key=hidden.get)
        claim(
            f"of the waiting that can be hidden, hidden by an oracle in the forward, reads {ratio:g} x compute",
            hidden[arm], HIDDEN, ahead[0]["n"], hidden[arm] >= HIDDEN, arm,
        )  # fmt: skip
        for key, where in (("simulated_share", "simulated"), ("share", "measured")):
            best = max(ahead, key=lambda row: row[key])
            spread = f"{best['share_least']:.2f} to {best['share_greatest']:.2f}" if key == "share" else best["arm"]
            claim(
                f"of the time that can be won, won by an oracle in the forward, reads {ratio:g} x compute, {where}",
                best[key], HIDDEN, best["n"], best[key] >= HIDDEN, spread,
            )  # fmt: skip
    worst = max(rows, key=lambda row: abs(row["difference"]))
    claim(
        "simulated against measured time of a token, slowed store, worst arm", abs(worst["difference"]), SLOWED,
        worst["n"], abs(worst["difference"]) <= SLOWED, f"{worst['arm']}, reads {worst['ratio']:g} x compute",
    )  # fmt: skip
    for row in figures["check"]:
        own, words = row["store"] == "this disk", f"{row['store']}, prediction: {row['prediction']}"
        off, asked = abs(row["ratio"] - 1), THIS_DISK if own else SLOWED
        claim(f"simulated against measured time of a token, {words}", off, asked, row["tokens"], off <= asked)
        asked = 0.0 if row["prediction"] == "none" else RACING
        for key, whose in (("told_off", "hits where the simulator is told each read's time"),
                           ("hits_off", "simulated against real hits")):  # fmt: skip
            off = np.array(row[key])
            typical = float(np.median(np.abs(off)))
            claim(
                f"{whose}, {words}", typical, asked, len(off), typical <= asked, f"{off.min():+.3f} to {off.max():+.3f}"
            )
        read = abs(row["simulated_bytes"] / row["read_bytes"] - 1)
        claim(f"simulated against real bytes, {words}", read, asked, row["tokens"], read <= asked)
    for row in figures["throughput"]:
        claim(
            f"the store's rate ÷ a raw probe's, {row['depth']} at once", row["ratio"], RATE, row["n"],
            row["ratio"] >= RATE, f"{row['low']:.2f} to {row['high']:.2f}",
        )  # fmt: skip
    return found


def study(beside: Sequence[str], *, tokens: int, repeats: int) -> dict[str, Any]:
    """All models, one after the other, each in a process of its own."""
    blas = "openblas" if models.find_openblas() is not None else "reference"
    subjects = {}
    for model in (STAND_IN, *beside):
        job = {"model": model, "tokens": tokens, "repeats": repeats if model == STAND_IN else SHORT * repeats}
        (subjects[model],) = models.run_workers(timing, [job], blas=blas, workers=1)
        print(f"{model}: done", flush=True)
    return {
        "schema_version": 1,
        "command": "make timing",
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "claims": judged(subjects[STAND_IN]),
        "models": subjects,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m moelab.studies.streaming_timing", description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--models", nargs="*", default=["softmax", "sigmoid"], help="measured beside the stand-in (both embedded)"
    )
    parser.add_argument("--tokens", type=int, default=33, help="of an answer, the first of which is not timed")
    parser.add_argument(
        "--repeats", type=int, default=8, help="answers of each arm that count; twice as many of the others"
    )
    options = parser.parse_args(arguments)
    found = study(options.models, tokens=options.tokens, repeats=options.repeats)
    artifacts.write_json(options.out, found)
    for row in found["claims"]:
        verdict = "holds" if row["holds"] else "FAILS"
        print(f"{verdict:5}  {row['measured']:8.3f}  {row['asked']:5.2f}  {row['claim']}  {row['spread']}")


if __name__ == "__main__":
    main()
