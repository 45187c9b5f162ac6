"""The runtimes that are compared. Each is a function that loads a model its own way and yields greedy tokens.

An arm runs in a process of its own (`worker`) and loads nothing before it is asked to. It returns what it *really*
runs with, read back from the loaded objects where the library tells, never the label it was started under: the
digest of that is how two arms that are the same arm are found out.

    resident     mlx-lm as it comes: load, float32, its own generate; without a cap it is the reference
    engine       this project's streaming engine, in the settings given
    accelerate   transformers with every parameter offloaded to disk and fetched layer by layer
    neurostream  a streaming runtime for GGUF files
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from ...pages import huge_bytes
from ...routes import DECODED


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is told: an arm of `ARMS`, the folder or file of the weights, and the prompt as token ids."""

    arm: str
    weights: str
    prompt: list[int]
    tokens: int
    """Tokens to generate, the first one (of the prompt's pass) included."""
    threads: int
    settings: dict[str, Any]
    result: str
    """File for the worker's answer."""


@dataclass(frozen=True)
class Running:
    """A loaded arm.

    Attributes:
        options: what it runs with, as plain JSON values.
        tokens: the generated ids, one by one, as they are ready.
        report: called after the last token; the arm's own counters, as plain JSON values.
        read: called at each token; bytes that the arm itself says it has read so far, None where it does not.
    """

    options: dict[str, Any]
    tokens: Iterator[int]
    report: Callable[[], dict[str, Any]] = field(default=dict)
    read: Callable[[], int | None] = field(default=lambda: None)


def resident(request: Request) -> Running:
    """mlx-lm with everything in memory. Its routes are replayed afterwards: which experts the text needed at all."""
    from ...models import activate

    blas = activate("auto", request.threads)
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(request.weights))
    model.set_dtype(mx.float32)
    produced: list[int] = []

    def tokens() -> Iterator[int]:
        for token, _ in generate_step(mx.array(request.prompt), model, max_tokens=request.tokens):
            produced.append(int(token))
            yield produced[-1]

    def report() -> dict[str, Any]:
        if not request.settings.get("routes"):
            return {}
        from ...models import find_blocks
        from ...models.taps import tap

        fed = [*request.prompt, *produced[:-1]]
        with tap(find_blocks(model)) as seen:
            mx.eval(model(mx.array([fed])), seen.pending())
            ids = seen.take().ids[0]
        return {"distinct_experts": sum(len(set(ids[:, layer].ravel().tolist())) for layer in range(ids.shape[1]))}

    return Running(
        {"runtime": "mlx-lm", **_versions("mlx", "mlx-lm"), "precision": "float32", "blas": blas}, tokens(), report
    )


def accelerate(request: Request) -> Running:
    """transformers' own generate over `accelerate.disk_offload`; `weights` is the offload folder."""
    import torch
    from accelerate import disk_offload, init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(request.threads)
    with init_empty_weights():
        config = AutoConfig.from_pretrained(request.settings["config"])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model = disk_offload(model, request.weights, execution_device=torch.device("cpu"))
    options = {
        "runtime": "accelerate",
        **_versions("accelerate", "transformers", "torch"),
        "offload": "disk",
        "threads": torch.get_num_threads(),
        "experts": str(getattr(model.config, "_experts_implementation", None)),
    }
    return Running(options, _transformers_tokens(model, request))


def _transformers_tokens(model: Any, request: Request) -> Iterator[int]:
    """Greedy tokens of `generate` as its streamer hands them out. It runs on a thread of its own."""
    import queue
    import threading

    import torch
    from transformers.generation.streamers import BaseStreamer

    ready: queue.Queue = queue.Queue()

    class Streamer(BaseStreamer):
        def put(self, value):
            ready.put(value)

        def end(self):
            pass

    def run() -> None:
        prompt = torch.tensor([request.prompt])
        try:
            with torch.no_grad():
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=request.tokens,
                    streamer=Streamer(),
                )
            ready.put(None)
        except BaseException as error:  # handed to the thread that waits for tokens
            ready.put(error)

    threading.Thread(target=run, daemon=True).start()
    ready_prompt = ready.get()  # the streamer is given the prompt first
    if isinstance(ready_prompt, BaseException):
        raise ready_prompt
    while (value := ready.get()) is not None:
        if isinstance(value, BaseException):
            raise value
        yield int(value)


def neurostream(request: Request) -> Running:
    """neurostream over a float32 GGUF file; settings: `arena_bytes` of reads in flight, `ram_bytes` of weights kept."""
    import torch
    from neurostream import NeuroStream

    torch.set_num_threads(request.threads)
    arena, ram = request.settings["arena_bytes"], request.settings["ram_bytes"]
    runtime = NeuroStream.load(request.weights, mem_budget=arena, ram_budget=ram, device="cpu")
    options = {
        "runtime": "neurostream",
        **_versions("neurostream", "torch"),
        "arena_bytes": runtime.arena.budget,
        "ram_bytes": runtime.cache.ram_budget,
        "workers": runtime.source.reader.n_workers,
        "threads": torch.get_num_threads(),
    }

    # Its generator yields text, held back while a character is incomplete. Ids are what is compared and timed.
    runtime.tokenizer.decode_bytes = lambda ids: f"{ids[0]}\n".encode()
    text = runtime.generate(request.prompt, max_tokens=request.tokens, temperature=0.0, stop_on_eos=False)

    def report() -> dict[str, Any]:
        return {"ram_used_bytes": runtime.cache.stats.ram_bytes}

    return Running(options, (int(piece) for piece in text), report, lambda: runtime.source.stats.bytes_read)


def engine(request: Request) -> Running:
    """This project's engine; settings are fields of `EngineOptions`, `layer` being a profile's name and overrides.

    With a profile, every layer's last route is staged at the boundary of two steps, which waits until it is there:
    what the source of the profiles does when it has no predictor.
    """
    from ...models import activate, without_torch

    blas = activate("auto", request.threads)
    without_torch()  # as a process with a memory budget should: it runs a model and trains none
    from ...streaming import EngineOptions, StreamingEngine
    from ...streaming.layer.options import profile

    settings = dict(request.settings)
    layer = profile(**settings.pop("layer")) if "layer" in settings else None
    # No rival compares checksums; an arm that does says so.
    options = EngineOptions(**{"check_reads": False} | settings, layer=layer)
    streamed = StreamingEngine.load(request.weights, options)
    cache, store = streamed.cache, streamed.store
    effective = {
        "runtime": "moelab",
        **_versions("mlx", "mlx-lm"),
        "blas": blas,
        "check_reads": streamed.options.check_reads,
        **{key: store.identity[key] for key in ("source", "reader", "throttle", "precision")},
        "policy": streamed.options.policy,
        "slots": [int(slots) for slots in cache.pool_slots],
        "threads": streamed.options.threads,
        "layer": None if layer is None else asdict(layer),
    }

    def report() -> dict[str, Any]:
        decoded = cache.counters(DECODED)
        return {
            "decode_hits": decoded.warm_hits + decoded.cold_hits,
            "decode_misses": decoded.warm_misses + decoded.cold_misses,
            "slot_bytes": cache.high_water_bytes,
            "slots_given": sum(slab.host.nbytes for slab in streamed.memory.slabs),
            "huge_bytes": huge_bytes(),
        }

    tokens = (token for token, _ in streamed.stream_tokens(request.prompt, max_tokens=request.tokens))
    if layer is not None:
        tokens = _staged_at_boundaries(streamed, tokens)
    return Running(effective, tokens, report, lambda: store.physical_bytes)


class _Routes:
    """Notes the route of each layer in the latest pass, of its last token."""

    def __init__(self):
        self.last: dict[int, list[int]] = {}

    def routed(self, *, step: int, layer: int, ids: Any, x: Any, now: float) -> None:
        self.last[layer] = ids.reshape(-1, ids.shape[-1])[-1].tolist()

    def ended(self, *, step: int) -> None:
        pass


def _staged_at_boundaries(streamed: Any, tokens: Iterator[int]) -> Iterator[int]:
    routes = _Routes()
    streamed.forward.listeners.append(routes)
    for token in tokens:
        for layer, ids in routes.last.items():
            streamed.switches[layer].staged.stage(ids)
        yield token


def _versions(*libraries: str) -> dict[str, str]:
    return {f"{library} version": metadata.version(library) for library in libraries}


ARMS: dict[str, Callable[[Request], Running]] = {
    "resident": resident,
    "engine": engine,
    "accelerate": accelerate,
    "neurostream": neurostream,
}
