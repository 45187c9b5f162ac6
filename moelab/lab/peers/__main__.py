"""`python -m moelab.lab.peers OUT.json [name=value ...]`: the comparison at profile `reference`, into a file."""

from __future__ import annotations

import sys

from .stage import PeersOptions, compare_peers, write


def main(arguments: list[str]) -> int:
    import yaml

    out, *pairs = arguments
    overrides = {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    comparison = compare_peers(PeersOptions.from_profile("reference", **overrides), on_progress=print)
    write(out, comparison)
    for row in comparison.outcome.rows:
        print(row)
    print(comparison.outcome.status, *comparison.outcome.reasons, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
