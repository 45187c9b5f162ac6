"""The prerouter on a model: how well its heads agree with the native route, and what using them costs. Notebook 81.

Heads are those of notebook 41. `prerouter_agreement` holds them against everything simpler, `prerouter_cost` runs the
model on their predictions; a few tokens of every mode also go through the streaming engine, so that the study's batches
are seen to be what the engine does.

    python -m moelab.studies.prerouter_study reference OUT.json     more thresholds, other K and single layers on all
                                                                     texts: what the default of installation rests on
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import artifacts, models, quiet
from ..commands import Parser
from ..errors import ParameterError
from ..flywheel import stage
from ..flywheel.baselines import BaselineOptions, Upstream, upstream
from ..flywheel.batches import BatchShape
from ..flywheel.dataset import Dataset
from ..flywheel.engine import opened
from ..flywheel.head_recipe import tier_of
from ..flywheel.head_training import FILES, train_heads
from ..flywheel.observations import Records
from ..params import PROFILES, Options, param
from .routing import Clock

if TYPE_CHECKING:
    from ..models import LoadedModel
    from .prerouter_cost import Heads, Texts

RESULT = "modes.json"
WIDER = {"thresholds": [0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7], "top_ks": [1, 2, 3, 6, 8], "part_texts": 28}
"""What the committed report asks beyond notebook 81."""
REPORTED = ("modes", "top_k", "depth", "past", "position", "texts")
FIGURES_VERSION = 2
"""Raise when the study writes other figures, so that older artefacts are not taken for these."""


@dataclass(frozen=True, kw_only=True)
class PrerouterOptions(Options):
    notebook: ClassVar[str] = "81"

    form: str = param("full", "heads whose predictions are used", choices=tuple(FILES))
    texts: int = param(3, "validation texts, at most", min=2)
    context: int = param(96, "tokens of each, at most", min=16)
    thresholds: list[float] = param([0.3, 0.4, 0.5, 0.55], "confidences that gated asks for", min=0.0, max=1.0)
    top_ks: list[int] = param([2, 8], "experts a token beside the model's own number", min=1)
    part_texts: int = param(2, "of the texts, those that other K and single layers are tried on", min=2)
    prompt: int = param(24, "tokens of the prompt of a greedy answer", min=2)
    tokens: int = param(16, "tokens of a greedy answer", min=2)
    answer_threshold: float = param(0.55, "confidence that gated asks for in greedy answers", min=0.0, max=1.0)
    check_tokens: int = param(6, "tokens of each mode that the streaming engine decodes as well", min=1)
    timed_tokens: int = param(12, "tokens decoded to time one token's compute", min=4)
    gain_cycles: list[float] = param([2.0], "caches of the gain study, in token cycles", min=0.1)
    gain_ratios: list[float] = param([1.0], "its disks: time of a token's reads ÷ its compute", min=0.01)
    gain_threshold: float = param(0.5, "least probability of an expert that is read ahead", min=0.0, max=1.0)
    gain_texts: int = param(1, "texts that each arm decodes, after one that does not count", min=1)
    gain_tokens: int = param(4, "tokens of each that count", min=2)
    gain_simulated_tokens: int = param(8, "tokens of each simulated text", min=4)


def modes(options: PrerouterOptions, *, on_progress: stage.Progress | None = None) -> dict[str, dict[str, Any]]:
    """Model → figures: `agreement`, `modes`, `drift`, `past`, `position`, `top_k`, `depth`, `own`, `engine`, `texts`,
    and `seconds` of processor time. Raises ParameterError: a prompt as long as its text."""
    if options.prompt >= options.context:
        raise ParameterError(
            "an answer begins inside its text",
            field="prompt",
            got=options.prompt,
            expected=f"< {options.context}",
        )
    before, judged_as = upstream(options), options.upstream(BaselineOptions)
    heads = train_heads(options)
    jobs = {m: {"before": before[m], "heads": heads[m], "judged_as": judged_as} for m in options.models}
    found = stage.run(modes_model, options, jobs, blas=judged_as.feature_blas, on_progress=on_progress)
    return {model: artifacts.read_json(artifact.file(RESULT)) for model, artifact in found.items()}


def modes_model(
    model: str, options: PrerouterOptions, before: Upstream, heads: Path, judged_as: BaselineOptions
) -> Path:
    """One model in this process; returns the folder of a `prerouter-modes` artefact.

    Raises:
        ParameterError: the model is given with a memory budget; here many texts are run at once, on a resident one.
            Or more experts a token are asked for than it has.
    """
    name, budget = models.split_budget(model)
    if budget is not None:
        raise ParameterError(
            "modes are compared on the resident model", field="models", got=model, expected=name,
            fix="give the model without a budget",
        )  # fmt: skip
    with opened(model) as loaded:
        if (most := max(options.top_ks)) > (experts := loaded.geometry.experts):
            raise ParameterError(
                "more experts a token than there are", field="top_ks", got=most,
                expected=f"at most {experts}, the experts of {model}",
            )  # fmt: skip
        records, dataset = before.open()
        trained = artifacts.open_artifact(heads)

        def make(folder: Path) -> dict[str, Any]:
            result = study(loaded, records, dataset, trained, options, judged_as)
            artifacts.write_json(folder / RESULT, result)
            timed = ("seconds", "engine", "agreement")  # hold times, or what rests on them
            return {"content": artifacts.digest_json({k: v for k, v in result.items() if k not in timed})}

        built = artifacts.build(
            "prerouter-modes",
            inputs={"snapshot": dataset.artifact.content, "routes": before.routes.content, "heads": trained.content},
            params={
                **{name: value for name, value in options.own().items() if not name.startswith("gain_")},
                "judged_as": judged_as.own(),
                "runtime": models.runtime_identity(loaded.precision, loaded.residency),
                "figures_version": FIGURES_VERSION,
            },
            make=make,
        )
    return built.path


def study(
    loaded: LoadedModel,
    records: Records,
    dataset: Dataset,
    trained: artifacts.Artifact,
    options: PrerouterOptions,
    judged_as: BaselineOptions,
) -> dict[str, Any]:
    """All figures of one model; plain numbers. Seconds are processor time."""
    from . import prerouter_cost as cost
    from .prerouter_agreement import agreement

    clock, steps = Clock(), 6
    out: dict[str, Any] = {"seconds": clock.seconds}

    def told(name: str) -> None:
        clock.lap(name)
        models.report_progress({"done": len(clock.seconds), "total": steps})

    texts = _texts(loaded, records, dataset, options)
    heads = _heads(loaded, trained, options.form)
    with quiet.timing():
        token_s = _token_s(loaded, texts.tokens[0], options.timed_tokens)
    shape = BatchShape(judged_as.batch_tokens, judged_as.chunk)
    out["agreement"] = agreement(
        loaded, records, dataset, trained, shape=shape, cache_fraction=judged_as.cache_fraction, token_s=token_s
    )
    told("agreement")
    top_k, consumers = loaded.family.top_k, heads.tier.wiring.consumer_index
    arms, found = cost.by_mode(loaded, heads, texts, options.thresholds)
    out["modes"] = cost.mode_rows(arms, found, texts, consumers, top_k)
    out["drift"] = cost.drifts(arms, found, texts)
    out["past"] = cost.of_the_past(found, texts)
    out["position"] = cost.by_position(arms, found, texts)
    told("modes")
    part = texts.some(options.part_texts)
    out["top_k"] = cost.by_top_k(loaded, heads, part, options.top_ks, (arms, found), consumers)
    told("other K")
    out["depth"] = cost.by_depth(loaded, heads, part, consumers, top_k)
    told("depth")
    out["own"] = cost.on_its_own(
        loaded, heads, texts, prompt=options.prompt, tokens=options.tokens, threshold=options.answer_threshold
    )
    told("greedy answers")
    out["engine"] = _engine(loaded, heads, texts, arms, found, options)
    told("engine")
    out["texts"] = {"texts": len(texts), "threads": len(np.unique(texts.thread)), "tokens": int(texts.counted.sum())}
    return out


def _texts(loaded: LoadedModel, records: Records, dataset: Dataset, options: PrerouterOptions) -> Texts:
    from .prerouter_cost import Texts

    rows = dataset.rows("validation", decoded=True)
    entries = [dataset.table[i] for i in np.unique(dataset.routes.thread[rows])]
    entries = [entry for entry in entries if entry["mode"] == "forced"]
    observed = list(records.open(entries, loaded, purpose="evaluate"))
    return Texts.of(observed, most=options.texts, context=options.context)


def _heads(loaded: LoadedModel, trained: artifacts.Artifact, form: str) -> Heads:
    from ..prerouter import read_heads
    from .prerouter_cost import Heads

    file = read_heads(trained.file(FILES[form]))
    identity = file.identity
    pairs = dict(zip(identity.owners, identity.confidence, strict=True))
    return Heads(file.bank(), tier_of(loaded, identity.hidden), pairs)


def _token_s(loaded: LoadedModel, tokens: np.ndarray, count: int) -> float:
    """Median seconds of a decoded token of the resident model, everything in memory."""
    import mlx.core as mx

    cache, seconds = loaded.make_cache(), []
    for token in tokens[: count + 2].tolist():
        began = time.perf_counter()
        mx.eval(loaded.model(mx.array([[token]]), cache=cache))
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[2:]))


def _engine(loaded, heads: Heads, texts: Texts, arms, found, options: PrerouterOptions) -> list[dict]:
    """The first text's first decoded tokens through the streaming engine, mode by mode, beside the lock step's loss."""
    import mlx.core as mx

    from ..prerouter import install_prerouter
    from ..routes import DECODED, PREFILLED
    from ..streaming import EngineOptions, StreamingEngine

    first = int(texts.decoded[0].argmax())
    count = min(
        options.check_tokens, int(texts.decoded[0, first:].argmin() or 1 << 30), texts.tokens.shape[1] - first - 1
    )
    line = texts.tokens[0, : first + count + 1]
    names = {arm.name: number for number, arm in enumerate(arms)}
    plan = [("off", "off", 0.0), ("advise", "advise", 0.0), ("replace", "replace", 0.0)]
    plan.append(("replace_true_weights", "replace_true_weights", 0.0))
    plan += [(arm.name, arm.mode, arm.threshold) for arm in arms if arm.mode == "gated"][:1]
    rows, native = [], None
    everything = EngineOptions(cache_bytes=1 << 34, precision=loaded.precision, reader="buffered")
    with StreamingEngine.load(loaded.path, everything) as engine:
        for name, mode, threshold in plan:
            given = {"heads": heads.bank, "calibration": heads.calibration, "mode": mode, "threshold": threshold}
            with install_prerouter(engine.loaded, heads.tier.spec, engine, **given):
                engine.reset()
                cache = engine.loaded.make_cache()
                engine.run(mx.array(line[None, :first]), cache, PREFILLED)
                logits = np.stack(
                    [np.array(engine.run(mx.array([[t]]), cache, DECODED))[0, -1] for t in line[first:-1].tolist()]
                )
            native = logits if native is None else native
            wide = logits.astype(np.float64)
            top = wide.max(-1)
            loss = top + np.log(np.exp(wide - top[:, None]).sum(-1)) - wide[np.arange(count), line[first + 1 :]]
            beside, plain = (found.loss[n, 0, first : first + count] for n in (names.get(name, 0), 0))
            rows.append(
                {
                    "arm": name, "tokens": count, "loss": float((loss - plain).mean()),
                    "equal_bits": bool((logits == native).all()), "largest": float(np.abs(loss - beside).max()),
                }
            )  # fmt: skip
    return rows


def report(found: dict[str, dict[str, Any]], profile: str, out: str | Path) -> None:
    """Write what `REPORTED` names, with the command and the date."""
    head = {
        "schema_version": 1,
        "command": f"python -m moelab.studies.prerouter_study {profile} OUT.json",
        "date": datetime.date.today().isoformat(),
    }
    part = {model: {name: figures[name] for name in REPORTED} for model, figures in found.items()}
    artifacts.write_json(Path(out), head | {"models": part})


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m moelab.studies.prerouter_study", description=__doc__)
    parser.add_argument("profile", choices=PROFILES, help="of the recorded decode and heads: tiny or reference")
    parser.add_argument("out", type=Path, metavar="OUT", help="JSON file to write")
    given = parser.parse_args(arguments)
    report(modes(PrerouterOptions.from_profile(given.profile, **WIDER)), given.profile, given.out)


if __name__ == "__main__":
    main()
