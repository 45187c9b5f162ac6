"""Small tokenizers, made in memory: one with the house role tokens, and one for a chat template."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HOUSE_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>")
CHAT_TOKENS = ("<s>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(specials, merges=()):
    """Byte-level BPE: special tokens first, then the 256 bytes, then the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


@cache
def house_tokenizer():
    return byte_tokenizer(HOUSE_TOKENS, [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")])


def chat_tokenizer(template):
    """A transformers tokenizer with a chat template of its own."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(CHAT_TOKENS), bos_token="<s>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer
