"""How messages become token ids: the house template, or the tokenizer's own chat template.

Tokenizers that have the house role tokens (the reference models') get the *house template*:
`<|role|> text` and a line feed, encoded message by message, so that the ids of a message depend on
nothing but the message. Any other tokenizer gets its own chat template.

Quoted special tokens are text: `<|endoftext|>` inside a message must not end the document. The house
template encodes it as plain characters; a chat template cannot, so there it is refused.

Digests here are of behaviour: of the ids that a fixed text becomes, not of a tokenizer's files.
"""

from __future__ import annotations

import re
from typing import Any

from moelab.artifacts import digest_json
from moelab.errors import RecordError, UnsupportedModelError

from .records import ROLES, Message, Thread, ToolCall

END = "<|endoftext|>"
_PROBE = (
    "Ünïcode, 中文 かな русский العربية 😀; tabs\tand\r\nlines\n\n  spaces   trail  \u2028 \u00a0"
    '0123456789 3.14e-10 snake_case CamelCase don\'t <call>f({"a": [1]})</call> <think>x</think>'
    "<|endoftext|><|user|><|assistant|><|tool|><|system|> e\u0301 \u00e9"
)
_PROBE_THREAD = Thread(
    id="probe",
    owner="moelab",
    source="moelab",
    messages=(
        Message(role="system", text="Be brief."),
        Message(role="user", text="Sum 1 and 2."),
        Message(
            role="assistant", reasoning="One step.", text="Adding.", tool_calls=(ToolCall("add", '{"a": 1, "b": 2}'),)
        ),
        Message(role="tool", name="add", text=""),
        Message(role="assistant", text="<|endoftext|> 3"),
    ),
)

# Chat templates call `strftime_now`, which reads the clock. A macro of that name hides it; the empty
# expression keeps the block tag before it from eating the template's first line feed.
_THREAD_DATE = (
    "{% macro strftime_now(format) %}{{ thread_dates[format] if format in thread_dates"
    " else raise_exception('it asks for a date that the thread does not have') }}{% endmacro %}{{ '' }}"
)
_DATE_FORMAT = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")


def tokenizer_digest(tokenizer: Any) -> str:
    """Identity of a tokenizer as behaviour: what a fixed text becomes, with special tokens and without."""
    codec = Codec(tokenizer)
    return digest_json({"text": codec.text(_PROBE), "special": codec.special(_PROBE)})


def template_digest(tokenizer: Any) -> str:
    """Identity of the template that `render` uses: the ids of a fixed thread, or a chat template's text."""
    codec = Codec(tokenizer)
    return digest_json(HouseWriter(_PROBE_THREAD, codec).rest()[0] if codec.house else codec.chat_template)


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer when they are sampled: end of text, and under the house template any role."""
    codec = Codec(tokenizer)
    if codec.house:
        return frozenset(codec.id(token) for token in (END, *_role_tokens()))
    ids = getattr(tokenizer, "eos_token_ids", None) or [tokenizer.eos_token_id]
    return frozenset(i for i in ids if i is not None)


def _role_tokens() -> list[str]:
    return [f"<|{role}|>" for role in ROLES]


class Codec:
    """The few things asked of a tokenizer, whether `tokenizers`, `transformers` or mlx-lm's wrapper."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._bare = hasattr(tokenizer, "token_to_id")
        find = tokenizer.token_to_id if self._bare else tokenizer.get_vocab().get
        self._ids = {token: find(token) for token in (END, *_role_tokens())}
        self.house = None not in self._ids.values()
        self.chat_template = getattr(tokenizer, "chat_template", None)
        if renderer := getattr(tokenizer, "_chat_template", None):  # mlx-lm's renderers written in Python
            self.chat_template = f"{renderer.__module__}.{renderer.__qualname__}"
        if not self.house and not self.chat_template:
            raise UnsupportedModelError(
                "tokenizer has neither the house role tokens nor a chat template",
                field="tokenizer",
                got=type(tokenizer).__name__,
                expected=f"{' '.join(_role_tokens())}, or chat_template",
            )

    def id(self, token: str) -> int | None:
        """Id of a house token; None where the tokenizer has no such token."""
        return self._ids[token]

    def text(self, text: str) -> list[int]:
        """Ids of text in which nothing is special."""
        if not self._bare:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        before = self._tokenizer.encode_special_tokens
        self._tokenizer.encode_special_tokens = True
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = before

    def special(self, text: str) -> list[int]:
        """Ids of text in which special tokens are themselves; none is added."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids.ids if self._bare else list(ids)

    def decode(self, ids: list[int], *, skip_special: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def special_tokens(self) -> list[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        return sorted({*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)})

    def chat(self, messages: list[dict[str, Any]], thread: Thread, *, prompt: bool) -> str:
        """The chat template's text. A template that asks for today gets the day on which the thread began."""
        from jinja2 import TemplateError

        dated = {}
        if "strftime_now" in str(self.chat_template):
            template = self._tokenizer.get_chat_template()
            formats = _DATE_FORMAT.findall(template) if thread.started is not None else ()
            dates = {pattern: thread.started.strftime(pattern) for _, pattern in formats}
            dated = {"chat_template": _THREAD_DATE + template, "thread_dates": dates}
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **dated)
        except TemplateError as error:
            raise RecordError(
                "the chat template refuses this thread",
                field="chat_template",
                got=str(error),
                expected="a template that takes its roles, their order and its date",
            ) from None


Parts = list[tuple[int | None, list[int]]]
"""Ids to feed, cut at messages: `(index of the message that begins here, or None, ids)`."""


class HouseWriter:
    """`<|role|> text` and a line feed for each message. An answer starts after its role token.

    A writer gives `prompt(k)`: what to feed before answer k, and why it cannot follow what was fed (or
    None); `forced(k)`: the thread's own answer; `rest()`: what follows the last answer. It is told the
    ids of each answer by `answered(k, ids)`.
    """

    def __init__(self, thread: Thread, codec: Codec):
        self._messages, self._codec = thread.messages, codec
        self._next = 0
        self._unclosed = False

    def prompt(self, k: int) -> tuple[Parts, str | None]:
        return [*self._until(k), (k, [self._codec.id("<|assistant|>")])], None

    def forced(self, k: int) -> list[int]:
        return self._codec.text(f" {self._messages[k].body}\n")

    def answered(self, k: int, ids: list[int]) -> None:
        self._next = k + 1
        self._unclosed = not self._codec.decode(ids[-1:]).endswith("\n")

    def rest(self) -> tuple[Parts, str | None]:
        return [*self._until(len(self._messages)), (None, [self._codec.id(END)])], None

    def _until(self, k: int) -> Parts:
        # A sampled answer may stop without the line feed that the next role token expects.
        parts: Parts = [(None, self._codec.text("\n"))] if self._unclosed else []
        for index in range(self._next, k):
            message = self._messages[index]
            ids = [self._codec.id(f"<|{message.role}|>"), *self._codec.text(f" {message.body}\n")]
            parts.append((index, ids))
        self._next = k
        return parts
