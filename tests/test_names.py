"""Tests that options with other libraries' names are accepted, or refused with the alternative."""

import inspect

import pytest

from jsparse import SamplingParams, names
from jsparse.names import Refusal, takes

pytestmark = pytest.mark.pure

WORDS = {"eager": Refusal("programs are compiled", False), "beams": Refusal("must be 1", 1)}


def engine(params, *, seats: int = 4, share: float = 0.9):
    return params, seats, share


class Model:
    @takes(WORDS, more=engine)
    def __init__(self, path, *, eager: bool = False, **options):
        self.given = path, eager, engine(path, **options)

    @takes({})
    def run(self, prompt, *, tokens: int = 8):
        return prompt, tokens


def test_options_at_their_defaults_are_accepted():
    assert Model("a", eager=False, beams=1, seats=2).given == ("a", False, ("a", 2, 0.9))
    assert Model("a", beams=None).given == Model("a").given
    assert Model("a").run("b", tokens=3) == ("b", 3)


def test_refusal_names_option_value_and_rule():
    for given, message in (
        ({"eager": True}, "eager=True: programs are compiled"),
        ({"beams": 4}, "beams=4: must be 1"),
        ({"beams": True}, "beams=True: must be 1"),
        ({"beams": 1.0}, "beams=1.0: must be 1"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            Model("a", **given)


def test_unknown_name_gets_a_similar_one_and_the_list():
    for call, message in (
        (
            lambda: Model("a", seat=1),
            "Model() has no seat, did you mean seats? It has path, eager, seats, share",
        ),
        (lambda: Model("a", xyz=1), "Model() has no xyz. It has path, eager, seats, share"),
        # beams is refused, so it is not suggested
        (lambda: Model("a", beam=1), "Model() has no beam. It has path"),
        (lambda: Model("a").run("b", token=1), "Model.run() has no token, did you mean tokens?"),
    ):
        with pytest.raises(TypeError) as error:
            call()
        assert message in str(error.value)


def test_signature_lists_every_option():
    assert str(inspect.signature(Model)) == (
        "(path, *, eager: bool = False, seats: int = 4, share: float = 0.9)"
    )


def test_sampling_options_of_vllm_are_refused_by_name():
    for name, refused in names.SAMPLING.items():
        assert SamplingParams(**{name: refused.nothing}) == SamplingParams()
        with pytest.raises(ValueError, match=f"^{name}='something': {refused.rule[:20]}"):
            SamplingParams(**{name: "something"})


def test_equivalent_sampling_options_of_vllm_are_accepted():
    same = {"top_k": -1, "stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**same) == SamplingParams(top_k=0)
    with pytest.raises(ValueError, match=r"^top_k=-2: must be .* \(0 and -1 are off\)"):
        SamplingParams(top_k=-2)
    with pytest.raises(TypeError, match="has no max_new_tokens, did you mean max_tokens"):
        SamplingParams(**{"max_new_tokens": 3})
