"""Token ids are carried, message by message; a template that rewrites history begins a new sequence."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_tokenizers import byte_tokenizer, chat_tokenizer, house_tokenizer
from tokenizers.processors import TemplateProcessing

from moelab.artifacts import root
from moelab.errors import RecordError, UnsupportedModelError
from moelab.threads import (
    ASSISTANT,
    Conversation,
    Message,
    Thread,
    ToolCall,
    read,
    render,
    render_sequences,
    stop_ids,
    template_digest,
    tokenizer_digest,
)
from moelab.threads.chat import _as_chat

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STRIPS_THINKING = CHATML.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")


def say(*pairs, **fields):
    messages = tuple(Message(role=role, text=text) for role, text in pairs)
    return Thread(**dict(id="t", owner="o", source="s", messages=messages) | fields)


def text(tokenizer, ids):
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def test_house_template():
    tokenizer = house_tokenizer()
    calls = (ToolCall("f", '{"a": 1}'), ToolCall("g", "x=2"))
    thread = say(("system", "Be brief."), ("user", "hello"))
    thread = Thread(
        id="t",
        owner="o",
        source="s",
        messages=(
            *thread.messages,
            Message(role="assistant", text="Look.", reasoning="Hm.", tool_calls=calls),
            Message(role="tool", text="", name="f"),
            Message(role="assistant", text="Done."),
        ),
    )
    rendered = render(thread, tokenizer)
    assert text(tokenizer, rendered.token_ids) == (
        "<|system|> Be brief.\n"
        "<|user|> hello\n"
        '<|assistant|> <think>Hm.</think>\nLook.\n<call>f({"a": 1})</call>\n<call>g(x=2)</call>\n'
        "<|tool|> \n"
        "<|assistant|> Done.\n"
        "<|endoftext|>"
    )
    assert rendered.token_ids.dtype == np.int32 and rendered.message_start.dtype == np.int32
    assert rendered.role.tolist() == [0, 1, 2, 3, 2] and rendered.role.dtype == np.uint8
    assert rendered.message.tolist() == [0, 1, 2, 3, 4] and rendered.turn.tolist() == [0, 1]
    assert (rendered.sequence, rendered.began) == (0, None)
    roles = [tokenizer.id_to_token(int(rendered.token_ids[start])) for start in rendered.message_start]
    assert roles == ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|assistant|>"]
    assert [text(tokenizer, rendered.token_ids[a:b]) for a, b in rendered.answer] == [
        ' <think>Hm.</think>\nLook.\n<call>f({"a": 1})</call>\n<call>g(x=2)</call>\n',
        " Done.\n<|endoftext|>",
    ]
    assert rendered.decoded.sum() == np.diff(rendered.answer).sum()
    parts = rendered.parts
    assert [role for role, _, _ in parts] == [0, 1, 2, 3, 2]
    assert np.concatenate([ids for _, ids, _ in parts]).tolist() == rendered.token_ids.tolist()
    assert [len(ids) if role != ASSISTANT else 1 for role, ids, _ in parts] == [header for *_, header in parts]


def test_ids_of_a_message_do_not_depend_on_what_follows():
    tokenizer = house_tokenizer()
    short, long = say(("user", "a"), ("assistant", "he")), say(("user", "a"), ("assistant", "he"), ("user", "llo"))
    n = len(render(short, tokenizer).token_ids) - 1
    assert render(long, tokenizer).token_ids[:n].tolist() == render(short, tokenizer).token_ids[:n].tolist()


def test_quoted_special_tokens_are_text():
    tokenizer = house_tokenizer()
    quoted = render(say(("user", "what is <|endoftext|> or <|assistant|>?"), ("assistant", "<|user|>")), tokenizer)
    specials = quoted.token_ids[quoted.token_ids < 5]
    assert [tokenizer.id_to_token(int(i)) for i in specials] == ["<|user|>", "<|assistant|>", "<|endoftext|>"]
    assert "<|endoftext|> or <|assistant|>?" in text(tokenizer, quoted.token_ids)
    assert tokenizer.encode("<|user|>").ids == [1]  # the tokenizer itself is left as it was


@pytest.mark.parametrize("model", ["softmax", "sigmoid"])
def test_chat_template_of_the_reference_models_equals_render(model):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root() / "artifacts" / "models" / model)
    bare = Tokenizer.from_file(str(root() / "artifacts" / "models" / model / "tokenizer.json"))
    assert tokenizer.chat_template
    threads = read(root() / "artifacts" / "threads")
    kinds = {
        (message.role, bool(message.reasoning), bool(message.tool_calls)) for t in threads for message in t.messages
    }
    assert len(kinds) >= 6  # plain answers, reasoning, calls, every other role
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for thread in threads:
        chat = [_as_chat(message) for message in thread.messages]
        for call, own in zip(chat, thread.messages, strict=True):
            for given, kept in zip(call.get("tool_calls", ()), own.tool_calls, strict=True):
                given["function"]["arguments"] = kept.arguments
        written = tokenizer.apply_chat_template(chat, tokenize=False)
        whole = render(thread, bare)
        rendered = whole.token_ids.tolist()
        assert [*tokenizer.encode(written, add_special_tokens=False), end] == rendered
        last = thread.turns[-1]
        asked = tokenizer.apply_chat_template(chat[:last], tokenize=False, add_generation_prompt=True)
        assert tokenizer.encode(asked, add_special_tokens=False) == rendered[: whole.answer[-1, 0]]


def test_every_kind_of_tokenizer_object_renders_alike():
    from transformers import PreTrainedTokenizerFast

    bare = house_tokenizer()
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(["<|endoftext|>", *_roles()], _merges()))
    wrapped = SimpleNamespace(  # forwards what mlx-lm's wrapper forwards
        encode=fast.encode, decode=fast.decode, get_vocab=fast.get_vocab, chat_template=None, eos_token_ids={0}
    )
    thread = say(("user", "hello <|tool|>"), ("assistant", "hello"))
    ids = [render(thread, tokenizer).token_ids.tolist() for tokenizer in (bare, fast, wrapped)]
    assert ids[0] == ids[1] == ids[2]
    assert stop_ids(bare) == stop_ids(fast) == stop_ids(wrapped) == {0, 1, 2, 3, 4}
    assert len({tokenizer_digest(t) for t in (bare, fast, wrapped)}) == 1
    assert len({template_digest(t) for t in (bare, fast, wrapped)}) == 1


def _roles():
    return ["<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]


def _merges():
    return [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]


def test_sampled_ids_are_carried_and_never_made_again():
    tokenizer = house_tokenizer()
    he, llo = (tokenizer.token_to_id(token) for token in ("he", "llo"))
    assert he is not None and llo is not None
    assert tokenizer.encode("hello").ids not in ([he, llo],)  # encoding the text would give one other token
    talk = Conversation(
        say(("user", "a"), ("assistant", "x"), ("user", "b"), ("assistant", "y")), tokenizer, mode="sampled"
    )
    first = talk.prompt()
    assert talk.fresh and text(tokenizer, first) == "<|user|> a\n<|assistant|>"
    talk.answer([he, llo])
    second = talk.prompt()
    assert not talk.fresh and text(tokenizer, second) == "\n<|user|> b\n<|assistant|>"  # the answer had no line end
    talk.answer(tokenizer.encode("c\n").ids)
    assert talk.prompt() is None
    (sequence,) = talk.finish()
    assert sequence.token_ids.tolist() == [*first, he, llo, *second, *tokenizer.encode("c\n").ids]
    assert sequence.message_start.tolist() == [0, len(first) - 1, len(first) + 3, len(first) + 2 + len(second) - 1]
    assert sequence.answer.tolist() == [
        [len(first), len(first) + 2],
        [len(first) + 2 + len(second), len(sequence.token_ids)],
    ]
    with pytest.raises(RecordError, match="only a forced conversation has this; field: mode"):
        talk.forced()
    with pytest.raises(RecordError, match="unknown mode; field: mode; got: 'replay', expected: forced or sampled"):
        Conversation(say(("user", "a")), tokenizer, mode="replay")


def test_an_answer_may_be_empty():
    tokenizer = house_tokenizer()
    talk = Conversation(say(("user", "a"), ("assistant", "x")), tokenizer, mode="sampled")
    prompt = talk.prompt()
    talk.answer([])
    (sequence,) = talk.finish()
    assert sequence.token_ids.tolist() == prompt.tolist()
    assert sequence.answer.tolist() == [[len(prompt), len(prompt)]] and not sequence.decoded.any()


def test_a_thread_that_ends_with_a_question_is_rendered_to_its_end():
    tokenizer = house_tokenizer()
    rendered = render(say(("assistant", "Hi."), ("user", "hello")), tokenizer)
    assert text(tokenizer, rendered.token_ids) == "<|assistant|> Hi.\n<|user|> hello\n<|endoftext|>"
    assert text(tokenizer, rendered.token_ids[slice(*rendered.answer[0])]) == " Hi.\n"
    assert render(say(("user", "alone")), tokenizer).answer.shape == (0, 2)


def test_chat_template_extends_turn_by_turn():
    tokenizer = chat_tokenizer(CHATML)
    thread = say(("system", "S"), ("user", "a"), ("assistant", "hello"), ("user", "b"), ("assistant", "c"))
    rendered = render(thread, tokenizer)
    assert text(tokenizer, rendered.token_ids) == tokenizer.apply_chat_template(
        [_as_chat(message) for message in thread.messages], tokenize=False
    )
    assert rendered.role.tolist() == [0, 1, 2, 1, 2]
    assert [text(tokenizer, rendered.token_ids[a:b]) for a, b in rendered.answer] == [
        "hello<|im_end|>\n",
        "c<|im_end|>\n",
    ]
    starts = [text(tokenizer, rendered.token_ids[start : start + 2]) for start in rendered.message_start]
    assert starts == ["<|im_start|>s", "<|im_start|>u", "<|im_start|>a", "<|im_start|>u", "<|im_start|>a"]


def test_no_second_start_token():
    tokenizer = chat_tokenizer("{{ '<s>' }}" + CHATML)
    start = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    assert tokenizer.encode("a")[0] == start  # template and tokenizer would both write one
    rendered = render(say(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")), tokenizer)
    assert (rendered.token_ids == start).nonzero()[0].tolist() == [0]


def test_a_template_that_rewrites_history_begins_a_new_sequence_and_says_so():
    tokenizer = chat_tokenizer(STRIPS_THINKING)
    thread = say(("user", "a"), ("assistant", "<think>hm</think>x"), ("user", "b"), ("assistant", "<think>so</think>y"))
    first, second = render_sequences(thread, tokenizer)
    assert text(tokenizer, first.token_ids).endswith("assistant\n<think>hm</think>x<|im_end|>\n")
    assert (
        "hm" not in text(tokenizer, second.token_ids) and text(tokenizer, second.token_ids).count("<|im_start|>") == 4
    )
    assert (first.sequence, first.began, first.turn.tolist()) == (0, None, [0])
    assert (second.sequence, second.turn.tolist()) == (1, [1])
    said = "before message 3 the chat template writes another text from character 51 of the 80 fed"
    assert second.began == said
    # The earlier answer is context now, and only the new one is decoded.
    assert [text(tokenizer, second.token_ids[a:b]) for a, b in second.answer] == ["<think>so</think>y<|im_end|>\n"]
    with pytest.raises(
        RecordError, match="rewrites history; field: chat_template; got: '2 sequences: before message 3"
    ):
        render(thread, tokenizer)


def test_sampled_conversation_under_a_chat_template():
    thread = say(("user", "a"), ("assistant", "?"), ("user", "b"), ("assistant", "?"))
    for template, fresh in ((CHATML, False), (STRIPS_THINKING, True)):
        tokenizer = chat_tokenizer(template)
        talk = Conversation(thread, tokenizer, mode="sampled")
        first = talk.prompt()
        answer = tokenizer.encode("<think>hm</think>x")
        talk.answer(answer)
        second = talk.prompt()
        assert talk.fresh is fresh
        if not fresh:
            assert text(tokenizer, second) == "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        talk.answer([])
        sequences = talk.finish()
        assert len(sequences) == 1 + fresh
        assert sequences[0].token_ids[: len(first) + len(answer)].tolist() == [*first, *answer]


def test_an_answer_that_its_prompt_does_not_announce():
    # Prompts end with a reasoning mark that a finished answer does not have.
    tokenizer = chat_tokenizer(CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif"))
    rendered = render(say(("user", "a"), ("assistant", "b")), tokenizer)
    assert [text(tokenizer, rendered.token_ids[a:b]) for a, b in rendered.answer] == ["b<|im_end|>\n"]
    assert text(tokenizer, rendered.token_ids).endswith("<|im_start|>assistant\nb<|im_end|>\n")


def test_messages_a_template_does_not_separate_are_one():
    template = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% if not rest %}{{ raise_exception('no question') }}{% endif %}"
        "{% for m in rest %}{{ '<|im_start|>' + (s + ' ' if loop.first else '') }}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = chat_tokenizer(template)
    rendered = render(say(("system", "S"), ("user", "a"), ("assistant", "b")), tokenizer)
    assert text(tokenizer, rendered.token_ids) == "<|im_start|>S a<|im_end|><|im_start|>b<|im_end|>"
    assert rendered.message.tolist() == [1, 2] and rendered.message_start.tolist()[0] == 0


def test_dates_come_from_the_thread():
    tokenizer = chat_tokenizer("{{ strftime_now('%d %b %Y') }}" + CHATML)
    dated = Thread(
        id="t", owner="o", source="s", messages=(Message(role="user", text="a", ts="2026-03-14T23:59:00+02:00"),)
    )
    assert text(tokenizer, render(dated, tokenizer).token_ids).startswith("14 Mar 2026<|im_start|>")
    with pytest.raises(RecordError, match="got: 'it asks for a date that the thread does not have', expected: "):
        render(say(("user", "a")), tokenizer)


def test_refusals_of_chat_templates():
    with pytest.raises(
        RecordError, match=r"special token, .* cannot quote; field: messages\[1\].text; got: \['<\|im_end"
    ):
        render(say(("user", "a"), ("assistant", "<|im_end|>")), chat_tokenizer(CHATML))
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    with pytest.raises(RecordError, match="refuses this thread; field: chat_template; got: 'no tools'"):
        render(say(("user", "a"), ("tool", "b")), chat_tokenizer(strict + CHATML))
    with pytest.raises(UnsupportedModelError, match="neither the house role tokens nor a chat template"):
        render(say(("user", "a")), chat_tokenizer(None))


def test_identity_is_behaviour():
    plain = house_tokenizer()
    other = byte_tokenizer(["<|endoftext|>", *_roles()], [*_merges(), ("Ġ", "s")])  # splits one word otherwise
    assert tokenizer_digest(plain) != tokenizer_digest(other)
    swapped = byte_tokenizer(["<|user|>", "<|endoftext|>", *_roles()[1:]], _merges())
    assert tokenizer_digest(plain) != tokenizer_digest(swapped)
    assert template_digest(plain) != template_digest(swapped)
    assert template_digest(chat_tokenizer(CHATML)) != template_digest(chat_tokenizer(STRIPS_THINKING))
    assert tokenizer_digest(chat_tokenizer(CHATML)) == tokenizer_digest(chat_tokenizer(STRIPS_THINKING))
