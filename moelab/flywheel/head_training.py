"""Training prerouter heads: per layer, and the shared low-rank form of a tenth of the bytes, from the same rows.

A head is a predictor of the horizon "1 token + 1 layer": the same snapshot, split by owner, loss, resumable loop and
judgement as the near-term predictor. Every control that needs no training is judged beside the heads on the same rows
and the same layers, those of a shorter lead too: a head has to beat the previous token and its co-occurrence table
although these already know the consumer's own last route.

Two things are fitted on the temporal holdout, which is neither trained nor judged on. A scale a layer is folded into
the heads, so that the model's own arithmetic on their logits gives weights as near to the native ones as it can: what
is learnt are log-odds of being chosen, far steeper than a router's logits, and weights made of those are worse than
equal ones. (No ranking changes.) And the probability that an expert is used is calibrated, and kept beside the heads.
The selection bias of a router has no place in it: the logits are of the choice, bias included.

    python -m moelab.flywheel.head_training reference           trains the committed heads of the reference models again
    python -m moelab.flywheel.head_training reference MODEL…    heads of other models

Source: edge0, prerouter; AFN-021, "Train three things separately".
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import artifacts, models
from ..artifacts import Artifact
from ..commands import Parser
from ..errors import ContractError, GateRefusedError
from ..models.families import RoutingFamily
from ..params import PROFILES, Options
from ..prerouter import HeadIdentity, TorchHeads, read_heads, write_heads
from ..routes import Routes
from . import stage
from .baselines import BaselineOptions, Upstream, upstream
from .batches import BatchShape
from .calibrate import calibrate
from .dataset import Dataset
from .engine import opened
from .estimates import Estimate, paired_difference
from .evaluation import HeldOut, Judged, judge, write_ranks
from .examples import regenerate
from .head_examples import HORIZON, HeadRows, consumers, head_rows, on_layers
from .head_recipe import HeadRecipe, head_controls, recalled, tier_of, weight_scale
from .lesson import Examples, Recipe
from .observations import Records
from .train import fit
from .training import TrainingOptions, labels_status

TABLE, RANKS, HISTORY = "table.json", "ranks.safetensors", "history.json"
FILES = {"full": "prerouter.safetensors", "shared": "prerouter_shared.safetensors"}
CALIBRATED_ON = "temporal"


def train_heads(
    options: Options, recipe: HeadRecipe | None = None, *, on_progress: stage.Progress | None = None
) -> dict[str, Artifact]:
    """Train and judge both forms on every model: model → artefact of kind `prerouter`.

    `options`: profile, models, threads and seed are read. The caller has asked Gate 0. `recipe`: None = as the
    parameters of notebook 41 say, so that whoever asks after it finds its heads.

    Raises:
        GateRefusedError: labels are not exact, or heads cannot learn a few tokens by heart.
    """
    before, judged_as = upstream(options), options.upstream(BaselineOptions)
    job = {"judged_as": judged_as, "recipe": recipe or options.upstream(TrainingOptions).heads()}
    jobs = {m: {"before": before[m], **job} for m in options.models}
    return stage.run(heads_model, options, jobs, blas=judged_as.feature_blas, on_progress=on_progress)


def heads_model(model: str, options: Options, before: Upstream, judged_as: BaselineOptions, recipe: HeadRecipe) -> Path:
    """One model in this process; returns the artefact's folder."""
    with opened(model) as loaded:
        records, dataset = before.open()
        built = artifacts.build(
            "prerouter",
            inputs={"snapshot": dataset.artifact.content, "routes": before.routes.content},
            params={
                **asdict(recipe),
                "seed": options.seed,
                "judged_as": judged_as.own(),
                "runtime": models.runtime_identity(loaded.precision, loaded.residency),
            },
            make=lambda folder: _Study(folder, loaded, records, dataset, recipe, judged_as, options.seed).run(),
        )
    return built.path


class _Study:
    """One model's heads: features regenerated once, then each form trained, saved, and judged from its file."""

    def __init__(self, folder: Path, loaded, records: Records, dataset: Dataset, recipe: HeadRecipe, judged_as, seed):
        self.folder, self.loaded, self.dataset, self.recipe, self.seed = folder, loaded, dataset, recipe, seed
        self.judged_as, self.status = judged_as, labels_status(dataset, dataset.exact)
        self.wiring = tier_of(loaded, recipe.hidden).wiring
        shape = BatchShape(judged_as.batch_tokens, judged_as.chunk)
        hidden = regenerate(loaded, dataset, records, ("moe_input",), shape)["moe_input"]
        sets = [name for name in judged_as.sets if name != CALIBRATED_ON]
        self.held = HeldOut.of(dataset, sets, cache_fraction=judged_as.cache_fraction)
        held = np.zeros(dataset.routes.tokens, bool)
        held[self.held.rows] = True
        wanted = {"train": dataset.rows("train"), "calibration": dataset.rows(CALIBRATED_ON), "held": held}
        self.rows = {name: head_rows(hidden, dataset.routes, self.wiring, mask) for name, mask in wanted.items()}

    def run(self) -> dict[str, Any]:
        routes, layers = self.dataset.routes, consumers(self.wiring)
        judged: list[Judged] = []
        for control in head_controls(self.seed):
            control.fit(routes.select(self.dataset.rows("train")))
            judged.append(self._judge(control.name, control.horizon, control.iter_scores, layers))
        history = {}
        for number, form in enumerate(FILES):
            history[form] = self._train(form, number)
            judged.append(self._judge_file(form, layers))
        header = {"snapshot": self.dataset.artifact.content, "cache_bytes": self.held.cache_bytes}
        write_ranks(self.folder / RANKS, judged, self.held, header)
        rows = [row for j in judged for row in j.rows]
        artifacts.write_json(self.folder / TABLE, rows + compared(judged, self.held, routes.top_k))
        files = {p.name: artifacts.digest_file(p) for p in sorted(self.folder.iterdir()) if p.name[0] != "."}
        artifacts.write_json(self.folder / HISTORY, history)  # holds times, so it is no part of the identity
        sizes = {f"{form}_bytes": (self.folder / name).stat().st_size for form, name in FILES.items()}
        return {"train_tokens": len(self.rows["train"].target), **sizes, "content": artifacts.digest_json(files)}

    def _identity(self, form: str, width: int) -> HeadIdentity:
        shape = self.loaded.geometry
        return HeadIdentity(
            model=self.loaded.digests["model"],
            top_k=shape.top_k,
            experts=shape.experts,
            width=shape.hidden,
            hidden=width,
            owners=self.wiring.owners,
            form=form,
            snapshot=self.dataset.artifact.content,
        )

    def _train(self, form: str, number: int) -> dict[str, Any]:
        """Train, calibrate and write one form."""
        width = self.recipe.hidden if form == "full" else self.recipe.rank
        identity, recipe = self._identity(form, width), self.recipe.of(form, self.seed)
        rows = self.rows["train"].examples(self.dataset.routes, self.wiring)
        by_heart = self._learn_by_heart(identity, rows, recipe)
        heads, state = TorchHeads(identity, seed=self.seed), self.folder / f".{number}.state"

        def progress(done: int, total: int, loss: float) -> None:
            models.report_progress({"done": number * total + done, "total": len(FILES) * total})

        began = time.perf_counter()
        losses = fit(heads, rows, recipe, gate1=self.status, checkpoint=state, on_step=progress)
        seconds = time.perf_counter() - began
        state.unlink(missing_ok=True)
        few = self.rows["calibration"].examples(self.dataset.routes, self.wiring)
        if len(few) == 0:
            raise ContractError("no rows to calibrate on", field=CALIBRATED_ON, got=0, expected=">= 1")
        weights = self.dataset.routes.weights[self.rows["calibration"].target][:, self.wiring.consumer_index]
        write_calibrated(self.folder / FILES[form], heads, self.loaded.family, few, weights)
        parameters = sum(p.numel() for p in heads.parameters())
        return {
            "loss": losses,
            "seconds": seconds,
            "examples_per_second": len(rows) * len(losses) / seconds,
            "parameters": parameters,
            "overfit_recall": by_heart,
            "weight_error": self._weight_error(heads, few, weights),
        }

    def _weight_error(self, heads: TorchHeads, rows: Examples, weights: np.ndarray) -> dict[str, float]:
        """Mean absolute difference of a weight on native ids: of the heads' own, and of equal ones."""
        own = self.loaded.family.weights(heads.scores(rows.features), rows.ids)
        equal = weights.mean(-1, keepdims=True)
        return {"heads": float(np.abs(own - weights).mean()), "equal": float(np.abs(equal - weights).mean())}

    def _learn_by_heart(self, identity: HeadIdentity, rows, recipe: Recipe) -> float:
        """Recall at 1 × K on a few training tokens after training on them alone. Heads this small learn few.

        Raises:
            GateRefusedError: not learnt: features, labels or loss do not belong together.
        """
        count = min(len(rows), self.recipe.overfit_tokens)
        few = rows.rows(np.linspace(0, len(rows) - 1, count).astype(int))
        heads = TorchHeads(identity, seed=self.seed)
        by_heart = replace(
            recipe, epochs=self.recipe.overfit_epochs, batch=64, weight_decay=0.0, over=0.0, learning_rate=1e-2
        )
        fit(heads, few, by_heart, gate1=self.status)
        recall = float(recalled(heads.scores(few.features), few.ids).mean())
        if recall < self.recipe.overfit_recall:
            raise GateRefusedError(
                f"heads cannot learn {len(few)} tokens by heart",
                field=f"overfit_recall ({identity.form})",
                got=round(recall, 4),
                expected=f">= {self.recipe.overfit_recall}",
                fix="look at features, labels and loss; or give them more width, epochs or fewer tokens",
            )
        return recall

    def _judge_file(self, form: str, layers: np.ndarray) -> Judged:
        """The file's heads, as anyone will load them: rounded to the file's type."""
        file = read_heads(self.folder / FILES[form])
        confidence = np.array(file.identity.confidence, np.float32)[None, :, :, None]
        logits = TorchHeads.of(file).scores(self.rows["held"].features)
        probability = 0.5 * (1 + np.tanh(0.5 * (logits * confidence[:, :, 0] + confidence[:, :, 1])))
        rows = self.rows["held"]
        within = HeadRows(rows.features, np.searchsorted(self.held.rows, rows.target))
        whole = on_layers(probability, self.wiring, within, self.held.routes.tokens, fill=0.0)

        def blocks(routes: Routes) -> Iterator[tuple[slice, np.ndarray]]:
            yield slice(0, routes.tokens), whole

        return self._judge(f"prerouter, {form}", HORIZON, blocks, layers, probabilities=True)

    def _judge(self, name: str, horizon: str, blocks, layers: np.ndarray, *, probabilities: bool = False) -> Judged:
        return judge(
            name,
            horizon,
            blocks,
            self.held,
            layers=layers,
            miss_recall=self.judged_as.miss_recall,
            probabilities=probabilities,
        )


def write_calibrated(path: Path, heads: TorchHeads, family: RoutingFamily, rows: Examples, weights: np.ndarray) -> None:
    """Fold in the scale at which `family` gives native experts the weights nearest to `weights [T, n, K]`, calibrate
    the probability that an expert is used, both on `rows`, and write a weight file."""
    heads.fold(weight_scale(family, heads.scores(rows.features), rows.ids, weights))
    scale, offset = calibrate(heads.scores(rows.features), rows.ids, candidates=2 * heads.identity.top_k)
    pairs = tuple((float(a), float(b)) for a, b in zip(scale, offset, strict=True))
    write_heads(path, replace(heads.identity, confidence=pairs), *heads.tensors())


def compared(judged: list[Judged], held: HeldOut, top_k: int) -> list[dict[str, Any]]:
    """Recall at 1 × K of both forms less that of every other ranking, row by row on the first set."""
    where = next(iter(held.counted))
    counted, out = held.counted[where], []
    for head in (j for j in judged if j.name.startswith("prerouter")):
        for other in judged:
            if other is head:
                continue
            hits = [(j.ranks[counted][:, head.layers] < top_k).astype(np.float32) for j in (head, other)]
            found: Estimate = paired_difference(*hits, held.cluster[counted])
            row = {"ranking": head.name, "horizon": HORIZON, "set": where, "metric": "recall@1x less"}
            out.append({**row, "group": f"{other.name} ({other.horizon})", **found.plain()})
    return out


def main(arguments: list[str] | None = None) -> None:
    """Train heads and put them where `find_weights` looks first: beside each model, the reference models by default."""
    parser = Parser(prog="python -m moelab.flywheel.head_training", description=__doc__)
    parser.add_argument("profile", choices=PROFILES, help="tiny or reference: how much is captured and trained on")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names or paths (default: the embedded models)")
    given = parser.parse_args(arguments)
    chosen = {"models": given.models} if given.models else {}
    trained = train_heads(BaselineOptions.from_profile(given.profile, **chosen))
    for model, artifact in trained.items():
        for name in FILES.values():
            target = models.find(models.split_budget(model)[0]) / name
            artifacts.write_bytes(target, artifact.file(name).read_bytes())
            print(target, target.stat().st_size)
        for row in artifacts.read_json(artifact.file(TABLE)):
            all_rows = row["metric"] == "recall@1x" and row["group"] == "all"
            if row["set"] == "validation" and (all_rows or row["metric"] == "recall@1x less"):
                words = (row["metric"], row["ranking"], row["group"], f"{row['value']:+.4f} ± {row['se']:.4f}")
                print("  ", *words, sep="  ")


if __name__ == "__main__":
    main()
