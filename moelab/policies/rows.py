"""The tokens of a batch as rows, so that an MLP can run on some of them.

In the shape descriptions, `B` is the batch, `T` the tokens, `H` the hidden width, `F` the features
of a token and `R` the rows (`B * T`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import check_tensor
from moelab.policies.combination import Combination
from moelab.policies.decisions import Decision

# `[rows, H]` and token-aligned arguments to `[rows, H]` of the same dtype.
Mlp = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """What belongs to each token.

    hidden: `[R, H]`.
    token_args: by name, `[R, ...]`.
    features: `[R, F]`, or None for a combination without a learned head.
    """

    hidden: Tensor
    token_args: dict[str, Tensor]
    features: Tensor | None

    @classmethod
    def of(
        cls,
        routes: Decision,
        hidden_states: Tensor,
        *,
        experts: Sequence[object],
        combination: Combination,
        mixture_features: Tensor | None,
        token_args: Mapping[str, Tensor],
    ) -> Rows:
        """Flatten a batch. Raises `PolicyError` for anything that does not fit the routes."""
        shape = routes.tokens
        check_tensor("hidden_states", hidden_states, (*shape, "H"))
        if isinstance(experts, str | Mapping) or not hasattr(experts, "__len__"):  # an nn.ModuleList is no Sequence
            got = type(experts).__name__
            raise PolicyError("experts is not a sequence", field="experts", got=got, expected="a list, as expert_ids")
        if len(experts) != len(routes.expert_ids):
            expected = f"{len(routes.expert_ids)} experts"
            raise PolicyError("experts do not match expert_ids", field="experts", got=len(experts), expected=expected)
        if not isinstance(token_args, Mapping):
            got = type(token_args).__name__
            raise PolicyError("token_args is not a mapping", field="token_args", got=got, expected="tensors by name")
        for name, value in token_args.items():
            if not isinstance(value, Tensor) or tuple(value.shape[:2]) != shape:
                field = f"token_args[{name!r}]"
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                expected = f"a tensor [{shape[0]}, {shape[1]}, ...]"
                raise PolicyError("a token argument is not aligned", field=field, got=got, expected=expected)
        if mixture_features is not None:
            check_tensor("mixture_features", mixture_features, (*shape, "F"))
        if (mixture_features is not None) != ("features" in combination.needs):
            problem = f"mixture_features do not fit {type(combination).__name__}"
            got = None if mixture_features is None else list(mixture_features.shape)
            expected = "[B, T, F]" if mixture_features is None else "none"
            raise PolicyError(problem, field="mixture_features", got=got, expected=expected)
        return cls(
            hidden_states.flatten(0, 1),
            {name: value.flatten(0, 1) for name, value in token_args.items()},
            None if mixture_features is None else mixture_features.flatten(0, 1),
        )

    def run(self, mlp: Mlp, rows: Tensor | None, name: str) -> Tensor:
        """`[rows, H]` of an MLP on some rows, which are copied for it; None = on all."""
        check_callable(name, mlp)
        hidden = _some(self.hidden, rows)
        args = {key: _some(value, rows) for key, value in self.token_args.items()}
        return check_output(name, mlp(hidden, **args), hidden)

    def combination_args(
        self, combination: Combination, rows: Tensor | None, dense: Tensor | None
    ) -> dict[str, Tensor]:
        """What a combination needs beside outputs and scores, on some rows; dense: `[R, H]` anchor."""
        sources = {"features": self.features, "anchor_output": dense}
        return {name: _some(sources[name], rows) for name in combination.needs}


def _some(values: Tensor, rows: Tensor | None) -> Tensor:
    return values.clone() if rows is None else values[rows]


def check_callable(name: str, mlp: object) -> None:
    """Refuse what cannot be run."""
    if not callable(mlp):
        raise PolicyError(f"{name} cannot be called", field=name, got=type(mlp).__name__, expected="an MLP")


def check_output(name: str, output: Tensor, hidden: Tensor) -> Tensor:
    """Refuse an MLP's output that does not have the shape and dtype of its input."""
    return check_tensor(name, output, tuple(hidden.shape), dtypes=(hidden.dtype,))
