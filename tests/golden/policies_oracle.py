"""The routing policies again, slow and obvious: plain Python, one token at a time.

Run as a script, it writes the vectors in `policies/`, which the package must reproduce exactly.
"""

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "policies"


def ranking(bank, candidates):
    """The candidates by descending score, equal scores by lowest index."""
    return sorted(candidates, key=lambda candidate: (-bank[candidate], candidate))


def anchored_top1(scores):
    best = 0
    for candidate, score in enumerate(scores, start=1):
        if score > 0 and (best == 0 or score > scores[best - 1]):
            best = candidate
    return [best]


def anchor_veto_top2(scores):
    bank = [0.0, *scores]
    first_two = ranking(bank, range(len(bank)))[:2]
    if len(first_two) == 2 and 0 not in first_two:
        return first_two
    return [0, 0]


def adaptive_top1_top2(scores, mixture_threshold):
    bank = [0.0, *scores]
    ranked = ranking(bank, range(1, len(bank)))
    if not ranked or bank[ranked[0]] <= 0:
        return [0, 0]
    if len(ranked) > 1 and bank[ranked[1]] > mixture_threshold:
        return ranked[:2]
    return [ranked[0], 0]


def dynamic_k(scores, k_max, threshold):
    if k_max > len(scores):
        raise ValueError("k_max")
    bank = [0.0, *scores]
    kept = []
    for candidate in ranking(bank, range(1, len(bank))):
        if len(kept) == k_max or bank[candidate] <= 0 or bank[candidate] <= threshold:
            break
        kept.append(candidate)
    return kept + [0] * (k_max - len(kept))


def compatibility_top2(scores, pairs):
    best, best_value = [0, 0], 0.0
    for first, second in pairs:
        if scores[first] > 0 and scores[second] > 0 and scores[first] + scores[second] > best_value:
            best_value = scores[first] + scores[second]
            best = [second + 1, first + 1] if scores[second] > scores[first] else [first + 1, second + 1]
    return best


def hierarchical(scores, package_sizes, package_evidence, local, package_scores=None):
    ends = list(itertools.accumulate(package_sizes))
    packages = [scores[end - size : end] for size, end in zip(package_sizes, ends, strict=True)]
    if package_evidence == "max":
        package_scores = [max(package) for package in packages]
    elif package_evidence == "logsumexp":
        package_scores = [logsumexp(package) for package in packages]
    [winner] = anchored_top1(package_scores)
    if not winner:
        return [0] * slots_of(local)
    name, params = local
    inside = packages[winner - 1]
    padded = inside + [-1.0] * (len(scores) - len(inside))
    offset = ends[winner - 1] - package_sizes[winner - 1]
    return [candidate + offset if candidate else 0 for candidate in SELECTIONS[name](padded, **params)]


def logsumexp(scores):
    top = max(scores)
    return top + math.log(math.fsum(math.exp(score - top) for score in scores))


def slots_of(local):
    return local[1].get("k_max", 2)


SELECTIONS = {
    "anchored_top1": anchored_top1,
    "anchor_veto_top2": anchor_veto_top2,
    "adaptive_top1_top2": adaptive_top1_top2,
    "dynamic_k": dynamic_k,
    "compatibility_top2": compatibility_top2,
    "hierarchical": hierarchical,
}


def survivors(candidates, available):
    """What a token keeps: its available specialists in order, then padding."""
    kept = [candidate for candidate in candidates if candidate and available[candidate - 1]]
    return kept + [0] * (len(candidates) - len(kept))


def to_float32(values):
    return [float(np.float32(value)) for value in values]


def softmax(scores):
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return to_float32(power / math.fsum(powers) for power in powers)


def positive_evidence(scores):
    shares = [score / max(scores) for score in scores]
    return to_float32(share / math.fsum(shares) for share in shares)


HEAD = {"weight": [[0.5, -1.0], [0.25, 0.0], [-2.0, 1.5]], "bias": [0.0, 0.125, -0.5]}


def learned_mixture(scores, features):
    """Softmax of a frozen affine head on a token's features, a rank a score. Quarters, so that sums are exact."""
    rows = zip(HEAD["weight"][: len(scores)], HEAD["bias"], strict=False)
    return softmax([sum(w * x for w, x in zip(row, features, strict=True)) + bias for row, bias in rows])


WEIGHTINGS = {
    "score_softmax": softmax,
    "positive_evidence": positive_evidence,
    "equal": lambda scores: to_float32([1 / len(scores)] * len(scores)),
    "unit_weights": lambda scores: [1.0] * len(scores),
}


def mix(outputs, weights):
    """Sum of weighted outputs in slot order, every step rounded to float32."""
    total = [np.float32(value) * np.float32(weights[0]) for value in outputs[0]]
    for output, weight in zip(outputs[1:], weights[1:], strict=True):
        total = [have + np.float32(value) * np.float32(weight) for have, value in zip(total, output, strict=True)]
    return [float(value) for value in total]


def correct(anchor, outputs, weights, expert_outputs):
    """The anchor's output plus weighted corrections in slot order, every step rounded to float32."""
    total = [np.float32(value) for value in anchor]
    for output, weight in zip(outputs, weights, strict=True):
        for place, value in enumerate(output):
            delta = np.float32(value) - (np.float32(0) if expert_outputs == "delta" else np.float32(anchor[place]))
            total[place] = total[place] + np.float32(weight) * delta
    return [float(value) for value in total]


def specialist(number, x):
    """Specialist `number` (from 0) of the vectors: affine, every step rounded to float32."""
    return [float(np.float32(value) * np.float32((number + 3) / 4) + np.float32(number - 0.5)) for value in x]


def run_token(x, candidates, scores):
    """Output and weights of one token whose anchor is the identity, mixing by score softmax."""
    active = [candidate for candidate in candidates if candidate]
    padding = [0.0] * (len(candidates) - len(active))
    if not active:
        return list(x), padding
    outputs = [specialist(candidate - 1, x) for candidate in active]
    if len(active) == 1:
        return outputs[0], [1.0, *padding]
    weights = softmax([scores[candidate - 1] for candidate in active])
    return mix(outputs, weights), weights + padding


def run_case(policy, params, scores, availability, hidden, package_scores):
    """Everything that the package should give for a batch of tokens."""
    keys = ("selected_indices", "selected_scores", "route_arity", "effective_indices", "effective_scores")
    keys += ("effective_arity", "mixture_weights", "output")
    expected = {key: [] for key in keys}
    for b, sequence in enumerate(scores):
        for key in keys:
            expected[key].append([])
        for t, token in enumerate(sequence):
            extra = {} if package_scores is None else {"package_scores": package_scores[b][t]}
            chosen = SELECTIONS[policy](token, **params, **extra)
            if availability is None:
                available = [True] * len(token)
            else:
                available = availability[b][t] if availability and isinstance(availability[0], list) else availability
            effective = survivors(chosen, available)
            output, weights = run_token(hidden[b][t], effective, token)
            bank = [0.0, *token]
            row = {
                "selected_indices": chosen,
                "selected_scores": [bank[candidate] for candidate in chosen],
                "route_arity": sum(candidate > 0 for candidate in chosen),
                "effective_indices": effective,
                "effective_scores": [bank[candidate] for candidate in effective],
                "effective_arity": sum(candidate > 0 for candidate in effective),
                "mixture_weights": weights,
                "output": output,
            }
            for key, value in row.items():
                expected[key][-1].append(value)
    return expected


def score_sets():
    """Named scores `[B][T][N]`; eighths, so that ties are frequent, and a few awkward numbers."""
    draw = random.Random(11)
    awkward = to_float32([0.1, 1e-30, -1e-30, 3.3333333, -0.0, 1e-7, 5.0000005])
    yield "no specialists", [[[], []]]
    yield "one specialist", [[[0.0], [-0.0], awkward[5:6], [-2.0], [0.75]]]
    yield "two, ties at zero", [[[0.0, 0.0], [0.0, -1.0], [-1.0, 0.0], [0.0, 0.5], [0.5, 0.0]]]
    yield "two, positive ties", [[[0.5, 0.5], [2.0, 2.0]], [[1.0, 0.25], [0.25, 1.0]]]
    yield "two, all negative", [[[-1.0, -2.0], [-0.125, -0.125]]]
    yield "five, ties at zero", [[[0.0] * 5, [0.0, 0.0, 0.25, 0.0, 0.0], [0.0, 0.5, 0.0, 0.5, -0.0]]]
    yield "five, positive ties", [[[1.0] * 5, [0.5, 0.75, 0.75, 0.5, 0.75], [0.25, 0.25, 0.5, 0.5, -1.0]]]
    yield "five, all negative", [[[-1.0] * 5, [-1.0, -0.5, -0.5, -3.0, -0.25]]]
    yield "five, eighths", [[[draw.randrange(-6, 9) / 8 for _ in range(5)] for _ in range(6)] for _ in range(2)]
    yield "five, awkward", [[[draw.choice(awkward) for _ in range(5)] for _ in range(8)]]
    yield "many, quarters", [[[draw.randrange(-8, 7) / 4 for _ in range(19)] for _ in range(2)]]


def availabilities(scores):
    """None (all), none, one, and a different set for every token."""
    draw = random.Random(7)
    experts = len(scores[0][0])
    yield "all", None
    yield "none", [False] * experts
    if experts:
        yield "one", [expert == experts // 2 for expert in range(experts)]
        yield "per token", [[[draw.random() < 0.6 for _ in token] for token in part] for part in scores]


def parameter_sets(policy, experts):
    draw = random.Random(3)
    if policy == "adaptive_top1_top2":
        return [{"mixture_threshold": value} for value in (0.0, 0.5, math.inf)]
    if policy == "dynamic_k":
        return [{"k_max": k, "threshold": threshold} for k, threshold in ((1, 0.0), (2, 0.25), (3, 0.0), (5, 0.5))]
    if policy == "compatibility_top2":
        every = list(itertools.combinations(range(experts), 2))
        return [{"pairs": pairs} for pairs in (every, every[::2], draw.sample(every, len(every) // 3))]
    if policy == "hierarchical":
        sizes = {0: [[]], 1: [[1]], 2: [[2], [1, 1]], 5: [[2, 3], [1, 3, 1]], 19: [[7, 1, 11]]}[experts]
        local = [("anchor_veto_top2", {}), ("adaptive_top1_top2", {"mixture_threshold": 0.25})]
        local += [("dynamic_k", {"k_max": 3, "threshold": 0.0})] if experts >= 3 else []
        turns = itertools.cycle(local)
        return [
            {"package_sizes": size, "package_evidence": evidence, "local": next(turns)}
            for evidence in ("given", "max", "logsumexp")
            for size in sizes
        ]
    return [{}]


def cases(policy):
    draw = random.Random(5)
    for name, scores in score_sets():
        hidden = [[[draw.randrange(-8, 9) / 4, float(np.float32(draw.gauss(0, 1)))] for _ in part] for part in scores]
        for params in parameter_sets(policy, len(scores[0][0])):
            if "pairs" in params:
                params = {"pairs": sorted(params["pairs"])}
            packages = None
            if params.get("package_evidence") == "given":
                packages = [
                    [[draw.randrange(-2, 4) / 2 for _ in params["package_sizes"]] for _ in part] for part in scores
                ]
            for available, availability in availabilities(scores):
                case = {"name": f"{name}, {available} available", "params": params, "scores": scores}
                case |= {"availability": availability, "hidden": hidden, "package_scores": packages}
                try:
                    case["expected"] = run_case(policy, params, scores, availability, hidden, packages)
                except ValueError as error:
                    case["refused"] = str(error)
                yield case


def combination_cases():
    draw = random.Random(9)
    for tokens, slots in ((0, 2), (1, 1), (3, 2), (4, 3), (2, 6)):
        scores = [[draw.choice((0.25, 0.5, 0.5, 3.0, 1e-7, 40.0)) for _ in range(slots)] for _ in range(tokens)]
        scores = [to_float32(sorted(row, reverse=True)) for row in scores]
        outputs = [[to_float32(draw.gauss(0, 1) for _ in range(3)) for _ in range(slots)] for _ in range(tokens)]
        anchor = [to_float32(draw.gauss(0, 1) for _ in range(3)) for _ in range(tokens)]
        features = [[draw.randrange(-8, 9) / 4 for _ in range(2)] for _ in range(tokens)]
        for name, weigh in {**WEIGHTINGS, "learned_mixture": None}.items():
            if weigh is None and slots > len(HEAD["bias"]):
                continue
            rows = zip(scores, features, strict=True)
            weights = [weigh(row) if weigh else learned_mixture(row, x) for row, x in rows]
            expected = {"weights": weights, "output": [mix(y, w) for y, w in zip(outputs, weights, strict=True)]}
            for kind in ("complete", "delta"):
                rows = zip(anchor, outputs, weights, strict=True)
                expected[f"always_on_{kind}"] = [correct(a, y, w, kind) for a, y, w in rows]
            case = {"combination": name, "slots": slots, "scores": scores, "outputs": outputs, "anchor": anchor}
            yield case | {"features": None if weigh else features, "expected": expected}


def documents():
    """File name to text, for every file of vectors."""
    vectors = {policy: list(cases(policy)) for policy in SELECTIONS}
    vectors["combination"] = list(combination_cases())
    # One case a line; infinity is written as a string, since JSON has none.
    return {
        f"{name}.json": "[\n" + ",\n".join(json.dumps(case).replace("Infinity", '"inf"') for case in values) + "\n]\n"
        for name, values in vectors.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in documents().items():
        (FOLDER / file).write_text(text)
