"""`moelab run | gates | report | doctor | pack | forget`: the verbs. What they take, and exit codes: `commands`."""

from __future__ import annotations

import sys
from pathlib import Path

from .commands import DONE, FAILED, NOT_ACCEPTED, REFUSED, verbs
from .errors import MissingArtifactError, MoelabError, ParameterError


def main(arguments: list[str] | None = None) -> int:
    options = verbs().parse_args(arguments)
    try:
        return ACTS[options.verb](options)
    except MoelabError as error:
        print(f"moelab {options.verb}: {type(error).__name__}: {error}", file=sys.stderr)
        return NOT_ACCEPTED
    except KeyboardInterrupt:
        return 130


def _run(options) -> int:
    from .lab.run import run

    record = run(
        options.profile, options.models, options.threads, options.only,
        seed=options.seed, workers=options.workers, name=options.name,
    )  # fmt: skip
    return FAILED if record.failures() else DONE


def _folder(named: str | None) -> Path:
    from . import artifacts
    from .lab import record

    return Path(named) if named else record.latest(artifacts.root() / "reports")


def _gates(options) -> int:
    import json

    from .flywheel.gates import FAIL, GATES, PASS
    from .lab import record

    if options.schema:
        print(json.dumps(record.json_schema(), indent=1))
        return DONE
    try:
        required = [int(item) for item in options.require]
    except ValueError:
        verbs().error(f"--require takes gate numbers, not {','.join(options.require)}")
    if unknown := set(required) - set(GATES):
        verbs().error(f"no gate {min(unknown)}; there are {min(GATES)} to {max(GATES)}")
    try:
        found = record.read(_folder(options.run))
    except MissingArtifactError as error:  # no run at all is missing evidence
        print(f"moelab gates: {error}", file=sys.stderr)
        return REFUSED
    status, rows = record.decide(found.verdicts, required)
    reasons = {(row.gate, row.model): row.reason for row in record.every_gate(found.verdicts)}
    for gate, model, word in rows:
        why = reasons.get((gate, model), record.NO_VERDICT)
        print(f"gate {gate} {GATES[gate]:<22} {model:<12} {word:<8} {why}".rstrip())
    print(f"{found.run}, {found.finished}: {status}")
    return {PASS: DONE, FAIL: FAILED}.get(status, REFUSED)


def _report(options) -> int:
    from .lab import record, render

    folder = _folder(options.run)
    found = record.read(folder)
    for entry in found.notebooks:
        executed = folder / f"{entry.name[:2]}.ipynb"
        if executed.is_file():
            failure = f"{entry.cell}: {entry.error}" if entry.error else ""
            render.render(executed, executed.with_suffix(".html"), failure=failure)
    render.index(folder, found)
    print(folder / "index.html")
    return DONE


def _doctor(options) -> int:
    from .lab import doctor, trace

    if not options.routes:
        for name in ("expert_bytes", "compute_ms", "cache"):
            if (value := getattr(options, name)) is not None:
                raise ParameterError(
                    "only a trace is judged by this", field="--" + name.replace("_", "-"), got=value,
                    expected="with --routes FILE",
                )  # fmt: skip
        return doctor.machine(options.model or "softmax")
    if options.model is not None:
        raise ParameterError(
            "a trace is judged without a model", field="--model", got=options.model, expected="without --routes"
        )
    return trace.doctor(
        options.routes, expert_bytes=options.expert_bytes, compute_ms=options.compute_ms, cache=options.cache
    )


def _pack(options) -> int:
    from contextlib import ExitStack
    from functools import cache

    from tqdm import tqdm

    from .models import without_torch

    if "transformers" not in sys.modules:  # nothing here needs torch, and in a small container its 190 MB may decide
        without_torch()
    from .streaming import write_pack

    with ExitStack() as open_bars:

        @cache  # one bar, and none before there is work
        def bar(total: int) -> tqdm:
            title = f"pack {Path(options.model).name}"
            return open_bars.enter_context(tqdm(total=total, desc=title, unit="B", unit_scale=True, smoothing=0.1))

        def progress(done: int, total: int) -> None:
            bar(total).update(done - bar(total).n)

        pack = write_pack(options.model, options.out, precision=options.precision, progress=progress)
    records = sum(len(layer.checksums) * layer.record_bytes for layer in pack.layers)
    print(f"{options.out}: {len(pack.layers)} layers of {pack.experts} experts, {records / 1e6:.1f} MB of records")
    return DONE


def _forget(options) -> int:
    from . import artifacts
    from .flywheel.forget import forget
    from .flywheel.vault import Vault

    uid = _uid(options.thread, options.threads)
    reports = [page.parent for page in (artifacts.root() / "reports").glob("*/verdicts.json")]
    showing = [folder for folder in reports if _names(folder, uid, options.thread)]
    proof = forget(Vault(), uid, root=artifacts.artifacts_dir(), also=showing)
    print(f"key destroyed: {proof.key or 'there was none'}")
    for name, failure in proof.attempts.items():
        print(f"{name}: does not open ({failure})")
    for title, names in (("amended", proof.amended), ("removed", proof.removed), ("still named in", proof.mentions)):
        for name in names:
            print(f"{title}: {name}")
    return DONE if proof.holds else FAILED


def _uid(thread: str, threads: str | None) -> str:
    """The uid of a thread given by uid or by id; an id that several threads carry is refused."""
    from . import artifacts
    from .errors import ContractError
    from .flywheel.vault import Vault
    from .threads import read

    found = {
        item.uid
        for item in read(threads or artifacts.root() / "artifacts" / "threads")
        if thread in (item.id, item.uid)
    }
    if len(found) > 1:
        raise ContractError("thread id is not unique", field="thread", got=thread, expected=f"one of {sorted(found)}")
    if found:
        return found.pop()
    # A thread that is in no file any more can still have a key, a tombstone or records, under its whole uid.
    vault = Vault()
    known = {path.stem for path in vault.keys.glob("*.key")} | set(vault.forgotten())
    known |= {path.name.split(".")[0] for path in artifacts.artifacts_dir().rglob("*.age")}
    if thread not in known:
        raise ContractError(
            "no such thread",
            field="thread",
            got=thread,
            expected="an id of the threads file, or the uid of a captured thread",
        )
    return thread


def _names(folder: Path, *names: str) -> bool:
    """Whether a file of the folder names the thread, by uid or by id, as a whole word."""
    import re

    whole = re.compile(rb"(?<![\w-])(" + b"|".join(re.escape(name.encode()) for name in names) + rb")(?![\w-])")
    return any(whole.search(file.read_bytes()) for file in folder.iterdir() if file.is_file())


ACTS = {"run": _run, "gates": _gates, "report": _report, "doctor": _doctor, "pack": _pack, "forget": _forget}

if __name__ == "__main__":
    sys.exit(main())
