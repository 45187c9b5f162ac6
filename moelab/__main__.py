"""`moelab run | gates | report | doctor | pack | forget`: the verbs.

Exit codes. 0: done, or every gate asked for passes. 1: a notebook failed, a gate fails, the self-test is
wrong. 2: a gate is refused, that is, its evidence is missing. 3: the request itself was refused (unknown
parameter, no such file, a broken record); the message names file, field, got and expected.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .errors import MissingArtifactError, MoelabError, ParameterError

DONE, FAILED, REFUSED, NOT_ACCEPTED = 0, 1, 2, 3


class Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs):
        super().__init__(**kwargs, allow_abbrev=False)  # a misspelt option is refused, not guessed

    def error(self, message):
        """argparse exits 2 by itself, which would read as a refused gate."""
        self.print_usage(sys.stderr)
        self.exit(NOT_ACCEPTED, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="moelab", description="Is expert routing predictable enough that reading experts early pays?")
    verbs = top.add_subparsers(dest="verb", required=True)

    run = verbs.add_parser("run", help="run the notebooks and write a report")
    run.add_argument("--profile", default="tiny", help="tiny or reference (default: tiny)")
    run.add_argument(
        "--model", action="append", dest="models", metavar="MODEL",
        help="name under artifacts/models, path, or repo id; repeat for several",
    )  # fmt: skip
    run.add_argument("--threads", metavar="FILE", help="threads file or folder to use instead of the committed ones")
    run.add_argument("--only", type=_items, metavar="NN,NN", help="only these notebooks")
    run.add_argument("--seed", type=int, help="seed of everything random")
    run.add_argument("--workers", type=int, help="notebooks at a time (default: 2, or 1 on one core)")
    run.add_argument("--name", help="name of the report folder (default: the profile)")
    run.set_defaults(act=_run)

    gates = verbs.add_parser("gates", help="the verdicts of a run; exits 1 on fail, 2 on refused")
    gates.add_argument("--require", type=_items, default=[], metavar="N,N", help="gates that must have passed")
    gates.add_argument("--run", metavar="DIR", help="report folder (default: the latest)")
    gates.add_argument("--schema", action="store_true", help="print the JSON Schema of verdicts.json")
    gates.set_defaults(act=_gates)

    report = verbs.add_parser("report", help="render a run's pages again from its executed notebooks")
    report.add_argument("--run", metavar="DIR", help="report folder (default: the latest)")
    report.set_defaults(act=_report)

    doctor = verbs.add_parser("doctor", help="this machine: speeds, self-test, disk; or Gate 0 on a trace of yours")
    doctor.add_argument("--routes", metavar="FILE", help="a recorded trace: is there anything to win on it?")
    doctor.add_argument("--model", help="model to measure with (default: softmax)")
    doctor.add_argument("--expert-bytes", type=int, metavar="N", help="bytes of one expert, where the trace has none")
    doctor.add_argument("--compute-ms", type=float, metavar="MS", help="compute time of a decoded token without reads")
    doctor.add_argument("--cache", type=float, metavar="SHARE", help="share of all expert bytes that fits in memory")
    doctor.set_defaults(act=_doctor)

    pack = verbs.add_parser(
        "pack",
        help="convert a model to the form that streaming reads fastest",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Convert a mixture-of-experts checkpoint to a pack: one contiguous, page-aligned, checksummed\n"
            "record for each expert, so that an expert is one direct read of the disk. Takes whatever mlx-lm\n"
            "can load, in bounded memory. The pack appears at OUT when it is complete; until then it grows in\n"
            "OUT.partial, and after a crash, a kill or a full disk the same command goes on where it stopped."
        ),
        epilog=(
            "Precision. 'stored' keeps the model's own bytes: smallest, but what is stored in half precision is\n"
            "converted at each read by a run in float32. A pack in the precision of the run is read straight into\n"
            "place. Quantised weights stay as they are; their scales and biases follow the precision.\n\n"
            "example: moelab pack softmax packs/softmax --precision float32"
        ),
    )
    pack.add_argument("model", help="name under artifacts/models, checkpoint folder, or repo id")
    pack.add_argument("out", metavar="OUT", help="folder to make; must not exist")
    pack.add_argument(
        "--precision", default="stored", choices=("stored", "float32", "float16", "bfloat16"),
        help="what floating tensors are cast to (default: stored, that is, not at all)",
    )  # fmt: skip
    pack.set_defaults(act=_pack)

    forget = verbs.add_parser("forget", help="destroy a thread's key and every row derived from it")
    forget.add_argument("thread", help="thread id as in the threads file, or its uid")
    forget.add_argument(
        "--threads", metavar="FILE", help="threads file or folder it is in (default: the committed ones)"
    )
    forget.set_defaults(act=_forget)
    return top


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return options.act(options)
    except MoelabError as error:
        print(f"moelab {options.verb}: {type(error).__name__}: {error}", file=sys.stderr)
        return NOT_ACCEPTED
    except KeyboardInterrupt:
        return 130


def _items(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise argparse.ArgumentTypeError(f"empty item in {text!r}")
    return items


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
        parser().error(f"--require takes gate numbers, not {','.join(options.require)}")
    if unknown := set(required) - set(GATES):
        parser().error(f"no gate {min(unknown)}; there are {min(GATES)} to {max(GATES)}")
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


if __name__ == "__main__":
    sys.exit(main())
