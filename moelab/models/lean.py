"""A process that runs a model and trains none needs no torch: 180 MiB less to begin with.

mlx-lm takes its tokenizers from transformers, and transformers loads torch wherever it is installed. Nothing of it is
used to run a model. A process with a memory budget can say so first:

    from moelab.models import without_torch
    without_torch()
    from moelab.streaming import StreamingEngine

It is a choice for the whole process, hence never made behind your back: transformers' own torch models cannot be used
in it afterwards. torch itself can.
"""

from __future__ import annotations

import importlib
import os
import sys

from ..errors import ContractError

__all__ = ["without_torch"]

QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def without_torch() -> None:
    """Load mlx-lm and transformers, and leave torch out of them. Calling it again does nothing.

    Raises:
        ContractError: transformers is loaded, and torch with it.
    """
    if "transformers" in sys.modules:
        if sys.modules["transformers"].utils.is_torch_available():
            raise ContractError(
                "transformers is loaded with torch", field="process", got="torch is in use",
                expected="without_torch() before anything imports transformers or mlx_lm",
            )  # fmt: skip
        return
    torch, quiet = sys.modules.get("torch"), os.environ.get(QUIET)
    sys.modules["torch"] = None  # Python then says that there is no such module, and transformers remembers that
    os.environ[QUIET] = "1"
    try:
        importlib.import_module("transformers").utils.is_torch_available()
        importlib.import_module("mlx_lm.generate")
    finally:
        del sys.modules["torch"]
        if torch is not None:
            sys.modules["torch"] = torch
        if quiet is None:
            del os.environ[QUIET]
        else:
            os.environ[QUIET] = quiet
