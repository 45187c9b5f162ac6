r"""One reader for every transcript: the project's own JSONL, chat JSONL, and gzipped transcripts.

Two shapes of line are understood, told apart by the first line of a file:

* **a message a line** (committed threads and collected transcripts): `source`, `license`, `owner`,
  `thread`, `i`, `role`, `lang`, `ts`, `text`, and where they apply `domain`, `tool_calls`, `name`,
  `reasoning`. Lines of a thread stand together, `i` counts from 0. `owner` and `ts` may be null.
* **a conversation a line**, as chat APIs take them: `messages`, and optionally `id`, `user` (the
  owner) and `metadata`.

Lines end at the byte `\n` and nowhere else: U+2028 and U+0085 are text. Anything unknown is refused,
with the file, the line, the field, what was got and what was expected.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from moelab.errors import ContractError, MissingArtifactError, RecordError

from .records import ROLES, Message, Role, Thread, ToolCall, derived_owner, normalise_owner


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message a line."""

    source: str
    license: str
    owner: str | None
    thread: str
    i: int
    role: Role
    lang: str | None
    ts: str | None
    text: str
    domain: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    reasoning: str | None = None


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: _Function
    type: Literal["function"] = "function"
    id: str | None = None


class _ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message as chat APIs have it. What they send empty (`refusal`, `audio`) may only be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | tuple[_Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[_Call, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None


class _Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation a line."""

    messages: tuple[_ChatMessage, ...]
    id: str | int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


_CHAT_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_METADATA = ("source", "license", "lang", "ts", "domain")


def read(path: str | Path) -> list[Thread]:
    """Read the threads of a file (`.jsonl`, `.jsonl.gz`), or of every such file of a folder by name.

    Raises:
        MissingArtifactError: no such file, or a folder without transcripts.
        RecordError: a line broke its format; an empty thread or file; a thread that appears twice.
    """
    path = Path(path)
    files = sorted(file for file in path.glob("*") if _is_transcript(file)) if path.is_dir() else [path]
    if not files or not path.exists():
        raise MissingArtifactError("no transcript here", file=path, expected="*.jsonl or *.jsonl.gz")
    threads: list[Thread] = []
    seen: dict[str, str] = {}
    for file in files:
        for where, thread in _read_file(file):
            if thread.uid in seen:
                raise RecordError(
                    "thread appears twice",
                    file=where,
                    field="thread",
                    got=f"{thread.id} of {thread.owner}",
                    expected=f"once; first seen in {seen[thread.uid]}",
                )
            seen[thread.uid] = where
            threads.append(thread)
    return threads


def _is_transcript(file: Path) -> bool:
    return file.name.endswith((".jsonl", ".jsonl.gz")) and not file.name.startswith(".")


def _read_file(file: Path) -> Iterator[tuple[str, Thread]]:
    """Yield `(file:line, thread)`."""
    lines = _lines(file)
    first = next(lines, None)
    if first is None:
        raise RecordError("file is empty", file=file, got="0 lines", expected="at least one thread")
    chats = "messages" in _decode(first[1], dict, first[0])
    lines = (line for part in ([first], lines) for line in part)
    if chats:
        for where, data in lines:
            yield where, _located(_chat, where, data, where, file)
    else:
        messages = ((where, _decode(data, _Line, where)) for where, data in lines)
        for _, group in groupby(messages, key=lambda item: (item[1].source, item[1].owner, item[1].thread)):
            group = list(group)
            yield group[0][0], _located(_thread, group[0][0], group)


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield `(file:line, bytes)`; iterating a binary file splits at the byte 0x0a only."""
    number = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    raise RecordError("blank line", file=f"{file}:{number}", got=line, expected="a JSON object")
                yield f"{file}:{number}", line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordError(
            "not a complete gzip file", file=f"{file}:{number + 1}", field="bytes", got=str(error), expected="gzip"
        ) from None


def _thread(group: list[tuple[str, _Line]]) -> Thread:
    lines = []
    for index, (where, line) in enumerate(group):
        if line.i != index:
            raise RecordError("messages are not in order", file=where, field="i", got=line.i, expected=index)
        lines.append(_located(_message, where, line))
    first = group[0][1]
    return Thread(
        id=first.thread,
        owner=derived_owner(first.source, first.thread) if first.owner is None else normalise_owner(first.owner),
        owner_derived=first.owner is None,
        source=first.source,
        license=first.license,
        messages=tuple(lines),
    )


def _message(line: _Line) -> Message:
    names = ("role", "text", "lang", "ts", "domain", "tool_calls", "name", "reasoning")
    return Message(**{name: getattr(line, name) for name in names})


def _chat(data: bytes, where: str, file: Path) -> Thread:
    chat = _decode(data, _Chat, where)
    metadata = dict(chat.metadata or {})
    for name in _KNOWN_METADATA:
        if not isinstance(metadata.get(name), str | None):
            raise RecordError("wrong type", field=f"metadata.{name}", got=metadata[name], expected="str")
    known = {name: metadata.pop(name, None) for name in _KNOWN_METADATA}
    source = known["source"] or file.name.removesuffix(".gz").removesuffix(".jsonl")
    thread = f"line {where.rpartition(':')[2]}" if chat.id is None else str(chat.id)
    shared = {name: known[name] for name in ("lang", "ts", "domain")}
    messages = tuple(
        _located(_chat_message, f"{where} (message {index})", message, shared)
        for index, message in enumerate(chat.messages)
    )
    return Thread(
        id=thread,
        owner=derived_owner(source, thread) if chat.user is None else normalise_owner(chat.user),
        owner_derived=chat.user is None,
        source=source,
        license=known["license"],
        messages=messages,
        metadata=metadata,
    )


def _chat_message(message: _ChatMessage, shared: dict[str, str | None]) -> Message:
    text = message.content or ""
    if message.reasoning and message.reasoning_content and message.reasoning != message.reasoning_content:
        raise RecordError(
            "two different reasonings", field="reasoning", got=message.reasoning, expected=message.reasoning_content
        )
    return Message(
        role=_CHAT_ROLES.get(message.role, message.role),
        text=text if isinstance(text, str) else "".join(part.text for part in text),
        tool_calls=tuple(
            ToolCall(call.function.name, call.function.arguments, call.id) for call in message.tool_calls or ()
        ),
        name=message.name,
        reasoning=message.reasoning_content or message.reasoning,
        tool_call_id=message.tool_call_id,
        **shared,
    )


# ---------------------------------------------------------------- errors that say where


def _located(make, where: str, *args):
    """Call `make`, adding where in the file it happened to an error that does not say so yet."""
    try:
        return make(*args)
    except ContractError as error:
        if error.file is not None:
            raise
        raise type(error)(
            error.problem, file=where, field=error.field, got=error.got, expected=error.expected, fix=error.fix
        ) from None


_EXPECTED = re.compile(r"Expected `(?P<expected>.+?)`, got `(?P<got>.+?)`")
_NAMED = re.compile(r"(?P<problem>missing required|contains unknown) field `(?P<field>.+?)`")
_CHOICE = re.compile(r"Invalid enum value (?P<got>'.*?')")
_CHOICES = {"role": f"one of {', '.join(ROLES)}", "type": "text, or function for a call"}
_PLACE = re.compile(r" - at `\$\.?(?P<place>.*?)`$")


def _decode(data: bytes, kind: type, where: str) -> Any:
    """`msgspec` decode with its message taken apart into field, got and expected."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        place = match["place"] if (match := _PLACE.search(text)) else ""
        if match := _NAMED.search(text):
            field = f"{place}.{match['field']}".lstrip(".")
            if match["problem"].startswith("missing"):
                raise RecordError("missing field", file=where, field=field, got="nothing", expected="present") from None
            fix = "write the tools into the system message" if field == "tools" else None
            known = ", ".join(item.name for item in msgspec.structs.fields(kind))
            raise RecordError(
                "unknown field", file=where, field=field, got=match["field"], expected=f"one of {known}", fix=fix
            ) from None
        if match := _EXPECTED.search(text):
            raise RecordError(
                "wrong type", file=where, field=place or "line", got=match["got"], expected=match["expected"]
            ) from None
        got = match["got"] if (match := _CHOICE.search(text)) else text
        expected = _CHOICES.get(place.rpartition(".")[2], "a value of this format")
        raise RecordError("value not allowed", file=where, field=place or "line", got=got, expected=expected) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(
            "not a JSON object in UTF-8", file=where, field="line", got=str(error), expected="one JSON object"
        ) from None
