"""Text and tokens of the reference models: what is read, what is refused, which windows a step sees."""

import gzip

import numpy as np
import pytest

from moelab import threads
from moelab.artifacts import root
from moelab.errors import MissingArtifactError, ParameterError, RecordError
from moelab.reference import tokens
from moelab.reference.corpus import SEPARATOR, hold_out, read_corpus, write_thread_texts


def write(folder, **files):
    for name, text in files.items():
        name = name.replace("__", ".")
        data = text.encode() if isinstance(text, str) else text
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") and isinstance(text, str) else data)
    return folder


def test_splits_come_from_names_and_documents_from_the_separator(tmp_path):
    write(tmp_path, a__train__txt__gz=f"one{SEPARATOR}two\n", a__val__txt="three", a__test__txt="four", notes__md="no")
    corpus = read_corpus(tmp_path)
    assert corpus.domains == ("a",)
    assert corpus.documents == {"train": {"a": ("one", "two\n")}, "val": {"a": ("three",)}, "test": {"a": ("four",)}}
    assert corpus.bytes("train", "a") == 7


def test_the_digest_is_of_the_text_and_not_of_its_packing(tmp_path):
    for name in ("plain", "packed", "other"):
        (tmp_path / name).mkdir()
    write(tmp_path / "plain", a__train__txt="x", a__val__txt="y")
    write(tmp_path / "packed", a__train__txt__gz="x", a__val__txt__gz="y")
    write(tmp_path / "other", a__train__txt="x", a__val__txt="z")
    plain, packed, other = (read_corpus(tmp_path / name).digest for name in ("plain", "packed", "other"))
    assert plain == packed != other


def test_a_file_without_split_gives_up_its_last_tenth():
    documents = tuple(f"document {i}" for i in range(25))
    assert hold_out(documents) == (documents[:23], documents[23:])
    text = "".join(f"line {i}\n" for i in range(40))
    train, val = hold_out((text[:200], text[200:]))
    assert "".join(train + val) == text and val == (text[text.index("line 36") :],)


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({}, MissingArtifactError, "no text here"),
        ({"a__train__txt": "x"}, RecordError, "field: a.val"),
        ({"a__val__txt": "x"}, RecordError, "field: a.train"),
        ({"a__txt": "a single line"}, RecordError, "field: a.train"),
        ({"a__train__txt": "x", "a__val__txt": " \n"}, RecordError, "field: a.val"),
        ({"a__train__txt": "x", "a__train__txt__gz": "x", "a__val__txt": "y"}, RecordError, "two files for one split"),
        ({"a__train__txt": "x", "a__txt": "y\n" * 20}, RecordError, "two files for one split"),
        ({"a__train__txt": b"\xff\xfe", "a__val__txt": "y"}, RecordError, "not UTF-8 text"),
        ({"a__train__txt__gz": gzip.compress(b"x" * 999)[:-9], "a__val__txt": "y"}, RecordError, "not a complete gzip"),
    ],
)
def test_text_that_cannot_be_used_is_refused(tmp_path, files, error, words):
    with pytest.raises(error, match=words) as caught:
        read_corpus(write(tmp_path, **files))
    assert str(tmp_path) in str(caught.value)


def test_threads_become_a_folder_of_text(tmp_path):
    everything = threads.read(root() / "artifacts" / "threads")
    write_thread_texts(tmp_path, everything)
    corpus = read_corpus(tmp_path)
    written = [text for split in ("train", "val") for part in corpus.documents[split].values() for text in part]
    said = {"".join(f"<|{m.role}|> {m.body}\n" for m in thread.messages) for thread in everything}
    assert len(written) == len(everything) and set(written) == said
    assert set(corpus.domains) == {min(thread.domains) for thread in everything}


def test_a_message_that_holds_the_separator_is_refused(tmp_path):
    message = threads.Message(role="user", text=f"a{SEPARATOR}b")
    with pytest.raises(RecordError, match="separator"):
        write_thread_texts(tmp_path, [threads.Thread(id="t", owner="o", source="s", messages=(message,))])


@pytest.fixture(scope="module")
def tokenizer():
    return tokens.train_tokenizer(["the cat sat on the mat 2026 2026 2026\n" * 20, "<|user|> hello\n"], 300)


def test_a_trained_tokenizer_keeps_special_ids_digits_and_every_byte(tokenizer):
    assert [tokenizer.token_to_id(token) for token in tokens.SPECIAL] == [0, 1, 2, 3, 4]
    text = "naïve 中文 🙂\t\r\n 123 <|user|> x"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert 1 in ids and len(tokenizer.encode("2026").ids) == 4
    assert len(tokenizer.encode("the cat").ids) < 5


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ParameterError, match="too small"):
        tokens.train_tokenizer(["x"], 260)


def test_a_tokenizer_with_other_special_tokens_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "t.json"))
    with pytest.raises(RecordError, match="special tokens"):
        tokens.load_tokenizer(tmp_path / "t.json")


def test_documents_are_closed_by_the_end_of_text(tokenizer):
    stream = tokens.encode({"d": ["the cat", "<|user|> sat"]}, tokenizer)["d"]
    assert stream.dtype == np.int32 and (stream == 0).sum() == 2 and stream[-1] == 0
    assert (
        tokenizer.decode(stream.tolist(), skip_special_tokens=False) == "the cat<|endoftext|><|user|> sat<|endoftext|>"
    )


def test_windows_lie_side_by_side_and_a_short_text_is_refused():
    stream = np.arange(23, dtype=np.int32)
    assert tokens.windows(stream, 5).tolist() == stream[:20].reshape(4, 5).tolist()
    assert len(tokens.windows(stream, 5, limit=3)) == 3
    with pytest.raises(RecordError, match="shorter than a window; field: d"):
        tokens.windows(stream, 24, domain="d")


def test_a_step_sees_the_same_windows_whenever_it_runs():
    streams = {"a": np.arange(100, dtype=np.int32), "b": np.arange(1000, 1400, dtype=np.int32)}
    draw = dict(batch=7, length=10)
    first, names = tokens.sample_windows(streams, seed=3, step=11, **draw)
    again, _ = tokens.sample_windows(streams, seed=3, step=11, **draw)
    assert (first == again).all() and first.shape == (7, 10)
    for other in ({"seed": 4, "step": 11}, {"seed": 3, "step": 12}):
        assert (tokens.sample_windows(streams, **other, **draw)[0] != first).any()
    for row, name in zip(first, names, strict=True):
        assert (np.diff(row) == 1).all() and row[0] in streams[name] and row[-1] in streams[name]


def test_domains_are_drawn_by_the_square_root_of_their_size():
    streams = {"small": np.zeros(100, np.int32), "large": np.ones(900, np.int32)}
    drawn = [
        name for step in range(200) for name in tokens.sample_windows(streams, batch=16, length=8, seed=0, step=step)[1]
    ]
    # √900 against √100 is 3 to 1; by size it would be 9 to 1. Four standard errors of 3,200 draws are .03.
    assert abs(np.mean([name == "large" for name in drawn]) - 0.75) < 0.03
    with pytest.raises(RecordError, match="field: small"):
        tokens.sample_windows(streams, batch=1, length=101, seed=0, step=0)


def test_every_start_can_be_drawn():
    streams = {"a": np.arange(12, dtype=np.int32)}
    starts = {
        int(row[0])
        for step in range(40)
        for row in tokens.sample_windows(streams, batch=8, length=10, seed=0, step=step)[0]
    }
    assert starts == {0, 1, 2}


def as_chat(message):
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls]
    return {
        "role": message.role, "content": message.text, "reasoning_content": message.reasoning, "tool_calls": calls
    }  # fmt: skip


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_the_chat_template_writes_what_the_house_template_writes(name):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root() / "artifacts" / "models" / name)
    assert tokenizer.chat_template == tokens.CHAT_TEMPLATE
    for thread in threads.read(root() / "artifacts" / "threads"):
        history = [as_chat(message) for message in thread.messages]
        text = tokenizer.apply_chat_template(history, tokenize=False)
        assert tokenizer.decode(threads.render(thread, tokenizer).token_ids) == text + tokens.END
        asked = tokenizer.apply_chat_template(history[:1], tokenize=False, add_generation_prompt=True)
        assert asked == tokenizer.apply_chat_template(history[:1], tokenize=False) + "<|assistant|>"


def test_the_chat_template_refuses_an_unknown_role():
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root() / "artifacts" / "models" / "softmax")
    with pytest.raises(TemplateError, match="unknown role: narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


def test_a_public_name_is_never_also_the_name_of_a_module():
    """Importing such a module would put it in the place of the function."""
    import importlib

    from moelab import reference

    homes = set(reference._HOMES)
    assert not homes & set(reference.__all__)
    for home in homes:
        importlib.import_module(f"moelab.reference.{home}")
    assert all(getattr(reference, name) is not None for name in reference.__all__)
    assert callable(reference.export)
