"""Late experts, live: the streaming engine decodes and does without the experts that are not there in time.

Where experts lie decides which are late; both have the same number of slots a layer:

    staged    staged slots hold what a prediction named before the pass: the experts that the layer used most recently,
              a prediction without training
    cache     the engine's own cache, least recently used goes first; late is what is not resident when it is asked for
              (`specialists.CacheAvailability`), or what its reads do not bring in time

`LayerOptions.on_missing` says what becomes of a late expert:

    exact     it is waited for
    raise     the pass ends there; counted, as a token with a late expert in any layer
    zero      its share falls out: `policies.degrade(mass="keep")`, and nothing for the weight that is lost. A shared
              expert goes on by itself, at its own weight
    anchor    the shared expert stands in at the late expert's weight: the same, and `lost` times the anchor's output.
              Refused on a family without a shared expert

What is late is read for the next token all the same: doing without saves waiting more than bytes. (It does save some.
Staged slots keep what has left the set until they are needed, so the next set finds there what the exact path reads
again; and a read that the cache has no room for is withdrawn.)

Windows of validation owners are decoded along their own text; their first tokens are a prompt, computed exactly. All
layers do without at once, where `routing_study` changes one. Loss is paired with the resident model's, to which the
exact path is equal, and every read has landed before the next token: what is late is then a property of the text.
Times come from a few windows more, on a store slowed to a named ratio of read to compute, arms in turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import quiet
from ..errors import UnsupportedModelError
from ..flywheel.estimates import clustered_mean, paired_difference
from ..routes import DECODED, PREFILLED

if TYPE_CHECKING:
    from ..models import LoadedModel
    from ..streaming import StreamingEngine
    from .routing import Part

__all__ = ["ARMS", "PLACES", "Decoded", "Recent", "decode", "late_at", "live", "prefixes"]

PLACES = ("staged", "cache")
ARMS = ("exact", "zero", "anchor")
"""`on_missing` of the engines; "raise" is counted on the routes of the first."""
CACHE_STRIDE = 4
"""Of the windows, every fourth is also decoded on the cache."""
TIMED_WINDOWS = 4
FAST = 1e15
"""Bytes a second of a disk that is never waited for."""


class Recent:
    """The experts that each layer used most recently, latest first, at most `slots`; a `Listener` of an engine."""

    def __init__(self, slots: int):
        self.slots, self.layers = slots, {}

    def routed(self, *, layer: int, ids: np.ndarray, **_: Any) -> None:
        """`ids [..., K]`, tokens in order."""
        named = self.layers.get(layer, [])
        for row in ids.reshape(-1, ids.shape[-1]).tolist():
            named = list(dict.fromkeys([*sorted(row), *named]))[: self.slots]
        self.layers[layer] = named

    def ended(self, *, step: int) -> None:
        """Staging is left to whoever runs the passes, between two."""

    def stage(self, engine: StreamingEngine) -> None:
        for layer, experts in self.layers.items():
            if engine.switches[layer].staged is not None:
                engine.switches[layer].staged.stage(experts)


def late_at(ids: np.ndarray, slots: int, prompt: int) -> np.ndarray:
    """Late experts `i64[T - prompt, L]` of the tokens after the prompt, of one window with routes `ids [T, L, K]`."""
    recent, late = Recent(slots), np.zeros((max(len(ids) - prompt, 0), ids.shape[1]), np.int64)
    for layer in range(ids.shape[1]):
        recent.routed(layer=layer, ids=ids[:prompt, layer])
        for t in range(prompt, len(ids)):
            late[t - prompt, layer] = (~np.isin(ids[t, layer], recent.layers[layer])).sum()
            recent.routed(layer=layer, ids=ids[t, layer])
    return late


def prefixes(part: Part, *, context: int, tokens: int, prompt: int) -> tuple[list[np.ndarray], np.ndarray]:
    """First tokens of windows, and the owner `i64[W]` of each: in rounds over the owners, until `tokens` tokens are
    predicted after the prompts."""
    seen: dict[int, int] = {}
    rounds = [(seen.update({o: seen.get(o, -1) + 1}), seen[o])[1] for o in part.owner.tolist()]
    kept, total = [], 0
    for number in np.lexsort((np.arange(len(rounds)), rounds)):
        predicted = min(len(part.windows[number]), context) - 1 - prompt
        if total < tokens and predicted > 0:
            kept.append(int(number))
            total += predicted
    return [np.asarray(part.windows[n])[:context] for n in kept], part.owner[kept]


@dataclass(frozen=True, eq=False)
class Decoded:
    """One window on one engine; `T` tokens after the prompt, each of which predicts the next.

    loss: `f64[T]` nats. late: `i64[T]` pairs over all layers whose expert was late. seconds: of the passes and what
    lies between them. exposed: of these, waiting for reads. nbytes: read, what was still on its way included.
    """

    loss: np.ndarray
    late: np.ndarray
    seconds: float
    exposed: float
    nbytes: int


def decode(engine: StreamingEngine, window: np.ndarray, *, prompt: int, slots: int, settle: bool) -> Decoded:
    """Along a window's own text, a token a pass. settle: every read lands before the next pass."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    recent, cache = Recent(slots), make_prompt_cache(engine.loaded.model)
    engine.reset()
    engine.forward.listeners.append(recent)
    try:
        engine.run(mx.array(window[None, :prompt]), cache, PREFILLED)
        engine.memory.drain()
        engine.forward.timeline.clear()
        waited, missed, read = _waited(engine), _late(engine), engine.store.physical_bytes
        loss, late, began = [], [], time.perf_counter()
        for token, following in zip(window[prompt:-1].tolist(), window[prompt + 1 :].tolist(), strict=True):
            recent.stage(engine)
            logits = engine.run(mx.array([[token]]), cache, DECODED)
            loss.append(_loss(logits, [following])[0])
            late.append(_late(engine) - missed)
            missed += late[-1]
            if settle:
                engine.memory.drain()
        seconds = time.perf_counter() - began
    finally:
        engine.forward.listeners.remove(recent)
    # On the exact path the timeline has the wait for staged slots too; without a synchronisation only the slots have.
    exposed = max(_waited(engine) - waited, sum(engine.forward.timeline.blocked))
    engine.memory.drain()
    return Decoded(np.array(loss), np.array(late), seconds, exposed, engine.store.physical_bytes - read)


def live(
    loaded: LoadedModel, part: Part, *, context: int, tokens: int, prompt: int, slots: int, timed: int, ratio: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What doing without costs, and what it saves.

    Args:
        part: validation windows. context: tokens of each, at most. tokens: predicted in all, about.
        prompt: tokens before them that are computed exactly. slots: of a layer.
        timed: tokens of each window that is decoded for times.
        ratio: read time of a token's demand over its compute, on the slowed store.

    Returns:
        `{tokens, slots, rows, refused}`, the same whenever it is run, and times
        `{n, tokens, ratio, bytes_per_s, rows}`; a row a place and `on_missing`.
    """
    windows, owners = prefixes(part, context=context, tokens=tokens, prompt=prompt)
    native = [_resident(loaded, w, prompt) for w in windows]
    pairs = loaded.blocks[0].family.top_k * len(loaded.blocks)

    def row(place: str, mode: str, some: Sequence[int], late: list[np.ndarray], loss: list[np.ndarray]) -> dict:
        owner, late = np.repeat(owners[some], [len(part) for part in late]), np.concatenate(late)
        own = np.concatenate([native[n][0] for n in some])
        return {
            "place": place, "mode": mode,
            "touched": clustered_mean(late > 0, owner).plain("owners"),
            "late": clustered_mean(late / pairs, owner).plain("owners"),
            "loss": paired_difference(np.concatenate(loss), own, owner).plain("owners") if loss else None,
        }  # fmt: skip

    late = [late_at(ids[:-1], slots, prompt).sum(-1) for _, ids in native]
    rows, refused, engines = [row("staged", "raise", range(len(windows)), late, [])], [], {}
    with ExitStack() as stack:
        for place, mode in ((place, mode) for place in PLACES for mode in ARMS):
            try:
                engine = stack.enter_context(_engine(loaded, place, mode, slots))
            except UnsupportedModelError as error:
                refused.append({"place": place, "mode": mode, "problem": error.problem})
                continue
            some = range(len(windows))[:: 1 if place == "staged" else CACHE_STRIDE]
            some = some[:1] if mode == "exact" else some  # equal to the resident model, as tests show
            runs = [decode(engine, windows[n], prompt=prompt, slots=slots, settle=True) for n in some]
            rows.append(row(place, mode, some, [run.late for run in runs], [run.loss for run in runs]))
            engines[place, mode] = engine
        with quiet.timing():
            times = _times(engines, [w[: prompt + timed + 1] for w in windows[:TIMED_WINDOWS]], prompt, slots, ratio)
    return {"tokens": sum(map(len, late)), "slots": slots, "rows": rows, "refused": refused}, times


def _engine(loaded: LoadedModel, place: str, mode: str, slots: int) -> StreamingEngine:
    """`slots` a layer in its place; beside staged slots, a cache of two token cycles takes what has left them."""
    from ..streaming import EngineOptions, LayerOptions, StreamingEngine, VirtualDevice

    top_k, layers = loaded.blocks[0].family.top_k, len(loaded.blocks)
    staged = {"staged": True, "staged_n": slots, "staged_trigger": top_k, "staged_sync": False}
    layer = LayerOptions(
        on_missing=mode, cache_slots=layers * (2 * top_k if place == "staged" else slots),
        **staged if place == "staged" else {},
    )  # fmt: skip
    device = VirtualDevice(latency_s=0.0, bytes_per_s=FAST)
    options = EngineOptions(layer=layer, policy="lru", precision=loaded.precision, reader="buffered", device=device)
    return StreamingEngine.load(loaded.path, options)


def _late(engine: StreamingEngine) -> int:
    """Pairs that were late so far."""
    counters = [(switch.staged or switch.late).counters for switch in engine.switches if switch.staged or switch.late]
    return sum(c.exact + c.dropped for c in counters) if counters else sum(engine.forward.timeline.missing)


def _waited(engine: StreamingEngine) -> float:
    """Seconds that turns waited for their staged slots so far."""
    return sum(switch.staged.stack.counters.wait_s for switch in engine.switches if switch.staged)


def _loss(logits: Any, following: Sequence[int]) -> np.ndarray:
    """`f64[T]` nats, of logits `[1, T, V]`."""
    import mlx.core as mx

    rows = np.array(logits[0].astype(mx.float32), np.float64)
    top = rows.max(-1)
    return top + np.log(np.exp(rows - top[:, None]).sum(-1)) - rows[np.arange(len(rows)), following]


def _resident(loaded: LoadedModel, window: np.ndarray, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """Loss `f64[T]` of the resident model after the prompt, and its routes `[tokens, L, K]`."""
    import mlx.core as mx

    from ..models.taps import tap

    with tap(loaded.blocks, ()) as notes:
        logits = loaded.model(mx.array(window[None]))
        mx.eval(logits)
        ids = notes.take().ids[0].astype(np.int64)
    return _loss(logits[:, prompt:-1], window[prompt + 1 :]), ids


def _times(
    engines: dict[tuple[str, str], StreamingEngine],
    windows: Sequence[np.ndarray],
    prompt: int,
    slots: int,
    ratio: float,
) -> dict[str, Any]:
    """Quartiles over windows of every arm's token, arms in turns, in an order that is reversed every window."""

    def run(arm: tuple[str, str], window: np.ndarray) -> Decoded:
        return decode(engines[arm], window, prompt=prompt, slots=slots, settle=False)

    free = run(("cache", "exact"), windows[0])  # warm: it has decoded these windows
    bytes_per_s = max(free.nbytes, 1) / (ratio * max(free.seconds - free.exposed, 1e-9))
    for engine in engines.values():
        engine.options.device.bytes_per_s = bytes_per_s
    runs: dict[tuple[str, str], list[tuple[float, ...]]] = {arm: [] for arm in engines}
    for turn, window in enumerate(windows):
        for arm in [*engines][:: -1 if turn % 2 else 1]:
            got, counted = run(arm, window), len(window) - 1 - prompt
            runs[arm].append((got.seconds / counted, got.exposed / counted, got.nbytes / counted))
    rows = [
        {"place": place, "mode": mode}
        | {
            name: np.quantile(values, [0.25, 0.5, 0.75]).tolist()
            for name, values in zip(("seconds", "exposed", "nbytes"), zip(*every, strict=True), strict=True)
        }
        for (place, mode), every in runs.items()
    ]
    tokens = sum(len(w) - 1 - prompt for w in windows)
    return {"n": len(windows), "tokens": tokens, "ratio": ratio, "bytes_per_s": bytes_per_s, "rows": rows}
