"""Transcripts are read whole or refused with file, line, field, got and expected."""

import gzip
import json
import unicodedata

import msgspec
import pytest

from moelab.artifacts import root
from moelab.errors import MissingArtifactError, RecordError
from moelab.threads import Message, Thread, ToolCall, normalise_owner, provenance, read, shared_prompts

LINE = {
    "source": "moelab",
    "license": "MIT",
    "owner": "o-001",
    "thread": "t1",
    "i": 0,
    "role": "user",
    "lang": "en",
    "ts": "2026-03-14T09:26:00Z",
    "domain": "prose",
    "text": "Why is the sky blue?",
}
ANSWER = LINE | {"i": 1, "role": "assistant", "text": "Short waves scatter more.", "ts": "2026-03-14T09:27:00Z"}


def write(path, *lines, end="\n"):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    data = (text + end).encode("utf-8", "surrogatepass")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def thread(**changes):
    fields = dict(id="t", owner="o", source="s", messages=(Message(role="user", text="hi"),))
    return Thread(**fields | changes)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_own_format(tmp_path, name):
    call = {"name": "look", "arguments": '{"at": "sky"}'}
    path = write(
        tmp_path / name,
        LINE,
        ANSWER | {"tool_calls": [call], "reasoning": "Rayleigh."},
        LINE | {"i": 2, "role": "tool", "name": "look", "text": "", "ts": None},
        LINE | {"thread": "t2", "owner": None, "ts": None},
    )
    first, second = read(path)
    assert (first.id, first.owner, first.owner_derived, first.license) == ("t1", "o-001", False, "MIT")
    assert [message.role for message in first.messages] == ["user", "assistant", "tool"]
    assert first.messages[1].tool_calls == (ToolCall("look", '{"at": "sky"}'),)
    assert first.messages[1].body == (
        '<think>Rayleigh.</think>\nShort waves scatter more.\n<call>look({"at": "sky"})</call>'
    )
    assert first.started.isoformat() == "2026-03-14T09:26:00+00:00"
    assert second.owner_derived and second.owner.startswith("derived-") and second.started is None
    assert first.turns == (1,) and second.turns == ()


def test_lines_end_at_line_feeds_only(tmp_path):
    text = "one\u2028two\x85three\u2029four\x0bfive\x0csix\rseven"
    path = write(tmp_path / "a.jsonl", LINE | {"text": text})
    raw = path.read_bytes()
    assert "\u2028".encode() in raw and "\x85".encode() in raw  # really there, not as escapes
    assert read(path)[0].messages[0].text == text


def test_a_folder_is_read_by_name_and_nothing_else_in_it(tmp_path):
    write(tmp_path / "b.jsonl", LINE | {"thread": "t2"})
    write(tmp_path / "a.jsonl.gz", LINE)
    (tmp_path / "a.planted.json").write_text("{}")
    (tmp_path / ".c.jsonl").write_text("half")
    assert [thread.id for thread in read(tmp_path)] == ["t1", "t2"]


def test_chat_format(tmp_path):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning_content": "Call it.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "Three."},
    ]
    path = write(
        tmp_path / "mine.jsonl",
        {"messages": messages, "id": 7, "user": " Ann ", "metadata": {"ts": "2026-01-05T00:00:00Z", "plan": "pro"}},
        {"messages": messages[1:2]},
    )
    first, second = read(path)
    assert (first.id, first.owner, first.source, first.metadata) == ("7", "ann", "mine", {"plan": "pro"})
    assert [message.role for message in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert first.messages[1].text == "one two"
    assert first.messages[2].body == "<think>Call it.</think>\n<call>f({})</call>"
    assert first.messages[3].tool_call_id == "c1" and first.started.year == 2026
    assert (second.id, second.owner_derived) == ("line 2", True)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([LINE, "{"], "a.jsonl:2; field: line; got: 'Input data was truncated', expected: one JSON object"),
        ([LINE, ""], "blank line; file: {file}:2; got: b'\\n', expected: a JSON object"),
        (["\ufeff" + json.dumps(LINE)], "not a JSON object in UTF-8; file: {file}:1; field: line"),
        (["[1]"], "wrong type; file: {file}:1; field: line; got: 'array', expected: object"),
        ([LINE | {"ts": 5}], "wrong type; file: {file}:1; field: ts; got: 'int', expected: str | null"),
        ([LINE | {"i": True}], "wrong type; file: {file}:1; field: i; got: 'bool', expected: int"),
        (
            [LINE | {"mood": "good"}],
            "unknown field; file: {file}:1; field: mood; got: 'mood', expected: one of",
        ),
        (
            [{key: value for key, value in LINE.items() if key != "owner"}],
            "missing field; file: {file}:1; field: owner; got: 'nothing', expected: present",
        ),
        (
            [LINE | {"role": "critic"}],
            "value not allowed; file: {file}:1; field: role; got: \"'critic'\", "
            "expected: one of system, user, assistant, tool",
        ),
        ([LINE | {"i": 1}], "messages are not in order; file: {file}:1; field: i; got: 1, expected: 0"),
        ([LINE, ANSWER | {"i": 2}], "messages are not in order; file: {file}:2; field: i; got: 2, expected: 1"),
        (
            [LINE, LINE | {"thread": "t2"}, ANSWER],
            "messages are not in order; file: {file}:3; field: i; got: 1, expected: 0",
        ),
        (
            [LINE, LINE | {"thread": "t2"}, LINE],
            "thread appears twice; file: {file}:3; field: thread; got: 't1 of o-001', "
            "expected: once; first seen in {file}:1",
        ),
        (
            [LINE | {"owner": " \t"}],
            "owner is blank; file: {file}:1; field: owner; got: ' \\t', expected: a name, or null",
        ),
        ([LINE | {"text": ""}], "thread is empty; file: {file}:1; field: messages; got: '1 with no text'"),
        ([LINE | {"ts": "yesterday"}], "not a time; file: {file}:1; field: ts; got: 'yesterday', expected: like 2026"),
        ([LINE | {"ts": "2026-03-14T09:26:00"}], "not a time; file: {file}:1; field: ts"),
        (
            [LINE, ANSWER | {"ts": "2026-03-14T09:25:59Z"}],
            "time goes back within a thread; file: {file}:1; field: ts; got: '2026-03-14T09:25:59Z', "
            "expected: 2026-03-14T09:26:00Z or later",
        ),
        (
            [LINE | {"reasoning": "hm"}],
            "only an assistant has this; file: {file}:1; field: reasoning; got: 'user', expected: assistant",
        ),
        (['{"messages": []}'], "thread is empty; file: {file}:1; field: messages; got: '0 with no text'"),
        (
            ['{"messages": [{"role": "user", "content": 3}]}'],
            "wrong type; file: {file}:1; field: messages[0].content; got: 'int', expected: str | array | null",
        ),
        (
            ['{"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}'],
            "value not allowed; file: {file}:1; field: messages[0].content[0].type; got: \"'image_url'\",",
        ),
        (
            ['{"messages": [{"role": "user", "content": "a"}], "tools": []}'],
            "unknown field; file: {file}:1; field: tools; got: 'tools', expected: one of messages, id, user, metadata; "
            "fix: write the tools into the system message",
        ),
        (
            ['{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "reasoning": "c"}]}'],
            "only an assistant has this; file: {file}:1 (message 1); field: reasoning",
        ),
        (
            ['{"messages": [{"role": "user", "content": "a"}], "metadata": {"ts": 3}}'],
            "wrong type; file: {file}:1; field: metadata.ts; got: 3, expected: str",
        ),
    ],
)
def test_refusals_say_where_and_what(tmp_path, lines, said):
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(RecordError) as refusal:
        read(path)
    assert said.format(file=path) in str(refusal.value)


def test_a_lone_surrogate_is_refused(tmp_path):
    write(tmp_path / "escaped.jsonl", json.dumps(LINE | {"text": "a\ud800b"}))
    write(tmp_path / "raw.jsonl", LINE | {"text": "a\ud800b"})
    for name in ("escaped", "raw"):
        with pytest.raises(RecordError, match=rf"{name}.jsonl:1"):
            read(tmp_path / f"{name}.jsonl")
    with pytest.raises(RecordError, match="text is not Unicode; field: text"):
        Message(role="user", text="a\ud800b")


def test_missing_empty_and_truncated_files(tmp_path):
    with pytest.raises(MissingArtifactError, match="no transcript here"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(MissingArtifactError, match=r"expected: \*.jsonl or \*.jsonl.gz"):
        read(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(RecordError, match="file is empty; .*got: '0 lines', expected: at least one thread"):
        read(tmp_path / "a.jsonl")
    path = write(tmp_path / "b.jsonl.gz", *({**LINE, "thread": str(i), "text": f"{i}" * 99} for i in range(300)))
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(RecordError, match=r"not a complete gzip file; file: .*b.jsonl.gz:\d+; field: bytes"):
        read(path)
    path.write_bytes(b"plain")
    with pytest.raises(RecordError, match="not a complete gzip file"):
        read(path)


def test_one_owner_has_one_spelling(tmp_path):
    spellings = ["Zoë ", "zoë", unicodedata.normalize("NFD", "ZOË"), "\tzoë\n"]
    path = write(tmp_path / "a.jsonl", *(LINE | {"owner": o, "thread": str(i)} for i, o in enumerate(spellings)))
    assert {thread.owner for thread in read(path)} == {"zoë"}
    assert normalise_owner("STRASSE") == normalise_owner("Straße")
    assert normalise_owner("\u03b1\u0345\u0301") == normalise_owner("\u1fb4")  # marks in another order
    for name in ("İ", "ǰ", "ẞ", "\u0345\u03b1", "\ufb03 x"):
        assert normalise_owner(normalise_owner(name)) == normalise_owner(name)
    with pytest.raises(RecordError, match="owner is not normalised; field: owner; got: 'Zoë', expected: zoë"):
        thread(owner="Zoë")


def test_a_derived_owner_is_shared_with_no_other_thread(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        LINE | {"owner": None},
        LINE | {"owner": None, "thread": "t2"},
        LINE | {"owner": None, "source": "elsewhere"},
    )
    threads = read(path)
    assert len({thread.owner for thread in threads}) == 3
    assert [t.owner for t in read(path)] == [t.owner for t in threads]


def test_uid_names_a_thread_and_content_what_was_said():
    assert thread().uid == thread(messages=(Message(role="user", text="other"),)).uid
    assert len({thread().uid, thread(id="u").uid, thread(owner="p").uid, thread(source="r").uid}) == 4
    assert thread().content == thread(id="u", owner="p").content
    assert thread().content != thread(messages=(Message(role="system", text="hi"),)).content


def test_threads_cannot_be_changed():
    for value, name in ((thread(), "owner"), (thread().messages[0], "text")):
        with pytest.raises(AttributeError):
            setattr(value, name, "x")
    with pytest.raises(RecordError, match="unknown role; field: role; got: 'judge'"):
        Message(role="judge", text="")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"role": "user", "text": "a", "mood": "b"}, Message)


def test_shared_prompts_are_found():
    brief = Message(role="system", text="Be brief.")
    hi = Message(role="user", text="hi")
    threads = [thread(id=str(i), messages=(brief, hi)) for i in range(2)] + [
        thread(id="2", messages=(Message(role="system", text="Be long."), hi)),
        thread(id="3", messages=(hi,)),
    ]
    assert shared_prompts(threads) == {"Be brief.": [threads[0].uid, threads[1].uid]}


def test_provenance_counts_and_identifies(tmp_path):
    threads = read(write(tmp_path / "a.jsonl", LINE, ANSWER, LINE | {"thread": "t2", "owner": None, "ts": None}))
    found = provenance(threads)
    assert found.pop("digest") != provenance(threads[::-1])["digest"]
    assert found == {
        "threads": 2,
        "messages": 3,
        "owners": 2,
        "owners_derived": 1,
        "undated": 1,
        "sources": {"moelab": 2},
        "licenses": {"MIT": 2},
        "languages": {"en": 2},
        "domains": {"prose": 2},
    }


def test_committed_threads_are_read():
    threads = read(root() / "artifacts" / "threads")
    found = provenance(threads)
    assert found["threads"] >= 150 and found["owners"] >= 60 and len(found["languages"]) >= 6
    assert set(found["domains"]) == {"prose", "code", "tools", "reasoning", "help", "data"}
    assert not found["owners_derived"] and not found["undated"] and set(found["licenses"]) == {"MIT"}
    assert all(thread.messages[-1].role == "assistant" for thread in threads)
    assert any(message.reasoning for thread in threads for message in thread.messages)
    assert any(message.tool_calls for thread in threads for message in thread.messages)


@pytest.mark.parametrize(
    ("name", "threads", "owners", "derived"),
    [
        ("tau_airline", 200, 34, 0),
        ("crosswoz_zh", 1000, 67, 0),
        ("bfcl", 437, 405, 400),
        ("swe_agent", 22, 22, 22),
        ("sgd", 512, 512, 512),
    ],
)
def test_collected_transcripts_are_read(moelab_data, name, threads, owners, derived):
    found = provenance(read(moelab_data / "transcripts" / f"{name}.jsonl.gz"))
    assert (found["threads"], found["owners"], found["owners_derived"]) == (threads, owners, derived)
