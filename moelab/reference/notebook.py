"""Notebook 01: train a model of each family from a folder of text, once, and keep what it learned.

`train_models` is the notebook's one function. Each family becomes a content-addressed folder that stock
`mlx_lm.load` reads, with the training history and the validation losses beside the weights. A killed
training goes on from its last saved step; a second call finds the folder and does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from .. import threads as transcripts
from ..artifacts import Artifact, build, digest_file, digest_json, root, write_json, write_tensors
from ..params import Options, param
from .corpus import Corpus, read_corpus, write_thread_texts
from .recipe import FAMILIES, Recipe
from .tokens import encode, load_tokenizer, train_tokenizer

HISTORY, LOSSES = "history.safetensors", "losses.json"
EVALUATED = 64
"""Validation windows a domain at most."""


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Options):
    """Parameters of notebook 01. The shape and schedule fields are those of `Recipe`."""

    notebook: ClassVar[str] = "01"

    text: str = param("", "folder of text, relative to the root, $VARIABLES expanded; empty: the threads' own text")
    families: list[str] = param(["softmax", "sigmoid"], "routing families to train", choices=FAMILIES)
    tokenizer: str = param("", "tokenizer.json to use; empty: train one on the text")
    vocabulary: int = param(1024, "entries of a tokenizer that is trained", min=261)
    hidden: int = param(64, "width of the residual stream", min=8)
    layers: int = param(4, "layers, each with experts", min=1)
    heads: int = param(2, "attention heads of 32", min=1)
    kv_heads: int = param(1, "key-value heads", min=1)
    experts: int = param(16, "experts a layer", min=2)
    expert_width: int = param(32, "width of an expert", min=1)
    groups: int = param(4, "sigmoid: groups of experts", min=1)
    kept_groups: int = param(2, "sigmoid: groups that are kept", min=1)
    steps: int = param(80, "training steps", min=1)
    batch: int = param(8, "windows a step", min=1)
    window: int = param(64, "tokens a window", min=2)
    peak_rate: float = param(4e-3, "highest learning rate", min=0.0)
    warmup: int = param(10, "steps of warm-up", min=0)
    cores: int = param(1, "threads that torch uses; it moves the last bits, so it is part of the identity", min=1)

    def recipe(self, family: str) -> Recipe:
        own = {name: getattr(self, name) for name in Recipe.__dataclass_fields__ if name in self.names()}
        return Recipe(family=family, **own)

    def text_folder(self) -> Path:
        """The folder of text; written from the threads when none is named."""
        if self.text:
            return root() / os.path.expandvars(self.text)
        threads = transcripts.read(root() / self.threads)
        inputs = {"threads": digest_json([[thread.content, sorted(thread.domains)] for thread in threads])}

        def make(folder: Path) -> Mapping[str, Any]:
            write_thread_texts(folder, threads)
            return {"threads": len(threads)}

        return build("reference-text", inputs=inputs, params={}, make=make).path


def train_models(options: ReferenceOptions, *, on_progress: Callable[[str], None] | None = None) -> dict[str, Artifact]:
    """Train, export and evaluate a model of each family: family → checkpoint folder.

    Raises as `read_corpus`, `load_tokenizer` and `train`.
    """
    corpus = read_corpus(options.text_folder())
    return {family: _built(options, family, corpus, on_progress or (lambda _: None)) for family in options.families}


def _built(options: ReferenceOptions, family: str, corpus: Corpus, tell: Callable[[str], None]) -> Artifact:
    recipe = options.recipe(family)
    given = root() / options.tokenizer if options.tokenizer else None
    inputs = {"text": corpus.digest, "tokenizer": digest_file(given) if given else None}
    params = {
        "recipe": recipe.own(),
        "vocabulary": None if given else options.vocabulary,
        "cores": options.cores,
        "libraries": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }

    def make(folder: Path) -> Mapping[str, Any]:
        import torch

        from .checkpoint import export
        from .training import evaluate, train

        tokenizer = load_tokenizer(given) if given else train_tokenizer(_texts(corpus), options.vocabulary)
        train_text, val_text = (encode(corpus.documents[split], tokenizer) for split in ("train", "val"))
        every = max(1, recipe.steps // 10)

        def on_step(step: int, loss: float, balance: float) -> None:
            if (step + 1) % every == 0:
                tell(f"{family}: step {step + 1} of {recipe.steps}, {loss:.2f} nats/token, balance {balance:.2f}")

        before = torch.get_num_threads()
        torch.set_num_threads(options.cores)
        try:
            vocabulary = tokenizer.get_vocab_size()
            trained = train(recipe, train_text, vocabulary, folder=folder, on_step=on_step)
            losses = evaluate(trained.network, val_text, window=recipe.window, limit=EVALUATED)
        finally:
            torch.set_num_threads(before)
        export(trained.network, tokenizer, folder)
        write_tensors(folder / HISTORY, {"loss": trained.loss, "balance": trained.balance}, {"family": family})
        write_json(folder / LOSSES, {d: {"nats": nats, "tokens": n} for d, (nats, n) in losses.items()})
        return {
            "parameters": sum(p.numel() for p in trained.network.parameters()),
            "tokens_seen": recipe.steps * recipe.batch * recipe.window,
            "first_loss": round(float(trained.loss[0]), 4),
            "last_loss": round(float(trained.loss[-1]), 4),
        }

    return build("reference", inputs=inputs, params=params, make=make)


def _texts(corpus: Corpus) -> list[str]:
    return [text for domain in corpus.domains for text in corpus.documents["train"][domain]]
