"""Tests that arrays of jax are prompts."""

import jax.numpy as jnp

from jsparse.text.prompts import encode
from tests.text.test_prompts import LETTERS


def test_an_array_of_ids_is_a_prompt():
    rows, alone = encode(LETTERS, jnp.array([5, 6]))
    assert (rows, alone) == ([[5, 6]], True)
    assert all(type(token) is int for token in rows[0])
