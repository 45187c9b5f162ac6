"""The prerouter: a small head per layer that tells the next layer's route one token ahead.

    from moelab.prerouter import edge0_35b, find_weights, load_heads
    tier = edge0_35b()
    bank = load_heads(find_weights(tier.spec.weights_file, model_dir), tier.spec, tier.model)
    logits = bank.head(6)(hidden, current, previous)        # route of layer 7 at the next token

    from moelab.prerouter import install_prerouter
    prerouter = install_prerouter(engine.loaded, tier.spec, engine, mode="advise")

Where things are: `spec`, `heads` (`torch_form`), weight `files` and their `identity`; on a streamed model `install`,
`hooks` in its blocks, the `stager` that keeps predictions from token to token (`calls` of heads, `advice`, `fills` of
slots or cache), `modes` of using them, and the `supply` map of where every route came from.

Names are imported on first use: `spec` needs nothing, `heads` and what runs them mlx, `torch_form` torch.
"""

from ..lazy import exports

_HOMES = {
    "spec": ("PrerouterSpec", "Tier", "TIERS", "Wiring", "edge0_35b", "edge0_8b", "scaled"),
    "heads": ("HeadBank", "PrerouterHead", "SharedHead", "multi_hot"),
    "identity": ("HeadFile", "HeadIdentity"),
    "torch_form": ("TorchHeads", "told"),
    "install": ("Prerouter", "install_prerouter", "uninstall"),
    "modes": ("MODES", "Prediction"),
    "stager": ("CrossTokenStager", "LingPrerouterStager", "PrerouterStager"),
    "supply": ("Source", "Supply"),
    "files": ("convert_legacy", "find_weights", "load_heads", "read_heads", "write_heads"),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOMES)
