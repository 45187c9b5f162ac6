"""Run the arms against each other: same weights, same prompts, same cap, cold, in rotated rounds.

Every run is a process of its own in a fresh control group, with the page cache emptied before it. Round r uses
prompt r for every arm and starts with another arm, so that neither a slow minute nor a warm neighbour favours one.
An arm that fails stays in the table with the last lines of its error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from . import cold
from .arms import Request
from .cap import MemoryCap, Refusal, enforced, open_cap
from .worker import Answer

ERROR_LINES = 3
REFERENCE, OURS, RIVAL, VARIANT = ROLES = ("reference", "ours", "rival", "variant")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm of the comparison.

    Attributes:
        name: what the table calls it.
        kind: a key of `arms.ARMS`.
        weights: what it loads; `files` are what must be cold, default all files there.
        role: `reference` (no cap, gives the tokens), `ours` (judged), `rival` (must be slower), `variant` (shown).
        settings: for the arm's function.
        error: why it cannot run at all (not installed, not convertible); then nothing is started.
    """

    name: str
    kind: str
    weights: Path
    role: str
    settings: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def files(self) -> list[Path]:
        return [self.weights] if self.weights.is_file() else sorted(p for p in self.weights.rglob("*") if p.is_file())


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One arm in one round. Without an answer there is an error."""

    arm: str
    role: str
    round: int
    answer: Answer | None = None
    error: str = ""
    capped: bool = False
    cached_before: float | None = None
    """Share of its weight files in the page cache just before the start."""
    group_peak: int | None = None
    """Most bytes charged to its control group, page cache included."""
    device_total: int | None = None
    """Device bytes from start to last token."""


def compare(
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    cap_bytes: int,
    threads: int = 1,
    timeout_s: float = 600.0,
    everything: bool = False,
    groups: Path | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Run], Refusal | None]:
    """All runs, one round a prompt, and the reason if the cap could not be enforced (then arms run without it).

    Args:
        tokens: decoded tokens a run; one more is generated, since decode is timed from the first.
        everything: empty the whole machine's page cache before a run, not only that of the arm's files.
    """
    where = {} if groups is None else {"groups": groups}
    refusal = enforced(**where)
    runs: list[Run] = []
    for number, prompt in enumerate(prompts):
        turn = number % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            capped = arm.role != REFERENCE and refusal is None
            cap = open_cap(cap_bytes, **where) if capped else None
            if isinstance(cap, Refusal):
                refusal, cap = cap, None
            on_progress(f"round {number + 1} of {len(prompts)}: {arm.name}")
            cold.drop(arm.files if not arm.error else [], everything=everything)
            with cap or nullcontext():
                runs.append(run_arm(arm, number, list(prompt), tokens + 1, cap, threads=threads, timeout_s=timeout_s))
    return runs, refusal


def run_arm(
    arm: Arm, number: int, prompt: list[int], tokens: int, cap: MemoryCap | None, *, threads: int, timeout_s: float
) -> Run:
    """One run in a fresh process, inside the cap if there is one; what is in memory before it is noted."""
    about = {"arm": arm.name, "role": arm.role, "round": number, "capped": cap is not None}
    if arm.error:
        return Run(**about, error=arm.error)
    about["cached_before"] = cold.cached_share(arm.files)
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        request = Request(
            arm=arm.kind,
            weights=str(arm.weights),
            prompt=prompt,
            tokens=tokens,
            threads=threads,
            settings=arm.settings,
            result=str(answered),
        )
        asked.write_bytes(msgspec.json.encode(request))
        argv = [sys.executable, "-m", f"{__package__}.worker", str(asked)]
        error = _execute(argv if cap is None else cap.command(argv), threads, timeout_s)
        if cap is not None:
            about["group_peak"] = cap.peak_bytes
            if error and cap.kills:
                error = f"ended by the kernel: it wanted more than the cap of {cap.limit_bytes / 1e6:.0f} MB"
        if error:
            return Run(**about, error=error)
        answer = msgspec.json.decode(answered.read_bytes(), type=Answer)
    return Run(**about, answer=answer, device_total=answer.device[-1])


def _execute(argv: Sequence[str], threads: int, timeout_s: float) -> str:
    """Run to the end; the last lines of its error, or an empty text."""
    share = str(threads)
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(variables, share), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no end within {timeout_s:.0f} s"
    if done.returncode == 0:
        return ""
    return last_lines(done.stderr) or f"exit status {done.returncode}, and no word"


def last_lines(text: str, count: int = ERROR_LINES) -> str:
    """The last lines of an error, with folders cut from its paths: a table travels to other machines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+", "", "\n".join(lines[-count:]))
