"""`python -m moelab.lab.peers OUT.json [name=value ...]`: the comparison at profile `reference`, into a file."""

from __future__ import annotations

import argparse
import sys

from .stage import PeersOptions, compare_peers, write


def main(arguments: list[str]) -> int:
    import yaml

    parser = argparse.ArgumentParser(description="Other runtimes on the same weights under one memory cap (30 min).")
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("pairs", nargs="*", metavar="name=value", help="other parameters of notebook 84")
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
