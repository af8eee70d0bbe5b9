"""Tests that tokenizers decode arrays of jax."""

import jax.numpy as jnp

from tests.models.test_tokenizer import tokenizer_of


def test_decode_takes_arrays_of_jax():
    tokenizer = tokenizer_of("qwen2")
    assert tokenizer.decode(jnp.array(tokenizer.encode("a river"))) == "a river"
