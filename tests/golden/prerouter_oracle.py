"""Golden vectors of prerouter heads: the formula written out in plain Python floats. Run as a script, it writes them.

Weights are multiples of 1/64 below 1, which float16 carries exactly, so a file, mlx and torch all start from the very
same numbers.
"""

import json
import math
import random
from pathlib import Path

FILE = Path(__file__).parent / "prerouter" / "heads.json"
CASES = [
    # width H, experts E, head width D or rank R, K, has a previous token
    ("full", 6, 8, 5, 2, True),
    ("full", 6, 8, 5, 2, False),
    ("full", 3, 5, 4, 4, True),
    ("shared", 6, 8, 4, 2, True),
    ("shared", 6, 8, 4, 2, False),
]


def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def product(matrix, vector):
    return [math.fsum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def logits(form, weights, features):
    if form == "full":
        bent = [gelu(v) for v in product(weights["fc1"], features)]
        straight = product(weights["linear_init"], features)
    else:
        low = product(weights["trunk"], features)
        bent = [gelu(s * v) for s, v in zip(weights["scale"], low, strict=True)]
        straight = [0.0] * len(weights["fc2"])
    return [a + b for a, b in zip(straight, product(weights["fc2"], bent), strict=True)]


def case(rng, form, H, E, D, K, has_previous):
    def matrix(rows, columns):
        return [[rng.randrange(-63, 64) / 64 for _ in range(columns)] for _ in range(rows)]

    F = H + 2 * E
    if form == "full":
        weights = {"fc1": matrix(D, F), "fc2": matrix(E, D), "linear_init": matrix(E, F)}
    else:
        weights = {"trunk": matrix(D, F), "scale": matrix(1, D)[0], "fc2": matrix(E, D)}
    rows = []
    for _ in range(4):
        hidden = [rng.randrange(-255, 256) / 128 for _ in range(H)]
        current, previous = rng.sample(range(E), K), rng.sample(range(E), K) if has_previous else None
        hot = [[float(e in (ids or ())) for e in range(E)] for ids in (current, previous)]
        expected = logits(form, weights, hidden + hot[0] + hot[1])
        rows.append({"hidden": hidden, "current": current, "previous": previous, "logits": expected})
    shape = {"width": H, "experts": E, "hidden": D, "top_k": K}
    return {"form": form, **shape, "weights": weights, "rows": rows}


def main():
    rng = random.Random(0)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps([case(rng, *c) for c in CASES], indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
