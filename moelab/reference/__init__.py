"""Reference models: small mixture-of-experts language models that are really trained, and held against real ones.

    corpus = read_corpus("folder/of/text")
    built = train_models(ReferenceOptions.from_profile("tiny"))     # one mlx-lm checkpoint a family
    compare(built["softmax"].path, tokens)                          # torch against mlx: logits and routes

A study of routing needs a model whose routes mean something. These are trained from plain text with torch
and transformers, exported to checkpoints that stock mlx-lm loads, and calibrated: the same figures are
computed on their routes and on recorded routes of large models, so that a reader sees the distance.
"""

from ..lazy import exports

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
__getattr__, __dir__, __all__ = exports(__name__, _HOMES)
