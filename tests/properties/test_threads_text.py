"""Any text survives reading and rendering, whatever it contains."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import HOUSE_TOKENS, house_tokenizer

from moelab.threads import ROLES, Message, Thread, normalise_owner, read, render

# Line separators of every kind and quoted special tokens, among all of Unicode but surrogates.
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.sampled_from(
            [*HOUSE_TOKENS, "\n", "\r\n", "\u2028", "\u2029", "\x85", "\x0b", "\x1c", "\x00", "\ufeff", "</call>"]
        ),
    ),
    max_size=6,
).map("".join)
MESSAGES = st.lists(st.tuples(st.sampled_from(ROLES), TEXTS), min_size=1, max_size=6).filter(
    lambda messages: any(text for _, text in messages)
)


@settings(deadline=None, max_examples=60)
@given(MESSAGES)
def test_what_is_written_is_read(tmp_path_factory, messages):
    path = tmp_path_factory.mktemp("threads") / "a.jsonl"
    head = {"source": "s", "license": "MIT", "owner": None, "thread": "t", "lang": None, "ts": None}
    lines = [head | {"i": i, "role": role, "text": text} for i, (role, text) in enumerate(messages)]
    path.write_bytes(b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines))
    (thread,) = read(path)
    assert [(message.role, message.text) for message in thread.messages] == messages


@settings(deadline=None, max_examples=60)
@given(MESSAGES)
def test_rendering_says_the_same_and_specials_are_only_the_templates(messages):
    tokenizer = house_tokenizer()
    thread = Thread(
        id="t", owner="o", source="s", messages=tuple(Message(role=role, text=text) for role, text in messages)
    )
    rendered = render(thread, tokenizer)
    ids = rendered.token_ids.tolist()
    written = "".join(f"<|{role}|> {text}\n" for role, text in messages) + "<|endoftext|>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == written
    specials = [place for place, token in enumerate(ids) if token < len(HOUSE_TOKENS)]
    assert specials == [*rendered.message_start.tolist(), len(ids) - 1]
    # Every message alone has the same ids.
    bounds = [*rendered.message_start.tolist(), len(ids) - 1]
    for (role, text), start, end in zip(messages, bounds, bounds[1:], strict=False):
        if text:
            alone = Thread(id="t", owner="o", source="s", messages=(Message(role=role, text=text),))
            assert render(alone, tokenizer).token_ids[:-1].tolist() == ids[start:end]


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip))
def test_an_owners_spelling_settles_at_once(name):
    once = normalise_owner(name)
    assert normalise_owner(once) == once == normalise_owner(f" {name}\n")
