"""What a thread is: frozen, checked when it is made, and named by a digest.

`Thread.uid` names a thread wherever a file or a key needs a name: a digest of source, owner and id.
It hides nothing (a hash of a guessable name is no anonymisation); it is only safe as a file name.
"""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Literal, get_args

import msgspec

from moelab.artifacts import digest_json
from moelab.errors import RecordError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)
"""Roles by code: the `role u8` of rendered threads and observations indexes this tuple."""
SYSTEM, USER, ASSISTANT, TOOL = range(4)


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call an assistant made. `arguments` is kept as the text it was written in, JSON or not."""

    name: str
    arguments: str
    id: str | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message. Only an assistant reasons or calls tools; `ts` is RFC 3339.

    Raises:
        RecordError: text that UTF-8 cannot carry, a date that is none, a field its role cannot have.
    """

    role: Role
    text: str
    lang: str | None = None
    ts: str | None = None
    domain: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None

    def __post_init__(self):
        if self.role not in ROLES:
            raise RecordError("unknown role", field="role", got=self.role, expected=ROLES)
        try:
            self.body.encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                "text is not Unicode", field="text", got=str(error), expected="no lone surrogate"
            ) from None
        if self.role != "assistant":
            for field in ("tool_calls", "reasoning"):
                if getattr(self, field):
                    raise RecordError("only an assistant has this", field=field, got=self.role, expected="assistant")
        if self.ts is not None:
            parse_time(self.ts)

    @property
    def body(self) -> str:
        """Everything the message says, as the house template writes it: reasoning, text, calls."""
        thought = [f"<think>{self.reasoning}</think>"] if self.reasoning else []
        calls = [f"<call>{call.name}({call.arguments})</call>" for call in self.tool_calls]
        return "\n".join([*thought, *([self.text] if self.text else []), *calls])


class Thread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One conversation of one owner.

    Attributes:
        id: its name within source and owner.
        owner: normalised, see `normalise_owner`.
        owner_derived: True when the source named no owner and one was made from source and id, so that
            nothing else is assumed to share it.
        metadata: what the source said beyond the fields that moelab knows.

    Raises:
        RecordError: no message, nothing said, or dates that go back.
    """

    id: str
    owner: str
    source: str
    messages: tuple[Message, ...]
    license: str | None = None
    owner_derived: bool = False
    metadata: dict[str, Any] = {}

    def __post_init__(self):
        if not self.messages or not any(message.body for message in self.messages):
            raise RecordError(
                "thread is empty", field="messages", got=f"{len(self.messages)} with no text", expected="some text"
            )
        if self.owner != normalise_owner(self.owner):
            raise RecordError(
                "owner is not normalised", field="owner", got=self.owner, expected=normalise_owner(self.owner)
            )
        times = [message.ts for message in self.messages if message.ts is not None]
        for before, after in zip(times, times[1:], strict=False):
            if parse_time(after) < parse_time(before):
                raise RecordError(
                    "time goes back within a thread", field="ts", got=after, expected=f"{before} or later"
                )

    @property
    def uid(self) -> str:
        """16 hexadecimal digits that name this thread in files and keys."""
        return digest_json([self.source, self.owner, self.id])[:16]

    @property
    def started(self) -> datetime | None:
        """When the first dated message was written; None for a thread without dates."""
        return next((parse_time(message.ts) for message in self.messages if message.ts is not None), None)

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices of the assistant's messages: turn t is the t-th of them."""
        return tuple(i for i, message in enumerate(self.messages) if message.role == "assistant")

    @property
    def languages(self) -> frozenset[str]:
        return frozenset(message.lang for message in self.messages if message.lang)

    @property
    def domains(self) -> frozenset[str]:
        return frozenset(message.domain for message in self.messages if message.domain)

    @property
    def content(self) -> str:
        """Digest of what was said, whoever said it and under whatever id."""
        return digest_json([[message.role, message.body] for message in self.messages])


def parse_time(text: str) -> datetime:
    """An RFC 3339 time with its offset; a date without one would mean another time elsewhere."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise RecordError("not a time", field="ts", got=text, expected="like 2026-03-14T09:26:00Z")
    return time


def normalise_owner(owner: str) -> str:
    """One spelling for one owner: composed (NFC), outer spaces off, case folded.

    Raises:
        RecordError: nothing is left.
    """
    # Case folding may decompose (capital I with dot), so compose again after it.
    name = unicodedata.normalize("NFC", unicodedata.normalize("NFC", owner).strip().casefold())
    if not name:
        raise RecordError("owner is blank", field="owner", got=owner, expected="a name, or null")
    return name


def derived_owner(source: str, thread: str) -> str:
    """The owner of a thread whose source names none: shared with no other thread."""
    return f"derived-{digest_json([source, thread])[:16]}"


def shared_prompts(threads: Iterable[Thread]) -> dict[str, list[str]]:
    """System messages that more than one thread begins with: text → the threads' uids.

    They repeat by design, so a search for copied threads leaves them out and reports them apart.
    """
    users: dict[str, list[str]] = defaultdict(list)
    for thread in threads:
        if thread.messages[0].role == "system":
            users[thread.messages[0].text].append(thread.uid)
    return {text: uids for text, uids in users.items() if len(uids) > 1}


def provenance(threads: Iterable[Thread]) -> dict[str, Any]:
    """Where threads come from, for a manifest: counts, and a digest of every one and of their order."""
    threads = list(threads)

    def tally(values: Iterable[str | None]) -> dict[str, int]:
        return dict(sorted(Counter(value or "unknown" for value in values).items()))

    def spread(sets: Sequence[frozenset[str]]) -> dict[str, int]:
        return tally(value for values in sets for value in values)

    return {
        "threads": len(threads),
        "messages": sum(len(thread.messages) for thread in threads),
        "owners": len({thread.owner for thread in threads}),
        "owners_derived": len({thread.owner for thread in threads if thread.owner_derived}),
        "undated": sum(thread.started is None for thread in threads),
        "sources": tally(thread.source for thread in threads),
        "licenses": tally(thread.license for thread in threads),
        "languages": spread([thread.languages for thread in threads]),
        "domains": spread([thread.domains for thread in threads]),
        "digest": digest_json([msgspec.to_builtins(thread) for thread in threads]),
    }
