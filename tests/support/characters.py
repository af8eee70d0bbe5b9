"""The tiny model with a tokenizer of single characters and a few longer tokens."""

import dataclasses
from functools import cache

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from jsparse.models.checkpoint import Params
from jsparse.models.tokenizer import Tokenizer
from tests.support.tiny import VOCAB, tiny_params

END = "<end>"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PAIRS = (("{", '"'), ('"', ":"), ('"', ","), ("t", "r"))
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}{{ opening }}{% endif %}"
)


@cache
def tokenizer_of_characters(special_tags: bool = False) -> Tokenizer:
    """A byte-level BPE: a token for each byte, for PAIRS and some other pairs, TAGS and END."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = [(vowel, other) for other in "nrstlm" for vowel in "aeiou"]
    pairs = [*PAIRS, *others][: VOCAB - len(alphabet) - len(TAGS) - 1]
    vocabulary = [*alphabet, *("".join(pair) for pair in pairs)]
    core = tokenizers.Tokenizer(
        models.BPE({token: nth for nth, token in enumerate(vocabulary)}, pairs)
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    tags = [AddedToken(tag, normalized=False, special=special_tags) for tag in TAGS]
    (core.add_special_tokens if special_tags else core.add_tokens)(tags)
    core.add_special_tokens([AddedToken(END, special=True)])
    return Tokenizer(core, eos_token_ids=[core.token_to_id(END)], chat_template=TEMPLATE)


def with_characters(seed: int = 0) -> Params:
    """The tiny model of one layer with this tokenizer."""
    params = tiny_params(num_layers=1, seed=seed)
    return dataclasses.replace(params, tokenizer=tokenizer_of_characters())
