"""On-policy training of prerouter heads, and whether it is worth it.

Where a prediction is the route, heads are told of states that earlier predictions have made, and of experts that were
their own choice. Teacher-forced heads have never seen such. Here they are trained on them, in passes, towards a fixed
point: the training texts are run under `replace` with the heads there are (`own_states`); the heads go on learning on
what was recorded, with the native gate's choice on these very states as the label; and again.

    teacher-forced       where everything starts: `head_training`
    more of the same     as many epochs more on native states: what more training alone would have done
    on-policy, pass 1…   after each pass

All are measured alike, on texts of validation owners: next-token loss over the native model's under `replace` and
`replace_true_weights`, paired token by token, standard errors clustered by thread. Scale of the weights and calibration
are fitted again on the temporal holdout, on the states that each was trained for.

    python -m moelab.flywheel.on_policy reference OUT.json     the figures in reports/LOG.md
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import artifacts, models
from ..artifacts import Artifact
from ..commands import Parser
from ..params import PROFILES, Options
from . import stage
from .baselines import BaselineOptions, Upstream, upstream
from .batches import BatchShape
from .engine import opened
from .estimates import clustered_mean, paired_difference
from .examples import regenerate
from .head_recipe import tier_of
from .head_training import CALIBRATED_ON, FILES, train_heads, write_calibrated
from .own_states import States, native_weights, own_states
from .train import Recipe, fit
from .training import labels_status

if TYPE_CHECKING:
    from ..prerouter import HeadFile

TABLE, TEACHER, MORE, PASS = "table.json", "teacher-forced", "more of the same", "on-policy, pass {}"
MODES = ("replace", "replace_true_weights")
EVALUATED_ON = "validation"


@dataclass(frozen=True, kw_only=True)
class OnPolicyRecipe:
    """`prompt`: tokens of a text that are prefilled. `epochs`: over the training rows, in each of `passes`."""

    prompt: int = 32
    passes: int = 2
    epochs: int = 4
    batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 1.0
    over: float = 0.05
    calibration: float = 1.0

    def training(self, seed: int, passes: int = 1) -> Recipe:
        own = asdict(self)
        names = ("batch", "learning_rate", "weight_decay", "over", "calibration")
        return Recipe(epochs=passes * self.epochs, seed=seed, **{name: own[name] for name in names})


def on_policy(
    options: Options, recipe: OnPolicyRecipe | None = None, *, on_progress: stage.Progress | None = None
) -> dict[str, Artifact]:
    """Train and measure on every model, from the full heads of `train_heads`: model → artefact of kind `on-policy`.

    Raises:
        GateRefusedError: as `train_heads`.
    """
    before, heads = upstream(options), train_heads(options)
    job = {"judged_as": options.upstream(BaselineOptions), "recipe": recipe or OnPolicyRecipe()}
    jobs = {m: {"before": before[m], "heads": heads[m], **job} for m in options.models}
    return stage.run(on_policy_model, options, jobs, blas=job["judged_as"].feature_blas, on_progress=on_progress)


def on_policy_model(
    model: str, options: Options, before: Upstream, heads: Path, judged_as: BaselineOptions, recipe: OnPolicyRecipe
) -> Path:
    """One model in this process; returns the artefact's folder."""
    start = artifacts.open_artifact(heads)
    with opened(model) as loaded:
        built = artifacts.build(
            "on-policy",
            inputs={"snapshot": before.snapshot.content, "routes": before.routes.content, "heads": start.content},
            params={
                **asdict(recipe),
                "seed": options.seed,
                "runtime": models.runtime_identity(loaded.precision, loaded.residency),
            },
            make=lambda folder: _Study(folder, loaded, before, start, judged_as, recipe, options.seed).run(),
        )
    return built.path


class _Study:
    """One model: native states regenerated once, its own recorded in every pass."""

    def __init__(self, folder, loaded, before: Upstream, start: Artifact, judged_as, recipe: OnPolicyRecipe, seed: int):
        from ..prerouter import read_heads

        self.folder, self.loaded, self.recipe, self.seed = folder, loaded, recipe, seed
        records, self.dataset = before.open()
        self.texts = [np.asarray(o.token_ids) for o in records.open(self.dataset.table, loaded, purpose="train")]
        self.first = np.searchsorted(self.dataset.routes.thread, np.arange(len(self.texts)))
        self.start = read_heads(start.file(FILES["full"]))
        self.wiring = tier_of(loaded, self.start.identity.hidden).wiring
        shape = BatchShape(judged_as.batch_tokens, judged_as.chunk)
        hidden = regenerate(loaded, self.dataset, records, ("moe_input",), shape)["moe_input"]
        self.native = States.teacher_forced(hidden, self.dataset.routes)

    def run(self) -> dict[str, Any]:
        passes = self.recipe.passes
        heads = {TEACHER: self.start, MORE: self._train(MORE, self.start, self.native, passes)}
        current = self.start
        for number in range(1, passes + 1):
            models.report_progress({"done": number, "total": passes + 1})
            current = heads[PASS.format(number)] = self._train(PASS.format(number), current, self._own(current))
        losses = {name: self._measure(file) for name, file in heads.items()}
        artifacts.write_json(self.folder / TABLE, [row for name in heads for row in self._rows(name, losses)])
        return {"tokens": len(losses[TEACHER]["cluster"]), "texts": len(self._chosen(EVALUATED_ON))}

    def _chosen(self, *sets: str) -> list[int]:
        """Texts of these sets that go on behind their prompt."""
        table = self.dataset.table
        return [i for i, t in enumerate(self.texts) if table[i]["set"] in sets and len(t) > self.recipe.prompt + 1]

    def _own(self, file: HeadFile) -> States:
        """What training and calibration texts look like under `replace`; their prompts, and all others, natively."""
        hidden, executed, native = (array.copy() for array in vars(self.native).values())
        some, routes, prompt = self._chosen("train", CALIBRATED_ON), self.dataset.routes, self.recipe.prompt
        found = own_states(self.loaded, file.bank(), self.wiring, [self.texts[i] for i in some], prompt=prompt)
        for text, states in zip(some, found, strict=True):
            span = slice(self.first[text], self.first[text] + int((routes.thread == text).sum()))
            rows = np.arange(span.start, span.stop)[routes.position[span] >= prompt]
            at = routes.position[rows] - prompt
            hidden[rows], executed[rows], native[rows] = states.hidden[at], states.executed[at], states.native[at]
        return States(hidden, executed, native)

    def _train(self, name: str, start: HeadFile, states: States, passes: int = 1) -> HeadFile:
        """Go on from a file's heads; written, and read back as anyone will load them."""
        from ..prerouter import TorchHeads, read_heads

        heads = TorchHeads.of(start)
        heads.identity = replace(start.identity, policy="" if states is self.native else name, confidence=())
        heads.fold(np.array(start.identity.confidence)[:, 0])  # weights were scaled: back to log-odds
        routes = self.dataset.routes
        _, rows = states.rows(routes, self.wiring, self.dataset.rows("train"))
        gate1 = labels_status(self.dataset, self.dataset.exact)
        fit(heads, rows, self.recipe.training(self.seed, passes), gate1=gate1)
        few, examples = states.rows(routes, self.wiring, self.dataset.rows(CALIBRATED_ON))
        weights = native_weights(self.loaded, states, self.wiring.consumer_index)[few.target]
        path = self.folder / f"{name.replace(', ', '-').replace(' ', '-')}.safetensors"
        write_calibrated(path, heads, self.loaded.family, examples, weights)
        return read_heads(path)

    def _measure(self, file: HeadFile) -> dict[str, np.ndarray]:
        """Of each validation token behind the prompts: `loss [modes + 1, N]`, the native model's first; `hits
        [modes, N, n]`, predicted experts that the native gate would choose on the state that it has; `cluster [N]`."""
        from ..prerouter.lockstep import OWN, Arm, Lockstep

        some = self._chosen(EVALUATED_ON)
        tokens = np.full((len(some), max(len(self.texts[i]) for i in some)), OWN, np.int32)
        for row, index in enumerate(some):
            tokens[row, : len(self.texts[index])] = self.texts[index]
        decoded = np.broadcast_to(np.arange(tokens.shape[1]) >= self.recipe.prompt, tokens.shape)
        arms = [Arm(name="native", mode="off"), *(Arm(name=mode, mode=mode) for mode in MODES)]
        steps = Lockstep(self.loaded, file.bank(), self.wiring, arms).run(tokens, decoded)
        counted = np.isfinite(steps.loss[0]) & decoded
        thread = self.dataset.of_thread("thread")[self.first[some]]
        return {
            "loss": steps.loss[:, counted],
            "hits": steps.hits[1:, counted][..., self.wiring.consumer_index],
            "cluster": np.unique(thread, return_inverse=True)[1][:, None].repeat(tokens.shape[1], 1)[counted],
        }

    def _rows(self, name: str, losses: dict[str, dict[str, np.ndarray]]) -> list[dict[str, Any]]:
        own, teacher = losses[name], losses[TEACHER]
        cluster, rows, top_k = own["cluster"], [], self.loaded.family.top_k
        for number, mode in enumerate(MODES):
            loss = own["loss"][number + 1]
            figures = {
                "loss over native": paired_difference(loss, own["loss"][0], cluster),
                "loss less teacher-forced": paired_difference(loss, teacher["loss"][number + 1], cluster),
                "recall": clustered_mean(own["hits"][number] / top_k, cluster),
                "recall less teacher-forced": paired_difference(
                    own["hits"][number] / top_k, teacher["hits"][number] / top_k, cluster
                ),
            }
            rows += [{"heads": name, "mode": mode, "metric": metric, **f.plain()} for metric, f in figures.items()]
        return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure the reference models and write the report."""
    parser = Parser(prog="python -m moelab.flywheel.on_policy", description=__doc__)
    parser.add_argument("profile", choices=PROFILES, help="tiny or reference: the snapshot and heads to start from")
    parser.add_argument("out", type=Path, metavar="OUT", help="JSON file to write")
    given = parser.parse_args(arguments)
    found = on_policy(BaselineOptions.from_profile(given.profile))
    rows = [{"model": m, **row} for m, a in found.items() for row in artifacts.read_json(a.file(TABLE))]
    report = {
        "schema_version": 1,
        "command": f"python -m moelab.flywheel.on_policy {given.profile} OUT.json",
        "date": datetime.date.today().isoformat(),
        "recipe": asdict(OnPolicyRecipe()),
        "rows": rows,
    }
    artifacts.write_json(given.out, report)
    for line in lines(rows):
        print(line)


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One row as one line of text."""
    return [
        f"{r['model']:<8} {r['heads']:<18} {r['mode']:<21} {r['metric']:<27} {r['value']:+.4f} ± {r['se']:.4f}"
        for r in rows
        if r["se"] is not None
    ]


if __name__ == "__main__":
    main()
