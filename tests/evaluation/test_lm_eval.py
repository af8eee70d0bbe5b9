"""Tests the harness' model class against jsparse.generate and jsparse.logits.

Also runs the harness' own RULER with it.
"""

import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

import jsparse
from tests.support.encoders import smollm2
from tests.support.serving_http import a_service, serving

harness = pytest.importorskip("lm_eval", reason="needs the package lm-eval")

from lm_eval.api.instance import Instance  # noqa: E402

from jsparse.evaluation import lm_eval as adapter  # noqa: E402

TINY = str(Path(__file__).parents[1] / "fixtures" / "hf" / "llama3" / "model.gguf")
POLICY = "streaming(sink=1, recent=2)"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
PROMPTS = ["the cat sat on the mat and the dog", "a bird", "one two three four five six"]
GREEDY = {"do_sample": False, "temperature": 0.0, "until": [], "max_gen_toks": 12}


@pytest.fixture(scope="module")
def params():
    return jsparse.load(TINY)


def model(**arguments):
    return adapter.JSparseLM(**{"pretrained": TINY, "policy": POLICY, "batch_size": 2} | arguments)


def answers(lm, contexts, **arguments):
    return lm.generate_until([request(context, GREEDY | arguments) for context in contexts])


def request(*arguments):
    return Instance("generate_until", {}, arguments, 0)


def expected(params, ids, policy=POLICY, new=12):
    return jsparse.generate(params, ids, policy=policy, max_new_tokens=new, temperature=0.0).text


def log_probs(params, ids):
    """Log-probabilities after every token, in float64."""
    logits = np.asarray(jsparse.logits(params, ids)[0], np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def scored(params, context, continuation):
    """Scores one row slowly: the log-likelihood, and whether it is the greedy text."""
    found = log_probs(params, [*context, *continuation])[len(context) - 1 : -1]
    total = sum(row[i] for row, i in zip(found, continuation, strict=True))
    return total, found.argmax(-1).tolist() == continuation


@pytest.mark.slow
def test_outputs_are_those_of_generate_with_the_policy(params):
    lm, asked, wanted = model(), [], []
    for context, new in zip([*PROMPTS, *PROMPTS], [12, 12, 12, 5, 5, 5], strict=True):
        asked.append(request(context, GREEDY | {"max_gen_toks": new}))
        wanted.append(expected(params, context, new=new))
    assert lm.generate_until(asked) == wanted
    assert wanted[:3] != [expected(params, context, policy="dense") for context in PROMPTS]
    info = lm.get_model_info()
    assert info["policy"] == POLICY and info["loglikelihood"].startswith("dense")
    assert 0 < info["attended_fraction"] < 1


def test_batches_have_one_size_and_equal_arguments(monkeypatch):
    calls, real = [], adapter.generate

    def spy(params, rows, **options):
        calls.append(([len(row) for row in rows], options["max_new_tokens"]))
        return real(params, rows, **options)

    monkeypatch.setattr(adapter, "generate", spy)
    lm = model()
    contexts = ["a" * n for n in (3, 9, 5, 7, 2)]
    lm.generate_until([request(c, GREEDY | {"max_gen_toks": 1 + (c == "aa")}) for c in contexts])
    longest = [len(lm.tok_encode(c)) for c in contexts]
    of_one, of_two = ([row for row, n in calls if n == new] for new in (1, 2))
    assert of_one == [[longest[1], longest[3]], [longest[2], longest[0]]]
    assert of_two == [[longest[4]] * 2]


def test_until_truncates(params):
    text = expected(params, PROMPTS[0])
    stop = text[4:6]
    assert stop and answers(model(), PROMPTS[:1], until=[stop, ""]) == [text[: text.index(stop)]]
    assert answers(model(), PROMPTS[:1], until=stop) == [text[: text.index(stop)]]


def test_long_contexts_are_cut_from_the_left_with_a_warning(params, caplog):
    lm = model(max_length=30)
    ids = [lm.tok_encode(prompt) for prompt in PROMPTS]
    lengths = list(map(len, ids))
    assert answers(lm, PROMPTS) == [expected(params, row[-18:]) for row in ids]
    lost = [length - 18 for length in lengths if length > 18]
    (said,) = caplog.messages
    assert len(lost) == 2
    assert "2 of 3 texts do not fit in max_length=30" in said
    assert f"{sum(lost)} tokens are lost" in said and f"up to {max(lost)} of a text" in said


def test_log_likelihoods_are_dense_with_a_warning(params, caplog):
    lm = model(batch_size=3)
    pairs = [
        ("the cat", " sat on"),
        ("", "a bird"),
        ("one two three four", " five"),
        ("a ", "b"),
        ("x" * 70, "y" * 9),
    ]
    found = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    rows = [lm._encode_pair(a, b) if a else ([280], lm.tok_encode(b, False)) for a, b in pairs]
    for (value, greedy), row in zip(found, rows, strict=True):
        slow, likeliest = scored(params, *row)
        assert value == pytest.approx(slow, abs=1e-4) and greedy == likeliest
    (said,) = caplog.messages
    assert "log-likelihoods are dense" in said and POLICY in said


def test_rolling_predicts_every_token_once_with_the_most_context(params):
    text = "the dog and " * 30
    lm = model(max_length=16)
    (found,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    ids = lm.tok_encode(text, add_special_tokens=False)
    before, slow = [280, *ids], 0.0
    for first in range(0, len(ids), 16):
        end = min(first + 16, len(ids))
        window = before[max(end - 16, 0) : end]
        found_here = log_probs(params, window)[len(window) - (end - first) :]
        slow += sum(row[i] for row, i in zip(found_here, ids[first:end], strict=True))
    assert found == pytest.approx(slow, abs=1e-3)


def test_log_likelihoods_over_http_are_those_in_memory(params):
    """The harness's own client finds the tokenizer by itself, and sends prompts to be echoed."""
    from lm_eval.api.registry import get_model

    texts = ("the cat sat on", " the mat"), ("a bird", " and the dog"), ("one", " two three four")
    # the harness's client adds no BOS
    rows = [(f"<|begin_of_text|>{context}", continuation) for context, continuation in texts]
    asked = [Instance("loglikelihood", {}, row, 0) for row in rows]
    options = {"max_num_seqs": 2, "max_model_len": 64, "prepare": False, "page_size": 16}
    with serving(a_service(), jsparse.AsyncEngine(params, **options)) as url:
        client = get_model("local-completions")(
            base_url=f"{url}/v1/completions", model="tiny", batch_size=2
        )
        assert client.tokenizer_backend == "remote"
        found = client.loglikelihood(asked, disable_tqdm=True)
    wanted = model().loglikelihood(asked)
    for (value, greedy), (in_memory, likeliest) in zip(found, wanted, strict=True):
        assert value == pytest.approx(in_memory, abs=1e-4) and greedy == likeliest


def test_chats():
    lm = model()
    lm.tokenizer.chat_template = TEMPLATE
    asked = [{"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(asked) == "<user>hi<end><a>"
    begun = [*asked, {"role": "assistant", "content": " hi, it is "}]
    said = lm.apply_chat_template(begun, add_generation_prompt=False)
    assert said == "<user>hi<end><assistant> hi, it is"
    assert (lm.chat_template(True), lm.tokenizer_name) == (TEMPLATE, TINY.replace("/", "__"))
    lm.tokenizer.chat_template = "nothing"
    with pytest.raises(ValueError, match="'hi, it is': must occur in the chat template's text"):
        lm.apply_chat_template(begun, add_generation_prompt=False)


def test_text_that_starts_with_bos_gets_no_second_bos():
    lm = model()
    ids = [280, *lm.tok_encode("the", False)]
    assert lm.tok_encode("the") == lm.tok_encode("<|begin_of_text|>the") == ids
    assert (lm.prefix_token_id, lm.eot_token_id) == (280, 281)
    lm.tokenizer.eos_token_ids = ()
    with pytest.raises(ValueError, match=r"must be a model whose tokenizer names an end token"):
        _ = lm.eot_token_id


def test_arguments_out_of_range_are_refused():
    for arguments, message in [
        ({"policy": "nope"}, "unknown policy 'nope'"),
        ({"batch_size": "auto"}, "batch_size='auto': must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size=0: must be an integer of at least 1"),
        ({"max_gen_toks": True}, "max_gen_toks=True: must be an integer of at least 1"),
        ({"max_length": 513}, "max_length=513: must be at most 512, the model's maximum"),
        ({"page_size": 7}, "page_size=7: must be one of (8, 16, 32, 64)"),
        ({"dtype": "int8"}, "int8"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            model(**arguments)


def test_requests_out_of_range_are_refused():
    for arguments, message in [
        ({"num_beams": 4}, "generation arguments ['num_beams']: must be among until, max_gen_toks"),
        ({"max_gen_toks": 0}, "max_gen_toks=0: must be an integer of at least 1"),
        ({"max_gen_toks": 64}, "max_gen_toks=64: must be less than max_length=64"),
        ({"do_sample": True, "top_p": 2.0}, "top_p=2.0: must be"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            answers(model(max_length=64), ["a"], **arguments)


class AutoTokenizer:
    """Stands in for transformers' tokenizer, so that RULER's generators count with jsparse's."""

    def __call__(self, text):
        return types.SimpleNamespace(input_ids=smollm2(text))

    @classmethod
    def from_pretrained(cls, name, **_):
        assert name == "smollm2"
        return cls()


@pytest.fixture
def offline_ruler(monkeypatch):
    """Lets RULER's generators run offline.

    They need a tokenizer of transformers, which is not a dependency, and data for splitting
    sentences that only the essays use.
    """
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("wonderwords")
    stand_in = types.ModuleType("transformers")
    stand_in.__spec__ = ModuleSpec("transformers", None)
    stand_in.__version__ = "0"
    stand_in.AutoTokenizer = stand_in.PreTrainedTokenizerBase = AutoTokenizer
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.ruler.common_utils", raising=False)
    monkeypatch.setattr(nltk.data, "find", lambda *_: None)

    def refuse(*_):
        raise OSError("this test must not use the network")

    monkeypatch.setattr("socket.socket.connect", refuse)


def test_harness_variable_tracking_runs(offline_ruler):
    policy = "streaming(sink=4, recent=512)"
    found = harness.simple_evaluate(
        model="jsparse",
        model_args={"pretrained": "smollm2", "policy": policy},
        tasks=["ruler_vt"],
        metadata={"max_seq_lengths": [1024]},
        limit=2,
        batch_size=2,
        bootstrap_iters=0,
    )
    samples = found["samples"]["ruler_vt"]
    texts = [sample["resps"][0][0] for sample in samples]
    contexts: list[str] = [sample["arguments"][0][0] for sample in samples]
    params = jsparse.load("smollm2")
    lengths = [len(smollm2(context)) for context in contexts]
    assert len(texts) == 2 and all(512 < length <= 1024 for length in lengths)
    outs = jsparse.generate(params, contexts, policy=policy, max_new_tokens=30, temperature=0.0)
    assert texts == [out.text for out in outs]
    hits = sum(
        name.lower() in text.lower()
        for sample, text in zip(samples, texts, strict=True)
        for name in sample["doc"]["outputs"]
    )
    assert found["results"]["ruler_vt"]["1024,none"] == pytest.approx(hits / 10)
    assert hits > 0
    assert found["config"]["policy"] == policy and found["config"]["attended_fraction"] < 0.8
