"""What it costs to route by prediction: loss and greedy agreement against the native model on the same text.

Validation owners' recorded texts are run again in lock step (`prerouter.lockstep`), natively and under every way of
using predictions; each difference is paired token by token, with standard errors by thread. Counted are decoded passes
whose next token was decoded too: a pass that ends an answer says nothing about the question that follows.

Does error compound? Three looks at that. With *depth*: predictions for the first layers alone, for one layer alone, and
how far the state has moved from the native one when it enters each layer. With *tokens*: the loss by the number of
decoded tokens before, beside an arm whose past is native, so that only the token in hand is routed by prediction; what
lies between the two is what the past has done. *On its own*: greedy answers from equal prompts, until they part from
the native model's, and the native model's own loss on what each of them wrote.

With K other than the model's own, every layer takes that K at every token, gate and prediction alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..errors import RecordError
from ..flywheel.estimates import clustered_mean, paired_difference
from ..prerouter.lockstep import Lockstep
from ..prerouter.steps import OWN, Arm, Steps

if TYPE_CHECKING:
    from ..models import LoadedModel
    from ..prerouter import HeadBank, Tier

__all__ = ["BINS", "Texts", "Heads", "by_depth", "by_mode", "by_position", "by_top_k", "on_its_own"]

BINS = (0, 4, 8, 16, 32, 64, 96)
"""Decoded tokens before, from which a bin begins."""
PAST = "replace, past native"


@dataclass(frozen=True, eq=False)
class Texts:
    """Recorded texts. tokens: `i32[n, T]`, 0 beyond a text's end. decoded: `bool[n, T]`. thread: `i64[n]` labels.

    counted: `bool[n, T]`, decoded passes whose next token is decoded too.
    """

    tokens: np.ndarray
    decoded: np.ndarray
    thread: np.ndarray

    @classmethod
    def of(cls, observed: Sequence[Any], *, most: int, context: int) -> Texts:
        """The first `most` texts in rounds over their owners, each up to `context` tokens; one without a decoded token,
        or that does not begin with a prompt, is none of them.

        Raises:
            RecordError: fewer than two threads are left: there is no standard error.
        """
        rounds: dict[str, int] = {}
        ranked = []
        for number, o in enumerate(observed):
            phase = o.phase[:context]
            if phase.any() and not phase[:2].any():
                rounds[o.header.owner] = rounds.get(o.header.owner, 0) + 1
                ranked.append((rounds[o.header.owner], number))
        kept = [observed[number] for _, number in sorted(ranked)[:most]]
        names = sorted({o.header.thread for o in kept})
        if len(names) < 2:
            raise RecordError("texts of two threads are needed", field="threads", got=len(names), expected=">= 2")
        length = max(min(len(o.token_ids), context) for o in kept)
        tokens, decoded = np.zeros((len(kept), length), np.int32), np.zeros((len(kept), length), bool)
        for row, o in enumerate(kept):
            count = min(len(o.token_ids), length)
            tokens[row, :count], decoded[row, :count] = o.token_ids[:count], o.phase[:count]
        return cls(tokens, decoded, np.array([names.index(o.header.thread) for o in kept]))

    @property
    def counted(self) -> np.ndarray:
        return self.decoded & np.concatenate([self.decoded[:, 1:], np.zeros_like(self.decoded[:, :1])], axis=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def some(self, count: int) -> Texts:
        """The first of them."""
        return Texts(self.tokens[:count], self.decoded[:count], self.thread[:count])


@dataclass(frozen=True, eq=False)
class Heads:
    """What a lock step needs of a head file."""

    bank: HeadBank
    tier: Tier
    calibration: Mapping[int, tuple[float, float]]

    def run(self, loaded: LoadedModel, arms: Sequence[Arm], texts: Texts, *, top_k: int | None = None) -> Steps:
        lockstep = Lockstep(loaded, self.bank, self.tier.wiring, arms, calibration=self.calibration, top_k=top_k)
        return lockstep.run(texts.tokens, texts.decoded)


def _arm(name: str, mode: str, **fields: Any) -> Arm:
    return Arm(name=name, mode=mode, **fields)


def by_mode(loaded: LoadedModel, heads: Heads, texts: Texts, thresholds: Sequence[float]) -> tuple[list[Arm], Steps]:
    """Every mode at the model's own K, and `replace` with a native past."""
    arms = [_arm("off", "off"), _arm("replace", "replace"), _arm(PAST, "replace", native_history=True)]
    arms.append(_arm("replace_true_weights", "replace_true_weights"))
    arms += [_arm(f"gated at {threshold:g}", "gated", threshold=threshold) for threshold in thresholds]
    return arms, heads.run(loaded, arms, texts)


def mode_rows(arms: Sequence[Arm], steps: Steps, texts: Texts, consumers: Sequence[int], top_k: int) -> list[dict]:
    """One row an arm: loss over the first arm's, greedy agreement, share of routes replaced, recall of predictions; and
    loss and greedy agreement less those of `replace`, the second arm."""
    mask, cluster, rows = texts.counted, _cluster(texts), []
    kept = steps.greedy[:, mask] == steps.greedy[0, mask]
    for number, arm in enumerate(arms):
        rows.append(
            {
                "arm": arm.name, "mode": arm.mode, "threshold": arm.threshold,
                **_figures(steps, number, texts, consumers, top_k, native=(steps.loss[0], steps.greedy[0])),
                "less_replace": paired_difference(steps.loss[number][mask], steps.loss[1][mask], cluster).plain(),
                "greedy_less_replace": paired_difference(kept[number], kept[1], cluster).plain(),
            }
        )  # fmt: skip
    return rows


def by_top_k(
    loaded: LoadedModel,
    heads: Heads,
    texts: Texts,
    counts: Sequence[int],
    own: tuple[Sequence[Arm], Steps],
    consumers: Sequence[int],
) -> list[dict[str, Any]]:
    """`off`, `replace` and `replace_true_weights` with other numbers of experts, against the native model with its own.

    `own`: what `by_mode` found on texts of which these are the first.
    """
    names = ("off", "replace", "replace_true_weights")
    arms, mask, rows = [_arm(name, name) for name in names], texts.counted, []
    native = own[1].loss[0, : len(texts)], own[1].greedy[0, : len(texts)]
    for top_k in sorted({*counts, loaded.family.top_k}):
        if top_k == loaded.family.top_k:
            place = [[arm.name for arm in own[0]].index(name) for name in names]
            steps = own[1].some(place, len(texts))
        else:
            steps = heads.run(loaded, arms, texts, top_k=top_k)
        for number, arm in enumerate(arms):
            figures = _figures(steps, number, texts, consumers, top_k, native=native)
            more = paired_difference(steps.loss[number][mask], steps.loss[0][mask], _cluster(texts))
            rows.append({"top_k": top_k, "arm": arm.name, **figures, "over_gate": more.plain()})
    return rows


def by_depth(loaded: LoadedModel, heads: Heads, texts: Texts, consumers: Sequence[int], top_k: int) -> dict[str, Any]:
    """`replace` for consumers up to a layer, and for one alone: `rows`; and `together`, what all of them cost less the
    sum of what each costs alone."""
    arms = [_arm("off", "off")]
    arms += [_arm(f"up to {c}", "replace", layers=tuple(consumers[: i + 1])) for i, c in enumerate(consumers)]
    arms += [_arm(f"only {c}", "replace", layers=(c,)) for c in consumers[1:]]
    steps = heads.run(loaded, arms, texts)
    rows = mode_rows(arms, steps, texts, consumers, top_k)[1:]
    first = {**rows[0], "arm": f"only {consumers[0]}"}
    rows.insert(len(consumers), first)
    for row in rows:
        kind, layer = row["arm"].rsplit(" ", 1)
        row["layers"] = "up to this layer" if kind == "up to" else "this layer alone"
        row["layer"] = loaded.geometry.layer_ids[int(layer)]
    loss = steps.loss[:, texts.counted] - steps.loss[0, texts.counted]
    alone = loss[1] + loss[len(consumers) + 1 :].sum(0)
    return {"rows": rows, "together": paired_difference(loss[len(consumers)], alone, _cluster(texts)).plain()}


def drifts(arms: Sequence[Arm], steps: Steps, texts: Texts) -> list[dict[str, Any]]:
    """Distance of each layer's input from the native one, as a share of its length: one row an arm and layer."""
    mask = texts.counted
    return [
        {
            "arm": arm.name,
            "layer": layer,
            "drift": clustered_mean(steps.drift[number][mask][:, layer], _cluster(texts)).plain(),
        }
        for number, arm in enumerate(arms)
        for layer in range(steps.drift.shape[-1])
    ]


def of_the_past(steps: Steps, texts: Texts) -> dict[str, Any]:
    """Loss of `replace` over that of the same with a native past, the second arm and the third."""
    mask = texts.counted
    return paired_difference(steps.loss[1][mask], steps.loss[2][mask], _cluster(texts)).plain()


def by_position(arms: Sequence[Arm], steps: Steps, texts: Texts) -> list[dict[str, Any]]:
    """By decoded tokens before: loss of an arm over the native one, and over that of a native past."""
    names = [arm.name for arm in arms]
    before = np.cumsum(texts.decoded, axis=1) - 1
    fresh, rows = names.index(PAST), []
    for low, high in zip(BINS, (*BINS[1:], 1 << 30), strict=True):
        mask = texts.counted & (before >= low) & (before < high)
        cluster = _cluster(texts, mask)
        if len(np.unique(cluster)) < 2:
            continue
        for name in ("replace", PAST, "replace_true_weights"):
            number = names.index(name)
            loss, native, near = (steps.loss[n][mask] for n in (number, 0, fresh))
            rows.append(
                {
                    "arm": name, "from": low, "to": min(high - 1, int(before[texts.counted].max())),
                    "loss": paired_difference(loss, native, cluster).plain(),
                    "past": paired_difference(loss, near, cluster).plain(),
                    "greedy": clustered_mean(steps.greedy[number][mask] == steps.greedy[0][mask], cluster).plain(),
                }
            )  # fmt: skip
    return rows


def on_its_own(
    loaded: LoadedModel, heads: Heads, texts: Texts, *, prompt: int, tokens: int, threshold: float
) -> dict[str, Any]:
    """Greedy answers to the first `prompt` tokens of every text. Their first token is the prompt's, and equal in all
    modes; the `tokens` that follow are chosen by the mode.

    Returns:
        `rows`, one an arm: where it parts from the native answer, and the native model's loss and agreement on what it
        wrote. `apart`, one an arm and position: share of answers that are still the native one. `position`, one an
        arm and bin of positions: the native model's loss and agreement there.
    """
    arms = [_arm("off", "off"), _arm("replace", "replace"), _arm("replace_true_weights", "replace_true_weights")]
    arms.append(_arm(f"gated at {threshold:g}", "gated", threshold=threshold))
    asked = np.full((len(texts), prompt + tokens + 1), OWN, np.int32)
    asked[:, :prompt] = texts.tokens[:, :prompt]
    decoded = np.broadcast_to(np.arange(asked.shape[1]) >= prompt, asked.shape)
    written = heads.run(loaded, arms, Texts(asked, decoded, texts.thread)).tokens
    out: dict[str, Any] = {"prompt": prompt, "tokens": tokens, "rows": [], "apart": [], "position": []}
    for number, arm in enumerate(arms):
        loss, likeliest = _native(loaded, written[number], prompt)
        chosen, kind = written[number, :, prompt + 1 :], {"arm": arm.name}
        same = np.cumprod(chosen == written[0, :, prompt + 1 :], axis=1)

        def mean(values: np.ndarray) -> dict[str, Any]:
            return clustered_mean(values, texts.thread).plain()

        agrees = likeliest == chosen
        out["rows"].append(kind | {"equal_tokens": mean(same.sum(1)), "loss": mean(loss), "agrees": mean(agrees)})
        out["apart"] += [kind | {"tokens": t + 1, "equal": mean(same[:, t])} for t in range(tokens)]
        for part in np.array_split(np.arange(tokens), min(6, tokens)):
            where = {"from": int(part[0]) + 1, "to": int(part[-1]) + 1}
            out["position"].append(kind | where | {"loss": mean(loss[:, part]), "agrees": mean(agrees[:, part])})
    return out


def _native(loaded: LoadedModel, tokens: np.ndarray, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """Of texts `[n, T]`, the resident model's loss `f64[n, T - prompt - 1]` on tokens after the first decoded one, and
    its own likeliest."""
    losses, likeliest = [], []
    for text in tokens:
        logits = np.array(loaded.model(mx.array(text[None]))[0, prompt:-1].astype(mx.float32), np.float64)
        top = logits.max(-1)
        following = logits[np.arange(len(logits)), text[prompt + 1 :]]
        losses.append(top + np.log(np.exp(logits - top[:, None]).sum(-1)) - following)
        likeliest.append(logits.argmax(-1))
    return np.array(losses), np.array(likeliest)


def _figures(
    steps: Steps,
    number: int,
    texts: Texts,
    consumers: Sequence[int],
    top_k: int,
    *,
    native: tuple[np.ndarray, np.ndarray],
) -> dict[str, Any]:
    mask, cluster = texts.counted, _cluster(texts)
    loss, layers = steps.loss[number][mask], list(consumers)
    return {
        "nll": clustered_mean(loss, cluster).plain(),
        "loss": paired_difference(loss, native[0][mask], cluster).plain(),
        "greedy": clustered_mean(steps.greedy[number][mask] == native[1][mask], cluster).plain(),
        "replaced": clustered_mean(steps.replaced[number][mask][:, layers], cluster).plain(),
        "recall": clustered_mean(steps.hits[number][mask][:, layers] / top_k, cluster).plain(),
    }


def _cluster(texts: Texts, mask: np.ndarray | None = None) -> np.ndarray:
    """Thread of each counted token."""
    return np.broadcast_to(texts.thread[:, None], texts.tokens.shape)[texts.counted if mask is None else mask]
