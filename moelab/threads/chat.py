"""The tokenizer's own chat template, asked again before every answer and held against what was fed.

A chat template sees the whole history at each turn and may write it differently every time: drop the
reasoning of earlier turns, or move a system prompt. A cache holds what was fed. So each prompt must
extend the text that was fed, to the character; where it does not, the writer says what changed and a new
sequence begins.
"""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

from moelab.errors import RecordError

from .records import Message, Thread
from .template import Codec, Parts


class ChatWriter:
    """What `HouseWriter` is, for any chat template. `forced`: the answers are the thread's own."""

    def __init__(self, thread: Thread, codec: Codec, *, forced: bool):
        self._thread, self._codec, self._forced = thread, codec, forced
        self._history = [_as_chat(message) for message in thread.messages]
        self._fed = ""
        self._next = 0
        special = codec.special_tokens()
        for index, message in enumerate(thread.messages):
            if found := [token for token in special if token in message.body]:
                raise RecordError(
                    "message holds a special token, which a chat template cannot quote",
                    field=f"messages[{index}].text",
                    got=found,
                    expected="plain text",
                )

    def prompt(self, k: int) -> tuple[Parts, str | None]:
        asked = self._write(k, prompt=True)
        own = self._write(k + 1) if self._forced else asked
        announced = own.startswith(asked)
        reason = self._restart(asked if announced else own, k) or self._restart(asked, k)
        ids = self._after(self._fed, asked if announced else own)
        if announced:
            self._own = self._after(asked, own)
        else:
            # A finished answer is written otherwise than it was prompted for (a reasoning mark is
            # dropped, say): it begins where the two part.
            pairs = zip(ids, self._after(self._fed, asked), strict=False)
            cut = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            ids, self._own = ids[:cut], ids[cut:]
        self._asked, self._answered = asked, own
        return self._split(ids, k), reason

    def forced(self, k: int) -> list[int]:
        return self._own

    def answered(self, k: int, ids: list[int]) -> None:
        if self._forced:
            self._fed = self._answered
        else:
            self._fed = self._asked + self._codec.decode(ids)
            self._history[k] = {"role": "assistant", "content": self._codec.decode(ids, skip_special=True)}
        self._next = k + 1

    def rest(self) -> tuple[Parts, str | None]:
        count = len(self._history)
        if self._next == count:
            return [], None
        whole = self._write(count)
        reason = self._restart(whole, count)
        return self._split(self._after(self._fed, whole), count - 1), reason

    def _write(self, count: int, *, prompt: bool = False) -> str:
        return self._codec.chat(self._history[:count], self._thread, prompt=prompt) if count else ""

    def _restart(self, whole: str, k: int) -> str | None:
        """Forget what was fed unless `whole` extends it; say where it differs."""
        if whole.startswith(self._fed):
            return None
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, self._fed, strict=False)))
        fed = len(self._fed)
        self._fed, self._next = "", 0
        # Where and not what: the reason is printed, and what was said is not for every eye.
        return f"before message {k} the chat template writes another text from character {at} of the {fed} fed"

    def _after(self, before: str, whole: str) -> list[int]:
        """Ids of what `whole` adds to `before`: read in its context where that leaves earlier ids alone."""
        head, ids = self._codec.special(before), self._codec.special(whole)
        return ids[len(head) :] if ids[: len(head)] == head else self._codec.special(whole[len(before) :])

    def _split(self, ids: list[int], last: int) -> Parts:
        """Cut ids where messages begin. Messages that the template does not separate become one."""
        starts, at = {}, 0
        for index in range(self._next, last + 1):
            found = self._begin(ids, index)
            at = found if found is not None else len(ids) if index == last else at
            starts[at] = index
        edges = sorted({0, *starts, len(ids)})
        parts = [(starts.get(a), ids[a:b]) for a, b in zip(edges, [*edges[1:], len(ids)], strict=True)]
        return [part for part in parts if part != (None, [])]

    def _begin(self, ids: list[int], index: int) -> int | None:
        """Where in ids message `index` begins; None if the template does not say."""
        try:
            before = self._write(index)
        except RecordError:  # many templates refuse a history that ends here
            return None
        head = self._after(self._fed, before) if before.startswith(self._fed) else None
        return len(head) if head is not None and ids[: len(head)] == head else None


def _as_chat(message: Message) -> dict[str, Any]:
    """The message as chat templates read it: arguments as an object where they are one."""
    chat: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        chat["reasoning_content"] = message.reasoning
    if message.name:
        chat["name"] = message.name
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = ({"name": call.name, "arguments": _arguments(call.arguments)} for call in message.tool_calls)
        ids = (call.id for call in message.tool_calls)
        chat["tool_calls"] = [
            {"type": "function", "function": call} | ({"id": name} if name else {})
            for call, name in zip(calls, ids, strict=True)
        ]
    return chat


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
