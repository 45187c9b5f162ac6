"""The comparison with other runtimes, at profile `reference`, into a file.

    python -m moelab.lab.peers OUT.json                     half an hour; `make peers` installs the runtimes first
    python -m moelab.lab.peers OUT.json tokens=32           another parameter of notebook 84

Each arm is a process of its own under one memory cap, a control group's: that takes Linux and root. Sizes are in the
units of the parameters' names (mb: 10^6 bytes), times in seconds.
"""

from __future__ import annotations

import sys

from ...commands import Parser
from .stage import PeersOptions, compare_peers, write


def main(arguments: list[str]) -> int:
    import yaml

    parser = Parser(prog="python -m moelab.lab.peers", description=__doc__)
    parser.add_argument("out", metavar="OUT", help="JSON file to write")
    parser.add_argument("pairs", nargs="*", metavar="name=value", help="other parameters of notebook 84, in YAML")
    given = parser.parse_args(arguments)
    out, overrides = given.out, {}
    for name, _, value in (pair.partition("=") for pair in given.pairs):
        overrides[name] = yaml.safe_load(value)
    comparison = compare_peers(PeersOptions.from_profile("reference", **overrides), on_progress=print)
    write(out, comparison)
    for row in comparison.outcome.rows:
        print(row)
    print(comparison.outcome.status, *comparison.outcome.reasons, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
