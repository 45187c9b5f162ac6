"""What the command line says: every command tells what it does, with an example, units and exit codes.

`Parser` is that of every command, `python -m moelab.…` included (those show the text of their module). `verbs` has
those of `moelab`; what they do is in `__main__`.
"""

from __future__ import annotations

import argparse
import sys

DONE, FAILED, REFUSED, NOT_ACCEPTED = 0, 1, 2, 3
CODES = """\
exit codes: 0 done, or every gate asked for passes; 1 a notebook failed, a gate fails, the self-test
is wrong; 2 a gate is refused, that is, its evidence is missing; 3 the request was not accepted."""


class Parser(argparse.ArgumentParser):
    """Shows its texts line by line as they are written, and takes options in full only: a misspelt one is refused."""

    def __init__(self, **kwargs):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **kwargs})

    def error(self, message):
        """argparse exits 2 by itself, which would read as a refused gate."""
        self.print_usage(sys.stderr)
        self.exit(NOT_ACCEPTED, f"{self.prog}: {message}\n")


def verbs() -> Parser:
    """The parser of `moelab`."""
    top = Parser(
        prog="moelab",
        description="Is expert routing predictable enough that reading experts early pays?",
        epilog=f"""\
examples: moelab doctor                       is this machine ready, and how fast is it?
          moelab doctor --routes trace.csv    is there anything to win on this traffic? (no model needed)
          moelab run                          the whole question on the embedded models, at the small profile
          moelab gates --require 0,1,2,3      what came of it, as an exit code

moelab VERB --help says what a verb does and takes.
{CODES}""",
    )
    adding = top.add_subparsers(dest="verb", required=True)

    def add(name: str, help: str, text: str, example: str) -> Parser:
        return adding.add_parser(name, help=help, description=text, epilog=f"{example}\n\n{CODES}")

    run = add(
        "run",
        "run the notebooks and write a report",
        """\
Run the notebooks, in the order they need, and write reports/NAME/: a page of each, index.html with
every gate, and verdicts.json. All parameters are checked before the first notebook starts. One that
ran with the same inputs is not run again, so an interrupted run goes on where it was.""",
        """\
examples: moelab run --profile reference
          moelab run --profile reference --model owner/name@8GiB --threads mine.jsonl --name mine
          moelab run --only 10,83""",
    )
    run.add_argument(
        "--profile", default="tiny", help="tiny or reference: how much of the threads is used (default: tiny)"
    )
    run.add_argument(
        "--model", action="append", dest="models", metavar="MODEL",
        help="name under artifacts/models, path, or repo id; with @8GiB behind, streamed in that memory;"
        " repeat for several",
    )  # fmt: skip
    run.add_argument("--threads", metavar="FILE", help="threads file or folder to use instead of the committed ones")
    run.add_argument("--only", type=_items, metavar="NN,NN", help="only these notebooks, by number")
    run.add_argument("--seed", type=int, help="seed of everything random (default: the profile's)")
    run.add_argument("--workers", type=int, help="notebooks at a time (default: 2, or 1 on one core)")
    run.add_argument("--name", help="name of the report folder in reports/ (default: the profile)")

    gates = add(
        "gates",
        "the verdicts of a run; exits 1 on fail, 2 on refused",
        """\
Print the verdicts of a run, one line a gate and model, and say the same as an exit code: for scripts
and CI. A required gate that a model has no verdict for is refused.""",
        "examples: moelab gates --require 0,1,2,3\n          moelab gates --run reports/mine",
    )
    gates.add_argument(
        "--require",
        type=_items,
        default=[],
        metavar="N,N",
        help="gates that must have passed (default: those of the run)",
    )
    gates.add_argument("--run", metavar="DIR", help="report folder (default: the latest)")
    gates.add_argument("--schema", action="store_true", help="print the JSON Schema of verdicts.json, and no verdict")

    report = add(
        "report",
        "render a run's pages again from its executed notebooks",
        """\
Write the pages of a run and its index.html again, from the executed notebooks in its folder. Nothing
is computed: of use after an edit of the templates, or for a folder that came without its pages.""",
        "example: moelab report --run reports/mine",
    )
    report.add_argument("--run", metavar="DIR", help="report folder (default: the latest)")

    doctor = add(
        "doctor",
        "this machine: speeds, self-test, disk; or Gate 0 on a trace of yours",
        """\
Without --routes: what this machine is, prefill and decode speed with each BLAS, answers that are
known, and the disk. With --routes: Gate 0 on a recorded trace (BigMoeOnEdge route_trace v1 CSV), which
needs no model: could perfect prefetch shorten a token enough to matter? What is not given is taken from
published systems, and the answer says so.""",
        """\
examples: moelab doctor
          moelab doctor --routes trace.csv
          moelab doctor --routes trace.csv --expert-bytes 2654208 --compute-ms 40 --cache 0.25""",
    )
    doctor.add_argument("--routes", metavar="FILE", help="a recorded trace: is there anything to win on it?")
    doctor.add_argument("--model", help="model to measure speeds with (default: softmax)")
    doctor.add_argument("--expert-bytes", type=int, metavar="N", help="bytes of one expert, where the trace has none")
    doctor.add_argument(
        "--compute-ms",
        type=float,
        metavar="MS",
        help="milliseconds that a decoded token computes, all experts resident",
    )
    doctor.add_argument("--cache", type=float, metavar="SHARE", help="share of all expert bytes in memory, 0 to 1")

    pack = add(
        "pack",
        "convert a model to the form that streaming reads fastest",
        """\
Convert a mixture-of-experts checkpoint to a pack: one contiguous, page-aligned, checksummed
record for each expert, so that an expert is one direct read of the disk. Takes whatever mlx-lm
can load, in bounded memory. The pack appears at OUT when it is complete; until then it grows in
OUT.partial, and after a crash, a kill or a full disk the same command goes on where it stopped.""",
        """\
Precision. 'stored' keeps the model's own bytes: smallest, but what is stored in half precision is
converted at each read by a run in float32. A pack in the precision of the run is read straight into
place. Quantised weights stay as they are; their scales and biases follow the precision.

example: moelab pack softmax packs/softmax --precision float32""",
    )
    pack.add_argument("model", help="name under artifacts/models, checkpoint folder, or repo id")
    pack.add_argument("out", metavar="OUT", help="folder to make; must not exist")
    pack.add_argument(
        "--precision", default="stored", choices=("stored", "float32", "float16", "bfloat16"),
        help="what floating tensors are cast to (default: stored, that is, not at all)",
    )  # fmt: skip

    forget = add(
        "forget",
        "destroy a thread's key and every row derived from it",
        """\
Destroy the key that a thread's records are encrypted with, and every row that was derived from them;
then try to open what is left, and print what was tried. There is no way back. Reports that still name
the thread are listed.""",
        "example: moelab forget o-001-t1",
    )
    forget.add_argument("thread", help="thread id as in the threads file, or its uid")
    forget.add_argument(
        "--threads", metavar="FILE", help="threads file or folder it is in (default: the committed ones)"
    )
    return top


def _items(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise argparse.ArgumentTypeError(f"empty item in {text!r}")
    return items
