"""What capture costs: the same tokens decoded with the taps on and off, in alternating pairs.

Reading the routes to the host is part of the cost. Times are of this machine and this moment; they are
reported with n and quartiles and never compared across machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import artifacts, models
from . import parity, stage
from .capture import CaptureOptions, capture
from .engine import opened
from .observations import Records

RESULT = "cost.json"


def measure(options: CaptureOptions) -> dict[str, dict[str, Any]]:
    """Model → figures of `parity.capture_cost`, measured in a process under the capture's BLAS."""
    observed = capture(options)
    jobs = {model: {"observations": observed[model]} for model in options.models}
    # One at a time: two models that share a machine would time each other.
    found = {}
    for model in options.models:
        found |= stage.run(cost_model, options, {model: jobs[model]}, blas=options.blas)
    return {model: artifacts.read_json(artifact.file(RESULT)) for model, artifact in found.items()}


def cost_model(model: str, options: CaptureOptions, observations: Path) -> Path:
    """One model in this process; returns the folder of a `capture-cost` artefact."""
    with opened(model) as loaded:
        records = Records(artifacts.open_artifact(observations))
        longest = max(records.replayable(), key=lambda entry: entry["tokens"])

        def make(folder: Path) -> dict[str, Any]:
            (observation,) = records.open([longest], loaded, purpose="replay")
            result = parity.capture_cost(
                loaded, observation.token_ids, steps=options.cost_steps, repeats=options.cost_repeats
            )
            artifacts.write_json(folder / RESULT, result)
            return {"content": artifacts.digest_json({"n": result["n"]})}

        built = artifacts.build(
            "capture-cost",
            inputs={"observations": records.artifact.content},
            params={
                "steps": options.cost_steps,
                "repeats": options.cost_repeats,
                "figures_version": 2,
                "runtime": models.runtime_identity(loaded.precision, loaded.residency),
            },
            make=make,
        )
    return built.path
