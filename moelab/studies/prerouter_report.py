"""The committed figures of what a prerouter buys: the whole grid, on a machine that does nothing else meanwhile.

python -m moelab.studies.prerouter_report reference     about ten minutes a model
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from .. import artifacts, models
from ..artifacts import Artifact
from ..commands import Parser
from ..flywheel.capture import CaptureOptions, capture
from ..params import PROFILES

REPORT = Path("reports/committed/prerouter_gain.json")
COMMAND = "python -m moelab.studies.prerouter_report reference"


def committed() -> dict[str, Any] | None:
    """The report: `command`, `date`, and `models` → figures of `prerouter_gain.gain`; None before it was made."""
    path = artifacts.root() / REPORT
    return artifacts.read_json(path) if path.is_file() else None


def measure(options: CaptureOptions, observed: dict[str, Artifact]) -> dict[str, Any]:
    """Each model by itself, with the heads that are committed beside it: model → figures."""
    from .prerouter_gain import QUIET, GainPlan, committed_model

    plan = QUIET if options.profile == "reference" else GainPlan(texts=1, tokens=4)
    found = {}
    for model in options.models:
        job = {"model": model, "observations": observed[model].path, "plan": plan}
        [found[model]] = models.run_workers(committed_model, [job], blas="auto", workers=1)
        for row in found[model]["claims"]:
            print(model, row["claim"], row["measured"], row["asked"], row["spread"], row["holds"], sep="  ", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write the report. At the tiny profile it is printed only."""
    parser = Parser(prog="python -m moelab.studies.prerouter_report", description=__doc__)
    parser.add_argument("profile", choices=PROFILES, help="reference writes the report, tiny prints it")
    profile = parser.parse_args(arguments).profile
    options = CaptureOptions.from_profile(profile)
    found = measure(options, capture(options))
    if profile == "reference":
        report = {"schema_version": 1, "command": COMMAND, "date": datetime.date.today().isoformat(), "models": found}
        artifacts.write_json(artifacts.root() / REPORT, report)


if __name__ == "__main__":
    main()
