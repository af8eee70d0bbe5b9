"""Tokenizers to measure texts with: SmolLM2's own, and two toys."""

from tests.support.model_tokenizers import tokenizer_of


def smollm2(text):
    return tokenizer_of("smollm2").encode(text, add_special_tokens=False)


def words(text):
    return [len(word) for word in text.split()]


def characters(text):
    return [ord(character) for character in text]


def spent(encode, sample):
    return len(encode(sample.prompt)) + len(encode(sample.prefix)) + sample.max_new_tokens
