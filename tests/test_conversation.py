"""Tests conversations: the tokens that a further turn prefills, and that responses match
generate().
"""

import itertools
from pathlib import Path

import jax.numpy as jnp
import pytest

import jsparse
from jsparse import SamplingParams
from jsparse.builder import dense
from jsparse.conversation import Conversation
from jsparse.policy import Eviction
from jsparse.runtime import capacity
from jsparse.text.short_names import short_name
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.toy_policies import prompt_ends, shrink

GGUF = Path(__file__).parent / "fixtures" / "hf" / "llama3" / "model.gguf"
# control tokens, so that no merge joins a prompt's end to its response
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}<|eot_id|>{{ m.content }}<|eot_id|>{% endfor %}"
    "assistant<|eot_id|>"
)
# one capacity, so that all chats and generate() share programs
OPTIONS = {"max_new_tokens": 9, "eos_token_id": (), "max_length": 120}
EVICTORS = (
    dense()._replace(eviction=Eviction(), name="evictor"),
    shrink(period=4),
    prompt_ends(),
    jsparse.hard_kv(budget=10, floor=7, cap=14, period=4, window=4, sink=2),
)
SAID = ["the cat sat on the mat", "or so", "what then"]


@shared
def loaded(template=TEMPLATE):
    """A model of 512 positions with a chat template."""
    made = jsparse.load(GGUF, dtype="float32")
    assert made.tokenizer is not None
    made.tokenizer.chat_template = template
    return made


@pytest.fixture
def params():
    return loaded()


def test_bare_text_is_no_conversation(params):
    with pytest.raises(ValueError, match=r"messages='hi': must be the whole.*'content': 'hi'"):
        Conversation(params, **OPTIONS).answer("hi")


@shared
def generated(template, said, **options):
    """The result of generate() for a conversation of alternating user and model messages."""
    roles = itertools.cycle(["user", "assistant"])
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return jsparse.generate(loaded(template), messages, **options)


def prompt_tokens(params, messages):
    text = params.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return len(params.tokenizer.encode(text, add_special_tokens=False))


class Chat:
    """Sends turns, and checks every response against generate() on the whole conversation.

    Attributes:
        read: the number of prefilled tokens of each turn.
        whole: the number of tokens of each turn's whole conversation.
    """

    def __init__(self, params, **options):
        self.params, self.options = params, OPTIONS | options
        self.conversation = Conversation(params, **self.options)
        self.messages, self.read, self.whole = [], [], []

    def say(self, text, *, checked=True, **hooks):
        self.messages.append({"role": "user", "content": text})
        calls = []
        made = self.conversation.answer(
            self.messages, on_progress=lambda *call: calls.append(call), **hooks
        )
        assert made.stats.prompt_tokens == prompt_tokens(self.params, self.messages)
        if checked:
            said = tuple(message["content"] for message in self.messages)
            alone = generated(self.params.tokenizer.chat_template, said, **self.options)
            assert (made.text, made.token_ids) == (alone.text, alone.token_ids)
            assert made.stats.prompt_tokens == alone.stats.prompt_tokens
        self.messages.append({"role": "assistant", "content": made.text})
        self.read.append(next(total for what, _, total in calls if what == "prefill"))
        self.whole.append(made.stats.prompt_tokens)
        return made

    @property
    def new(self):
        """The prefill of each turn if it continued from the last prompt."""
        return [now - before for before, now in zip([0, *self.whole], self.whole)]  # noqa: B905


def slots(chat):
    """The capacity of the session that is kept for the next turn."""
    session = chat.conversation._session
    assert session is not None
    return session.deployment.spec.capacity


@pytest.mark.parametrize(
    "options",
    slow_except(
        [
            {},
            {"policy": "quest(budget=16)"},
            {"policy": "double_sparsity(budget=8)"},
            {"policy": "lychee_decode(((1, 1), (0, 1)), value=16, correct_every=4)"},
            {"temperature": 1.0, "seed": 3, "policy": "streaming(sink=2, recent=8)"},
        ],
        {},
    ),
    ids=str,
)
def test_turn_prefills_only_new_tokens(params, options):
    chat = Chat(params, **options)
    for text in SAID:
        chat.say(text)
    assert chat.read == chat.new
    assert chat.conversation.reads_anew is None
    assert all(new < whole for new, whole in zip(chat.read[1:], chat.whole[1:], strict=True))


@pytest.mark.parametrize(
    "case",
    slow_except(
        [("quest(budget=16)", True, 8), ("quest(budget=16)", False, 0), ("dense", False, 8)],
        ("dense", False, 8),
    ),
    ids=str,
)
def test_response_stays_in_the_cache_if_it_is_dense_attentions(params, case):
    """All of its tokens but the newest, if the template reproduces the generated tokens."""
    (policy, exact, kept), tokenizer = case, params.tokenizer
    again = next(
        token
        for token in range(params.config.vocab_size)
        if tokenizer.encode(tokenizer.decode([token] * 9), add_special_tokens=False) == [token] * 9
    )
    always = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={again: 100.0})
    chat = Conversation(params, sampling=always, policy=policy, exact=exact, max_length=120)
    messages, read, whole = [], [], []
    for text in SAID[:2]:
        messages.append({"role": "user", "content": text})
        out = chat.answer(messages, on_progress=lambda *call: read.append(call))
        messages.append({"role": "assistant", "content": out.text})
        whole.append(out.stats.prompt_tokens)
    totals = [total for what, _, total in read if what == "prefill"]
    assert totals == [whole[0], whole[1] - whole[0] - kept]


@pytest.mark.parametrize(
    "options", slow_except([{}, {"policy": "quest(budget=16)", "exact": True}], {}), ids=str
)
def test_turn_that_failed_before_prefill_keeps_the_previous_one(params, options):
    """The session and the conversation end where the previous turn did."""

    class Broken:
        def put(self, value):
            raise OSError("gone")

        def end(self):
            pass

    chat = Chat(params, **options)
    chat.say(SAID[0])
    asked = [*chat.messages, {"role": "user", "content": SAID[1]}]
    with pytest.raises(OSError, match="gone"):
        chat.conversation.answer(asked, streamer=Broken())
    chat.say(SAID[2])
    assert chat.read == chat.new


def test_rewriting_template_is_prefilled_again():
    chat = Chat(loaded("{{ messages|length }}<|eot_id|>" + TEMPLATE))
    for text in SAID[:2]:
        chat.say(text)
    assert chat.read == chat.whole


@pytest.mark.slow
def test_conversation_that_outgrows_its_cache_is_prefilled_again(params, monkeypatch):
    monkeypatch.setattr(capacity, "MIN_COARSE", 16)  # the model has 512 positions
    chat = Chat(params, max_length=None)
    chat.say(SAID[0], checked=False)
    small = slots(chat)
    # room for twice the requested tokens
    assert small == capacity.bucket(2 * (chat.whole[0] + 9), 16)
    chat.say("z" * small, checked=False)
    assert chat.read[1] == chat.whole[1] > small
    chat.say(SAID[2], checked=False)
    assert chat.read[2] == chat.new[2]
    # without enough memory, the cache is as small as generate()'s
    monkeypatch.setattr(capacity, "fits", lambda *_: False)
    tight = Chat(params, max_length=None)
    tight.say(SAID[0], checked=False)
    assert slots(tight) == capacity.bucket(tight.whole[0] + 9, 16)


def test_turn_that_does_not_fit_is_refused_and_forgotten(params):
    """As by generate(), even if pages have room for more than max_length."""
    chat = Chat(params)
    chat.say("a")
    assert slots(chat) == 128
    room = 128 - 9 - prompt_tokens(params, [*chat.messages, {"role": "user", "content": ""}])
    with pytest.raises(ValueError, match="max_new_tokens=9 is 128: must be at most 120"):
        chat.conversation.answer([*chat.messages, {"role": "user", "content": "z" * room}])
    chat.say("c")
    assert chat.read == chat.new


@pytest.mark.parametrize("policy", slow_except(EVICTORS, EVICTORS[0]))
def test_policies_that_change_the_cache_prefill_every_turn_again(params, policy):
    chat = Chat(params, policy=policy)
    for text in SAID[:2]:
        chat.say(text)
    assert chat.read == chat.whole
    assert chat.conversation.reads_anew == (
        f"{short_name(policy)} drops tokens, so every turn prefills the whole conversation again"
    )


@pytest.mark.slow
def test_state_without_an_owner_is_prefilled_again(params):
    """Such a policy cannot be truncated, but generates."""
    own = dense()._replace(init=lambda spec: jnp.zeros(()), name="mine")
    chat = Chat(params, policy=own)
    for text in SAID[:2]:
        chat.say(text)
    assert chat.read == chat.whole
    assert "policy=mine: state is [] for 2 rows" in str(chat.conversation.reads_anew)


def test_options_of_one_response_and_unknown_ones_are_refused(params):
    for name in ("streamer", "on_progress", "logprobs"):
        with pytest.raises(ValueError, match=f"^{name}=1: must not be given to a conversation$"):
            Conversation(params, **{name: 1})
    with pytest.raises(
        TypeError, match=r"^Conversation\(\) has no temprature, did you mean temperat"
    ):
        Conversation(params, **{"temprature": 1})


def test_interrupted_response_leaves_the_conversation_usable(params):
    chat = Chat(params)
    chat.say(SAID[0])

    def interrupt(*_):
        raise KeyboardInterrupt

    def answer(**hooks):
        with pytest.raises(KeyboardInterrupt) as kept:
            chat.conversation.answer(
                [*chat.messages, {"role": "user", "content": SAID[1]}], **hooks
            )
        return kept  # as a notebook keeps the exception and all its references

    kept = answer(streamer=interrupt)
    # the prompt was prefilled, so that it is not new any more
    chat.messages += [
        {"role": "user", "content": SAID[1]},
        {"role": "assistant", "content": "so far"},
    ]
    chat.whole.append(prompt_tokens(params, chat.messages[:-1]))
    chat.say(SAID[2])
    assert chat.read[1] == chat.whole[2] - chat.whole[1]
    kept = answer(on_progress=interrupt)
    chat.say(SAID[1])
    assert chat.read[2] == chat.whole[3]
    del kept


def test_options_are_checked_before_the_first_turn(params):
    for options, said in (
        ({"seed": -1}, "seed=-1: must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be an integer"),
        ({"policy": "nonesuch"}, "unknown policy"),
        ({"policy": "snapkv(budget=64)", "exact": True}, "exact=True.*but evicts tokens"),
        ({"sampling": SamplingParams(), "top_k": 3}, "sampling: must not be given with other"),
    ):
        with pytest.raises(ValueError, match=said):
            Conversation(params, **options)


def test_options_of_a_conversation_may_be_sampling_params(params):
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    conversation = Conversation(params, sampling=sampling)
    asked = [{"role": "user", "content": SAID[0]}]
    made = conversation.answer(asked)
    options = {"max_new_tokens": 4, "eos_token_id": ()}
    assert made.token_ids == generated(TEMPLATE, (SAID[0],), **options).token_ids
    assert len(made.token_ids) == 4
