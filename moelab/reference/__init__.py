"""Reference models: small mixture-of-experts language models that are really trained, and held against real ones.

    corpus = read_corpus("folder/of/text")
    built = train_models(ReferenceOptions.from_profile("tiny"))     # one mlx-lm checkpoint a family
    compare(built["softmax"].path, tokens)                          # torch against mlx: logits and routes

A study of routing needs a model whose routes mean something. These are trained from plain text with torch
and transformers, exported to checkpoints that stock mlx-lm loads, and calibrated: the same figures are
computed on their routes and on recorded routes of large models, so that a reader sees the distance.
"""

from importlib import import_module

_HOMES = {
    "corpus": ("Corpus", "read_corpus", "write_thread_texts"),
    "tokens": ("encode", "load_tokenizer", "sample_windows", "save_tokenizer", "train_tokenizer", "windows"),
    "recipe": ("FAMILIES", "Recipe", "make_network"),
    "routers": ("RouterTap", "balance_loss"),
    "training": ("Trained", "evaluate", "train"),
    "checkpoint": ("export", "expert_tensors", "load_torch"),
    "comparison": ("Comparison", "compare"),
    "figures": ("Figure", "RouteFigures", "domain_distance", "load_balance", "overlap", "route_figures", "use_counts"),
    "calibration": ("calibrate", "real_figures"),
    "card": ("table_rows", "write_tables"),
    "notebook": ("ReferenceOptions", "train_models"),
    "views": ("calibration_frame", "comparison_frame", "evaluation_frame", "loss_frame", "text_frame"),
}
_OWNER = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_OWNER)


def __getattr__(name: str):
    if name not in _OWNER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_OWNER[name]}", __name__), name)


def __dir__():
    return __all__
