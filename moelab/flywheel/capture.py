"""Capture: a model really decodes, and every token's routes are written down as they happen.

Prompts are fed in chunks and decoded tokens one at a time through the model's cache; the record says
which was which (`phase`). Three kinds of sequence are captured:

* `forced-n`: along a thread's own text, its assistant turns decoded in the sets that ask for it;
* `sampled-n`: the model writes the assistant turns itself (`sampling`);
* `edge-…`: prompts of awkward lengths (see `plan.edges`).

Each finished sequence is encrypted under its thread's key, written aside and renamed. A capture killed at
any moment therefore leaves finished records and no half one, and starts again where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts, models
from ..artifacts import Artifact
from ..errors import RecordError
from ..params import Options, param
from ..routes import DECODED
from ..threads import Thread, read, render_sequences
from . import plan as plans
from . import split, stage
from .engine import Engine, LiveEngine, Tape, follow, opened
from .observe import Authorisation, Header, Observation, from_bytes, to_bytes
from .sampling import Sampler
from .vault import Vault, record_name, sweep

INDEX = "index.json"
COUNTER_STRIDE = 1 << 20
"""Counters of sequence `n` of a capture begin at `n * COUNTER_STRIDE`: monotonic, and the same when resumed."""


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(Options):
    notebook: ClassVar[str] = "20"

    blas: str = param(
        "reference", "BLAS under which the model decodes, on Linux", choices=("reference", "openblas", "auto")
    )
    context: int = param(96, "tokens of a thread to capture; how many lie beyond is counted", min=8)
    chunk: int = param(32, "tokens of a prompt fed at once", min=2)
    max_threads: int | None = param(14, "threads to capture; None for all", min=4)
    decode_sets: list[str] = param(
        ["validation", "temporal", "stress", "runtime"], "sets whose assistant turns are decoded", choices=split.SETS
    )
    sampled: int = param(1, "training threads whose assistant turns the model also writes itself", min=0)
    max_new: int = param(12, "tokens of a sampled turn, at most", min=1)
    temperature: float = param(0.8, "sampling temperature", min=0.01)
    top_p: float = param(0.95, "nucleus of the sampler; 1 keeps every token", min=0.01, max=1.0)
    edge_steps: int = param(4, "decoded tokens of each edge sequence", min=2)
    cost_steps: int = param(16, "decoded tokens of each arm when the cost of capture is measured", min=4)
    cost_repeats: int = param(3, "pairs of arms, taps on and off", min=2)
    generation: int = param(1, "number of this capture run", min=1)
    basis: str = param("project's own writing", "why these threads may be captured")
    retention_until: str = param("2030-12-31", "last day on which the records may be used (ISO date)")

    def recorded(self) -> dict[str, Any]:
        """Parameters that the records depend on: all but those of measuring what capture costs."""
        return {name: value for name, value in self.own().items() if not name.startswith("cost_")}

    @property
    def sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seed", "temperature", "top_p", "max_new")}


def capture(options: CaptureOptions, *, on_progress: stage.Progress | None = None) -> dict[str, Artifact]:
    """Observations of every model, each captured in a process of its own under `options.blas`.

    Returns model → artefact of kind `observations`: encrypted records, and `index.json` that says what
    each one is. `on_progress(model index, {"done", "total"})` counts tokens.
    """
    return stage.run(
        capture_model, options, {m: {} for m in options.models}, blas=options.blas, on_progress=on_progress
    )


def capture_model(model: str, options: CaptureOptions) -> Path:
    """Capture one model in this process, whose BLAS has been chosen; returns the artefact's folder.

    A model larger than its memory is captured streamed: same routes, and every record says so (`runtime`).
    """
    with opened(model) as loaded:
        models.self_test(loaded)
        vault = Vault()
        threads, forgotten = living(select(read(artifacts.root() / options.threads), options.max_threads), vault)
        with LiveEngine(loaded) as engine:
            study = Study(loaded, engine, threads, options)
            built = artifacts.build(
                "observations",
                inputs={
                    **loaded.digests,
                    "threads": artifacts.digest_json([t.content for t in threads]),
                    "forgotten": artifacts.digest_json(forgotten),
                },
                params={**options.recorded(), "runtime": study.runtime},
                make=lambda folder: study.write(folder, vault),
            )
    return built.path


def select(threads: list[Thread], limit: int | None) -> list[Thread]:
    """At most `limit` threads, by hash of their uid: the choice does not depend on file order."""
    return sorted(threads, key=lambda thread: thread.uid)[:limit]


def living(threads: list[Thread], vault: Vault) -> tuple[list[Thread], list[str]]:
    """Threads that were not forgotten, and the uids of those that were."""
    gone = vault.forgotten()
    return [t for t in threads if t.uid not in gone], sorted(t.uid for t in threads if t.uid in gone)


def facts(thread: Thread, tokenizer: Any, tokens: int) -> split.ThreadFacts:
    """What the split may know about a thread."""
    languages = [m.lang for m in thread.messages if m.lang and m.role != "system"]
    domains = [m.domain for m in thread.messages if m.domain]
    reasoning = "\n".join(m.reasoning for m in thread.messages if m.reasoning)
    return split.ThreadFacts(
        thread=thread.uid,
        owner=thread.owner,
        started="" if thread.started is None else thread.started.astimezone(UTC).isoformat(),
        tokens=tokens,
        language=max(languages, key=languages.count, default="unknown"),
        domain=max(domains, key=domains.count, default="unknown"),
        tool_calls=sum(len(m.tool_calls) for m in thread.messages),
        reasoning_tokens=len(tokenizer.encode(reasoning)) if reasoning else 0,
    )


class Study:
    """One model's capture: which sequences, in which sets, and how each becomes a record."""

    def __init__(self, loaded: models.LoadedModel, engine: Engine, threads: list[Thread], options: CaptureOptions):
        self.loaded, self.engine, self.options = loaded, engine, options
        self.threads = {thread.uid: thread for thread in threads}
        self.rendered = {uid: render_sequences(thread, loaded.tokenizer) for uid, thread in self.threads.items()}
        lengths = {uid: sum(len(r.token_ids) for r in parts) for uid, parts in self.rendered.items()}
        self.facts = {uid: facts(thread, loaded.tokenizer, lengths[uid]) for uid, thread in self.threads.items()}
        self.sets = split.assign(list(self.facts.values()), seed=options.seed)
        self.runtime = models.runtime_identity(loaded.precision, loaded.residency)
        self.sampler = Sampler(loaded, engine, options)

    def plans(self) -> list[plans.Plan]:
        """Everything that can be planned: forced sequences of every thread, then the edges."""
        made = [
            plans.forced(
                rendered,
                thread=uid,
                owner=self.threads[uid].owner,
                context=self.options.context,
                decode=self.sets[uid] in self.options.decode_sets,
            )
            for uid, parts in self.rendered.items()
            for rendered in parts
        ]
        needed = self.options.chunk + 1 + self.options.edge_steps
        source = next((p for p in made if self.sets[p.thread] == "train" and len(p.tokens) >= needed), None)
        if source is None:
            raise RecordError(
                "no training thread is long enough for the edge sequences", got=None, expected=f">= {needed} tokens"
            )
        end = min(self.loaded.tokenizer.eos_token_ids)
        return made + plans.edges(source, chunk=self.options.chunk, steps=self.options.edge_steps, end_of_text=end)

    def write(self, folder: Path, vault: Vault) -> dict[str, Any]:
        """Capture what is not there yet into `folder`; returns the artefact's counts."""
        sweep(folder)
        planned = self.plans()
        training = (uid for uid in self.threads if self.sets[uid] == "train")
        speakers = [uid for uid in training if self.sampler.can_answer(self.threads[uid])][: self.options.sampled]
        total = sum(len(p.tokens) for p in planned) + len(speakers) * self.options.context
        entries, done = [], 0
        for number, job in enumerate([*planned, *speakers]):
            observation = self._one(folder, vault, number, job)
            done += len(observation.token_ids) if isinstance(job, plans.Plan) else self.options.context
            beyond = job.beyond if isinstance(job, plans.Plan) else 0
            entries.append(self._entry(observation, beyond))
            models.report_progress({"done": done, "total": total})
        artifacts.write_json(folder / INDEX, entries)
        return {
            "content": artifacts.digest_json(entries),
            "sequences": len(entries),
            "tokens": sum(e["tokens"] for e in entries),
            "decoded": sum(e["decoded"] for e in entries),
            "beyond_context": sum(e["beyond"] for e in entries),
        }

    def _one(self, folder: Path, vault: Vault, number: int, job: plans.Plan | str) -> Observation:
        uid = job if isinstance(job, str) else job.thread
        path = folder / record_name(uid, "sampled-0" if isinstance(job, str) else job.sequence)
        if path.exists():  # finished by a capture that was killed later on
            return from_bytes(vault.open(path), file=path)
        if isinstance(job, str):
            plan, tape, record, turns = self.sampler.sample(self.threads[uid])
            mode = "sampled"
        else:
            plan, turns, mode = job, job.turns, "forced"
            tape, record = follow(self.engine, plan, self.options.chunk)
        observation = self._observation(plan, turns, mode, tape, record, number)
        vault.write(path, to_bytes(observation))
        return observation.sealed()

    def _observation(self, plan: plans.Plan, turns, mode: str, tape: Tape, record, number: int) -> Observation:
        rows, shape = len(tape.tokens), self.loaded.geometry
        purposes = ("evaluate",) if self.sets[plan.thread] == "runtime" else ("replay", "train", "evaluate")
        header = Header(
            **self.loaded.digests,
            owner=plan.owner,
            thread=plan.thread,
            generation=self.options.generation,
            sequence="sampled-0" if mode == "sampled" else plan.sequence,
            began=plan.began,
            turns=turns,
            tokens_fed=rows,
            layer_ids=shape.layer_ids,
            experts=shape.experts,
            top_k=shape.top_k,
            mode=mode,
            sampling=self.options.sampling if mode == "sampled" else {},
            runtime=self.runtime,
            authorisation=Authorisation(self.options.basis, purposes, self.options.retention_until),
        )
        return Observation(
            header=header,
            token_ids=np.array(tape.tokens, np.int32),
            phase=np.array(tape.phase, np.uint8),
            ordinal=np.arange(rows, dtype=np.int64),
            counter=(np.arange(rows) + number * COUNTER_STRIDE).astype(np.uint64),
            wall_ns=np.array(tape.wall_ns, np.int64),
            ids=record.ids,
            weights=record.weights,
            margin=record.margin,
            group_margin=record.group_margin,
            message_start=plan.message_start.astype(np.int32),
            role=plan.role.astype(np.uint8),
        )

    def _entry(self, observation: Observation, beyond: int) -> dict[str, Any]:
        header, about = observation.header, self.facts[observation.header.thread]
        return {
            "file": record_name(header.thread, header.sequence),
            "thread": header.thread,
            "owner": header.owner,
            "name": self.threads[header.thread].id,
            "set": self.sets[header.thread],
            "mode": header.mode,
            "sequence": header.sequence,
            "payload": observation.payload,
            "tokens": len(observation.token_ids),
            "decoded": int((observation.phase == DECODED).sum()),
            "beyond": beyond,
            "started": about.started,
            "language": about.language,
            "domain": about.domain,
            "tool_calls": about.tool_calls,
            "reasoning_tokens": about.reasoning_tokens,
            "stresses": sorted(about.stresses),
        }
