"""From text to training windows: a byte-level BPE tokenizer, token streams, and how windows are drawn.

A domain's documents become one stream of ids, each document closed by the end-of-text token; windows of a
fixed length are cut from it anywhere. Domains are drawn in proportion to the *square root* of their length:
by length the largest language would fill nine windows in ten, equally the smallest would be seen hundreds
of times over.

The draw of step s depends on the seed and on s alone, so that training resumed after a kill sees the very
windows it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts import write_bytes, write_json
from ..errors import ParameterError, RecordError
from .chat import CHAT_TEMPLATE

END = "<|endoftext|>"
SPECIAL = (END, "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>")
"""Special tokens, with the ids 0 to 4. Each of them ends a turn when it is generated."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of at most `vocabulary` entries; digits stand alone.

    Raises:
        ParameterError: a vocabulary that cannot hold the special tokens and the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary < len(SPECIAL) + len(alphabet):
        raise ParameterError(
            "the vocabulary is too small", field="vocabulary", got=vocabulary, expected=len(SPECIAL) + len(alphabet)
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[*SPECIAL], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Any:
    """A `tokenizers.Tokenizer` from a `tokenizer.json`.

    Raises:
        RecordError: a special token is absent or has another id.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    found = [tokenizer.token_to_id(token) for token in SPECIAL]
    if found != [*range(len(SPECIAL))]:
        raise RecordError("special tokens", file=path, field=" ".join(SPECIAL), got=found, expected="0 to 4")
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, *, context: int) -> None:
    """Write what mlx-lm and transformers read: tokenizer, its configuration, chat template, what ends a turn."""
    write_bytes(folder / "tokenizer.json", tokenizer.to_str().encode())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_bytes(folder / "chat_template.jinja", CHAT_TEMPLATE.encode())
    ends = [*range(len(SPECIAL))]
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": ends, "pad_token_id": 0})


def encode(documents: Mapping[str, Iterable[str]], tokenizer: Any) -> dict[str, np.ndarray]:
    """Domain → one stream `i32[N]` of all its documents, each closed by the end-of-text token.

    Text that spells a role token becomes that token: it is how the roles of a chat are written.
    """
    end = tokenizer.token_to_id(END)
    streams = {}
    for domain, texts in documents.items():
        encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        streams[domain] = np.concatenate([np.array([*item.ids, end], np.int32) for item in encoded])
    return streams


def windows(stream: np.ndarray, length: int, *, limit: int | None = None, domain: str = "") -> np.ndarray:
    """The first windows `i32[n,length]` of a stream, side by side; the incomplete last one is left out.

    Raises:
        RecordError: the stream is shorter than one window.
    """
    count = len(stream) // length
    if not count:
        raise RecordError("text is shorter than a window", field=domain or "stream", got=len(stream), expected=length)
    count = min(count, limit or count)
    return stream[: count * length].reshape(count, length)


def sample_windows(
    streams: Mapping[str, np.ndarray], *, batch: int, length: int, seed: int, step: int
) -> tuple[np.ndarray, list[str]]:
    """`(i64[batch,length], domain of each)` of one training step; domains weighted by √length.

    Raises:
        RecordError: a stream is shorter than one window.
    """
    names = sorted(streams)
    for name in names:
        if len(streams[name]) < length:
            raise RecordError("text is shorter than a window", field=name, got=len(streams[name]), expected=length)
    weight = np.sqrt([len(streams[name]) for name in names])
    draw = np.random.default_rng([seed, step])
    chosen = [names[i] for i in draw.choice(len(names), size=batch, p=weight / weight.sum())]
    starts = [int(draw.integers(len(streams[name]) - length + 1)) for name in chosen]
    rows = [streams[name][start : start + length] for name, start in zip(chosen, starts, strict=True)]
    return np.stack(rows).astype(np.int64), chosen
