"""Tests the first calls of users who know vLLM or Hugging Face, with those libraries' names."""

import inspect
import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import jsparse
from jsparse import SamplingParams, names
from jsparse.builder import dense
from jsparse.engine.core import Engine
from jsparse.engine.options import EngineOptions
from jsparse.engine.packing import unpack
from jsparse.engine.progress import progress
from jsparse.policy import Policy, Services
from jsparse.runtime.decode_step import StepStats
from jsparse.selection import everything
from tests.support.tiny import tiny_params

GGUF = Path(__file__).parent / "fixtures" / "hf" / "llama3" / "model.gguf"
TEMPLATE = "{% for m in messages %}{{ m.role }}<|eot_id|>{{ m.content }}<|eot_id|>{% endfor %}"
SIZES = {
    "max_num_seqs": 4,
    "max_model_len": 64,
    "kv_cache_tokens": 192,
    "page_size": 8,
    "ladder": ((0, 16),),
    "prepare": False,
}
TEXTS = ["the cat sat on the mat", "or so"]


@pytest.fixture(scope="module")
def llm():
    """An engine made with vLLM's names, including options at their defaults."""
    made = jsparse.LLM(
        **{"model": str(GGUF), "dtype": "float32", "gpu_memory_utilization": 0.5, "seed": 0},
        **{"tensor_parallel_size": 1, "trust_remote_code": False, "enforce_eager": False},
        **{"swap_space": 0, "kv_cache_dtype": "auto", "quantization": None, **SIZES},
    )
    tokenizer = made.get_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture
def params(llm):
    return llm.engine.params


def generate(params, prompt, **options):
    """Generates with programs that all tests here share."""
    return jsparse.generate(params, prompt, **{"max_new_tokens": 8, "max_length": 64} | options)


# vLLM


def test_vllms_quickstart_runs(llm):
    outputs = llm.generate(TEXTS, SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt == text
        assert output.outputs[0].text
        assert output.outputs[0].logprobs is output.outputs[0].cumulative_logprob is None


def test_prompts_may_be_vllms_dicts(llm):
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    ids = llm.get_tokenizer().encode(TEXTS[0])
    plain = llm.generate(TEXTS[0], sampling)[0]
    given = [{"prompt": TEXTS[0]}, {"prompt_token_ids": ids}, ids, TEXTS[0]]
    for output in [*llm.generate(given, sampling), *llm.generate(given[0], sampling)]:
        assert output.outputs == plain.outputs
        assert output.prompt_token_ids == ids
    made = llm.generate(given, sampling)
    assert [output.prompt for output in made] == [TEXTS[0], None, None, TEXTS[0]]
    out = generate(llm.engine.params, [given[0], given[1]], max_new_tokens=5)
    assert [one.token_ids for one in out] == [plain.outputs[0].token_ids] * 2
    with pytest.raises(ValueError, match="must have one key, prompt or prompt_token_ids"):
        llm.generate({"prompt": "a", "multi_modal_data": {}})


def test_logprobs_have_vllms_shape(llm):
    (output,) = llm.generate(TEXTS[:1], SamplingParams(temperature=1.5, max_tokens=6, logprobs=3))
    (answer,) = output.outputs
    assert len(answer.logprobs) == len(answer.token_ids) == 6
    for place, (token, entries) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        own = entries[token]
        assert own.logprob == answer.token_logprobs[place]
        assert own.decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
        likely = answer.top_logprobs[place]
        assert entries.keys() == {token, *likely}
        ranked = sorted(likely, key=lambda other: entries[other].rank)
        assert ranked == list(likely)
        assert [entries[other].rank for other in ranked] == [1, 2, 3]
        assert [entries[other].logprob for other in ranked] == list(likely.values())
    total = math.fsum(answer.logprobs[n][t].logprob for n, t in enumerate(answer.token_ids))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_chat_content_may_have_parts(llm):
    parts = [{"type": "text", "text": "the cat "}, {"type": "text", "text": "sat"}]
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    plain, split = (
        llm.chat([{"role": "user", "content": content}], sampling, add_generation_prompt=True)[0]
        for content in ("the cat sat", parts)
    )
    assert split.prompt_token_ids == plain.prompt_token_ids
    assert split.outputs == plain.outputs
    with pytest.raises(ValueError, match=r"messages\[0\]\['content'\] has a part of type 'image'"):
        llm.chat([{"role": "user", "content": [{"type": "image"}]}])


def test_chat_continues_a_message(llm):
    said = [{"role": "assistant", "content": "the cat"}]
    (out,) = llm.chat(said, SamplingParams(max_tokens=1), continue_final_message=True)
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(out.prompt_token_ids) == tokenizer.decode(
        tokenizer.encode("assistant<|eot_id|>the cat", add_special_tokens=False)
    )


def test_model_defaults_can_be_requested(llm, params, monkeypatch):
    assert llm.get_default_sampling_params() == SamplingParams()
    monkeypatch.setitem(params.generation_defaults, "temperature", 0.7)
    monkeypatch.setitem(params.generation_defaults, "eos_token_id", 3)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7)


@pytest.mark.slow
def test_special_tokens_stay_in_the_text_on_request(llm):
    (end,) = llm.get_tokenizer().encode("<|eot_id|>", add_special_tokens=False)
    forced = {"logit_bias": {end: 100}, "ignore_eos": True, "max_tokens": 2}
    for skip, text in ((True, ""), (False, "<|eot_id|>" * 2)):
        sampling = SamplingParams(**forced, skip_special_tokens=skip)
        assert llm.generate(TEXTS[1], sampling)[0].outputs[0].text == text
    with pytest.raises(ValueError, match="skip_special_tokens=1: must be true or false"):
        SamplingParams(skip_special_tokens=1)  # pyright: ignore[reportArgumentType]


class Bar:
    """Stands in for tqdm."""

    def __init__(self, **options):
        self.options, self.done, self.closed = options, 0, False

    def update(self, count):
        assert not self.closed
        self.done += count

    def close(self):
        self.closed = True


def test_custom_bar_is_advanced_by_each_prompt(llm):
    bars = []

    def make(**options):
        bars.append(Bar(**options))
        return bars[-1]

    llm.generate(TEXTS, SamplingParams(max_tokens=2), use_tqdm=make)
    assert bars[0].options["total"] == bars[0].done == 2
    assert bars[0].closed
    with pytest.raises(ValueError, match="use_tqdm='yes': must be true, false or a callable"):
        llm.generate(TEXTS, SamplingParams(max_tokens=2), use_tqdm="yes")


def test_bar_is_shown_only_on_a_terminal(llm, capsys):
    shown = []
    for terminal in (True, False):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=100, force_jupyter=False)
        with progress(True, 3, console) as answered:
            answered(10)
            answered(20)
        shown.append(file.getvalue())
    assert "2/3" in shown[0]
    assert "tokens/s" in shown[0]
    assert not shown[1].strip()
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, force_jupyter=False)
    with progress(True, 3, console, doing=lambda: "compiling") as answered:
        answered(10)
    assert "compiling" in file.getvalue()
    assert "tokens/s" not in file.getvalue()
    llm.generate(TEXTS[1], SamplingParams(max_tokens=2))
    assert capsys.readouterr() == ("", "")


def test_unsupported_methods_of_an_llm_are_refused(llm):
    params = llm.engine.params
    for call, message in (
        (lambda: llm.generate("a", lora_request=3), "lora_request=3: adapters are not"),
        (lambda: llm.generate(None, prompt_token_ids=[1]), "prompt_token_ids=[1]: give token ids"),
        (lambda: llm.chat([], chat_template="x"), "chat_template='x': the model's own"),
        (lambda: jsparse.LLM(params, dtype="float16"), "dtype='float16': the model"),
        (lambda: jsparse.LLM(params, revision="a"), "revision='a': the model is"),
        (lambda: jsparse.LLM(3), "model=3: must be"),  # type: ignore[arg-type]
        (lambda: Engine("smollm2"), "params='smollm2': must be what jsparse.load returned"),
        (lambda: jsparse.generate("smollm2", "Gravity is"), "params='smollm2': must be what"),
        (lambda: jsparse.Conversation("smollm2"), "params='smollm2': must be what jsparse.load"),
        (lambda: generate(params, "a", policy=jsparse.quest), "policy=quest: did you mean jsparse"),
        (lambda: generate(params, params), "prompt=Params("),
        (
            lambda: generate(params, TEXTS[0], max_length=8),
            "prompt of 13 tokens + max_new_tokens=8 is 21: must be at most 8",
        ),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - what it says is checked below
            call()
        assert str(error.value).startswith(message), message
        assert len(str(error.value)) < 300


@pytest.mark.parametrize("made", [jsparse.LLM, jsparse.AsyncEngine])
def test_engine_refuses_vllms_options_by_name(llm, made):
    for name, refused in names.ENGINE.items():
        with pytest.raises(ValueError, match=f"^{name}='something': ") as error:
            made(llm.engine.params, **{name: "something"})
        assert str(error.value).endswith(refused.rule.replace("{value}", "'something'"))
    with pytest.raises(TypeError, match="has no max_seqs, did you mean max_num_seqs"):
        made(llm.engine.params, max_seqs=3)
    with pytest.raises(ValueError, match="^gpu_memory_utilization=2: must be a number above 0"):
        made(llm.engine.params, gpu_memory_utilization=2)


def test_signatures_list_every_option_of_an_engine():
    options = inspect.signature(EngineOptions).parameters
    for made in (jsparse.LLM, jsparse.AsyncEngine):
        parameters = inspect.signature(made).parameters
        assert options.keys() <= set(parameters)
        assert {"dtype", "revision", "tokenizer", "seed"} <= set(parameters)
        assert not [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    for name, parameter in options.items():
        assert inspect.signature(jsparse.LLM).parameters[name].default == parameter.default


def test_unknown_name_error_names_the_callee(llm):
    for call, message in (
        (lambda: llm.generate("a", tqdm=False), "LLM.generate() has no tqdm, did you mean use"),
        (lambda: llm.chat([], sampling_param=1), "LLM.chat() has no sampling_param, did you"),
        (lambda: jsparse.LLM("smollm2", dtyp=1), "LLM() has no dtyp, did you mean dtype?"),
        (lambda: jsparse.load("smollm2", dtyp=1), "load() has no dtyp, did you mean dtype?"),
    ):
        with pytest.raises(TypeError) as error:
            call()
        assert str(error.value).startswith(message)


# Hugging Face


class Streamer:
    """Treats its input as Hugging Face's streamers do."""

    def __init__(self):
        self.prompt, self.ids, self.ended = None, [], 0

    def put(self, value):
        if len(value.shape) > 1:
            assert value.shape[0] == 1
            value = value[0]
        if self.prompt is None:
            self.prompt = value.tolist()
        else:
            self.ids.extend(value.tolist())

    def end(self):
        self.ended += 1


def test_hugging_faces_streamer_gets_the_prompt_and_each_id(params):
    streamer = Streamer()
    out = generate(params, TEXTS[0], streamer=streamer)
    assert streamer.prompt == params.tokenizer.encode(TEXTS[0])
    assert streamer.ids == out.token_ids
    assert streamer.ended == 1
    pieces, streamers = [], [Streamer(), None]
    streamers[1] = pieces.append
    outs = generate(params, TEXTS, streamer=streamers)
    assert streamers[0].ids == outs[0].token_ids
    assert "".join(pieces) == outs[1].text
    for given, message in ((Streamer(), "must be a list of 2"), (3, "must be callable, or have")):
        with pytest.raises(ValueError, match=message):
            generate(params, TEXTS, streamer=given)


def test_do_sample_switches_sampling(params, monkeypatch):
    greedy, drawn = generate(params, TEXTS[0]), generate(params, TEXTS[0], temperature=1.0)
    assert generate(params, TEXTS[0], do_sample=False).token_ids == greedy.token_ids
    assert generate(params, TEXTS[0], do_sample=True).token_ids == drawn.token_ids
    assert drawn.token_ids != greedy.token_ids
    monkeypatch.setitem(params.generation_defaults, "temperature", 1.0)
    assert generate(params, TEXTS[0], do_sample=False).token_ids == greedy.token_ids
    for options, message in (
        ({"do_sample": True, "temperature": 0}, "do_sample=True: temperature=0 must be above 0"),
        ({"do_sample": False, "temperature": 0.5}, "do_sample=False: temperature=0.5 must be 0"),
        ({"do_sample": 1}, "do_sample=1: must be true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(params, TEXTS[0], **options)


def test_stop_strings_and_min_new_tokens_are_hugging_faces(params):
    whole = generate(params, TEXTS[0])
    stop = whole.text[2:4]
    cut = generate(params, TEXTS[0], stop_strings=stop)
    assert cut == generate(params, TEXTS[0], stop=stop) or cut.text == whole.text[:2]
    assert cut.finish_reason == "stop"
    assert generate(params, TEXTS[0], stop=None).text == whole.text
    end = whole.token_ids[1]
    (short, long) = (
        generate(params, TEXTS[0], eos_token_id=[end], min_new_tokens=minimum)
        for minimum in (None, 6)
    )
    assert len(short.token_ids) <= 2
    assert len(long.token_ids) >= 6
    assert end not in long.token_ids[:6]
    for options, message in (
        ({"stop": "a", "stop_strings": "b"}, "stop_strings='b': must not be given with stop='a'"),
        ({"min_new_tokens": 9}, "min_new_tokens=9: must be at most max_new_tokens, which is 8"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1: must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(params, TEXTS[0], **options)


def test_generate_refuses_hugging_faces_options_by_name(params):
    for name, refused in names.GENERATE.items():
        for call in (
            lambda **o: generate(params, "a", **o),
            lambda **o: jsparse.Conversation(params, **o),
        ):
            with pytest.raises(ValueError, match=f"^{name}='something': ") as error:
                call(**{name: "something"})
            assert str(error.value).endswith(refused.rule.replace("{value}", "'something'"))


def test_options_at_their_defaults_change_nothing(params):
    nothing = {name: refused.nothing for name, refused in names.GENERATE.items()}
    assert generate(params, TEXTS[0], **nothing).token_ids == generate(params, TEXTS[0]).token_ids


def test_load_refuses_options_by_name():
    for name, refused in names.LOAD.items():
        with pytest.raises(ValueError, match=f"^{name}='something': ") as error:
            jsparse.load("smollm2", **{name: "something"})
        assert str(error.value).endswith(refused.rule)


# Mistyped arguments


def test_model_is_summarised_in_one_line(params):
    assert repr(tiny_params(num_layers=1)) == "Params('tiny', llama, 69.3K parameters, float32)"
    assert len(repr(params)) < 200


def all_of(cache, layer):
    return everything(cache.layers[layer].lengths)


STATE = {"init": lambda spec: (np.zeros(2, np.float32),)}


def test_hook_with_a_wrong_result_is_named(params):
    fine = {"select": lambda state, layer, q, cache: (all_of(cache, layer), None, state)}
    for hooks, message in (
        (
            {"select": lambda state, layer, q, cache: all_of(cache, layer)},
            "select of wrong must return (Selection, Summary or None, state), not a Selection",
        ),
        (
            {"select": lambda state, layer, q, cache: (all_of(cache, layer), None, None)},
            "select of wrong must return a state like the one it got, (), not None",
        ),
        (
            {"append": lambda state, layer, *_: None, **STATE},
            "append of wrong must return a state like the one it got, (an array float32[2]), not",
        ),
        (
            {"prefill": lambda state, *_: state[:0], **STATE},
            "prefill of wrong must return a state like the one it got, (an array float32[2]), n",
        ),
        (
            {"services": Services(lambda state, cache: cache, period=1)},
            "maintain of wrong must return (state, cache), not (",
        ),
    ):
        policy = Policy(**fine | hooks, name="wrong")  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError) as error:  # noqa: PT011 - what it says is checked below
            generate(params, TEXTS[1], policy=policy)
        assert str(error.value).startswith(message), message


def test_share_is_never_above_one(params, monkeypatch):
    over = np.float32(1) + np.finfo(np.float32).eps
    steps = np.full((2, 8), 7, np.int32)
    steps.view(np.float32)[:, 1:] = [-2, over, 0.5, over, 0.25, over, 1]
    told = unpack(steps, 2, layer_stats=True)
    assert (told.ids, told.logprobs) == ([7, 7], [-2.0, -2.0])
    assert told.shares.tolist() == [[1.0, 0.5]] * 2
    assert told.layers is not None
    assert told.layers.tolist() == [[[1.0, 0.25], [1.0, 1.0]]] * 2
    means = StepStats.over_layers
    monkeypatch.setattr(
        StepStats, "over_layers", lambda step: StepStats(*(over + 0 * x for x in means(step)))
    )
    # a separate policy, because programs are stored by policy
    stats = generate(params, TEXTS[1], policy=dense()._replace(name="over")).stats
    assert stats.attended_fraction == stats.read_fraction == 1.0


def test_methods_of_vllms_llm_are_refused_by_name():
    llm = object.__new__(jsparse.LLM)
    for name, instead in names.METHODS.items():
        with pytest.raises(AttributeError) as error:
            getattr(llm, name)
        assert str(error.value) == f"LLM has no {name}: {instead}"
    assert not hasattr(llm, "no_such")
