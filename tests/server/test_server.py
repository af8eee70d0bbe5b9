"""Tests the server with openai's client and httpx."""

import asyncio
import itertools
import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from jsparse.models.config import Experts
from jsparse.server.live import Live
from jsparse.text.short_names import short_name
from tests.support import patient
from tests.support.raw_http import connected, post
from tests.support.serving import hand_over, hold
from tests.support.serving_http import a_service, an_engine, at_rest, serving, soon
from tests.support.tiny import tiny_params

WORDS = "w3 w14 w15 w92 w65"
GREEDY = {"model": "tiny", "temperature": 0}
KEY = "Bearer open-sesame"


@pytest.fixture(scope="module")
def service():
    return a_service(api_key="open-sesame", aliases=("org/tiny",))


@pytest.fixture(scope="module")
def url(service, tmp_path_factory):
    page = tmp_path_factory.mktemp("page")
    (page / "index.html").write_text("<!doctype html><title>page</title>")
    with serving(service, an_engine(), page) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    how = {"base_url": f"{url}/v1", "api_key": "open-sesame", "max_retries": 0, "timeout": 60}
    with openai.OpenAI(**how) as made:
        yield made


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, headers={"Authorization": KEY}, timeout=60) as made:
        yield made


def text_of(client, tokens=10, **options):
    made = client.completions.create(prompt=WORDS, max_tokens=tokens, **GREEDY, **options)
    return made.choices[0].text


def test_finished_request_is_logged_without_its_text(http, caplog):
    caplog.set_level("INFO", "jsparse.server")
    http.post("/v1/completions", json={"prompt": WORDS, "max_tokens": 2, "temperature": 0})
    assert soon(lambda: caplog.messages)
    (line,) = caplog.messages
    assert "prompt tokens" in line and line.endswith("length")
    assert WORDS not in line


def test_a_completion(client, service):
    made = client.completions.create(prompt=WORDS, max_tokens=10, **GREEDY)
    (choice,) = made.choices
    assert (choice.finish_reason, choice.index, made.model) == ("length", 0, "tiny")
    assert len(choice.text.split()) == 10
    usage = made.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 10, 15)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < usage.model_extra["jsparse"]["attended"] <= 1
    assert usage.model_extra["jsparse"]["read"] > 0
    own = service.engine.engine.policy.name
    assert usage.model_extra["jsparse"]["policy"] == short_name(own) != own
    assert at_rest(service)


def test_pieces_add_up(client, service, monkeypatch):
    hand_over(service.engine, monkeypatch)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt=WORDS, max_tokens=10, **usage, **GREEDY))
    pieces = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(pieces) == text_of(client)
    assert len(pieces) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_ids_lists_and_echo(client):
    ids = [int(word[1:]) for word in WORDS.split()]
    plain = text_of(client)
    by_ids = client.completions.create(prompt=ids, max_tokens=10, **GREEDY)
    assert by_ids.choices[0].text == plain
    for prompts in ([WORDS, "w1 w2"], [ids, [1, 2]]):
        many = client.completions.create(prompt=prompts, max_tokens=10, n=2, **GREEDY)
        assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in many.choices[:2]] == [plain] * 2
        assert many.choices[2].text == many.choices[3].text != plain
        assert many.usage.completion_tokens == 40 and many.usage.prompt_tokens == 7
        streamed = dict.fromkeys(range(4), "")
        asked = {"prompt": prompts, "max_tokens": 10, "n": 2}
        for chunk in client.completions.create(stream=True, **asked, **GREEDY):
            (choice,) = chunk.choices  # many clients read only the first
            streamed[choice.index] += choice.text
        assert list(streamed.values()) == [choice.text for choice in many.choices]
        echoed = client.completions.create(prompt=prompts, max_tokens=10, echo=True, **GREEDY)
        assert echoed.choices[0].text == f"{WORDS}{plain}"


def test_echoed_prompts_have_logprobs(client, http):
    """As evaluation harnesses ask for them: the first token has none, and offsets go on."""
    asked = {"prompt": [WORDS, WORDS], "max_tokens": 1, "logprobs": 2, "echo": True}
    made = client.completions.create(**asked, **GREEDY)
    given = made.choices[1].logprobs
    assert given.tokens == made.choices[1].text.split() and len(given.tokens) == 6
    assert given.token_logprobs[0] is given.top_logprobs[0] is None
    tops = zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True)
    for token, logprob, top in [*tops][1:]:
        assert top[token] == logprob and len(top) in (2, 3)
    assert given.text_offset == [*itertools.accumulate(map(len, given.tokens[:-1]), initial=0)]
    one = asked | {"prompt": WORDS, "stream": True}
    (chunk,) = client.completions.create(**one, **GREEDY)
    assert chunk.choices[0].logprobs == given
    # another completion of the prompt uses the cache, and is ahead of its log-probabilities
    long = one | {"prompt": " ".join(f"w{nth + 5}" for nth in range(40)), "n": 2, "stream": False}
    plain = [client.completions.create(**long, **GREEDY) for _ in range(2)][1]
    streamed = [*client.completions.create(**long | {"stream": True}, **GREEDY)]
    for choice in plain.choices:
        mine = [each.choices[0] for each in streamed if each.choices[0].index == choice.index]
        assert [x for each in mine for x in each.logprobs.token_logprobs] == (
            choice.logprobs.token_logprobs
        )
    nothing = client.completions.create(**asked | {"max_tokens": 0}, **GREEDY)
    assert nothing.choices[0].text == WORDS and nothing.usage.completion_tokens == 0
    assert nothing.choices[0].logprobs.token_logprobs == given.token_logprobs[:5]
    # vLLM's own field
    body = {"prompt": WORDS, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for word, own, found in zip(given.tokens[1:5], given.token_logprobs[1:5], others, strict=True):
        assert found[word[1:]]["logprob"] == own and found[word[1:]]["decoded_token"] == word
    chat = {"messages": [{"role": "user", "content": "w2"}], "prompt_logprobs": 0, "max_tokens": 1}
    made = http.post("/v1/chat/completions", json=chat).json()
    assert [each and [*each] for each in made["prompt_logprobs"]] == [None, ["7"]]


@pytest.mark.slow
def test_offsets_and_times_of_a_stream_match_the_response(client):
    # text is held back while it may start a stop string
    asked = {"prompt": WORDS, "max_tokens": 8, "logprobs": 1, "stop": ["w3000", " w9 w9 w9"]}
    plain = client.completions.create(**asked, **GREEDY).choices[0].logprobs
    chunks = list(client.completions.create(**asked, stream=True, **GREEDY))
    pieces = [chunk.choices[0].logprobs for chunk in chunks]
    assert [at for piece in pieces for at in piece.text_offset] == plain.text_offset
    assert [each for piece in pieces for each in piece.tokens] == plain.tokens
    assert plain.text_offset == sorted(plain.text_offset)
    assert len({chunk.created for chunk in chunks}) == 1


def test_a_chat(client, service, monkeypatch):
    hand_over(service.engine, monkeypatch)
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2 w3"}]
    made = client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY)
    (choice,) = made.choices
    assert choice.message.role == "assistant" and len(choice.message.content.split()) == 8
    assert made.usage.prompt_tokens == 4  # the template's own w7 is one of them
    plain = client.completions.create(prompt="w1 w2 w3 w7", max_tokens=8, **GREEDY)
    assert choice.message.content == plain.choices[0].text
    messages[1]["content"] = [{"type": "text", "text": "w2 "}, {"type": "text", "text": "w3"}]
    stream = client.chat.completions.create(messages=messages, max_tokens=8, stream=True, **GREEDY)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant" and deltas[1].role is None
    assert "".join(delta.content for delta in deltas) == choice.message.content
    # without max_tokens a sequence uses all room
    free = client.chat.completions.create(messages=messages, **GREEDY)
    assert free.usage.total_tokens == 96


def test_log_probabilities(client):
    made = client.completions.create(prompt=WORDS, max_tokens=5, logprobs=2, **GREEDY).choices[0]
    given = made.logprobs
    assert given.tokens == made.text.split() and len(given.top_logprobs) == 5
    tops = zip(given.tokens, given.token_logprobs, given.top_logprobs, strict=True)
    for token, logprob, top in tops:
        assert logprob <= 0 and top[token] == max(top.values()) == logprob and len(top) == 2
    assert given.text_offset[0] == 0
    asked = {"prompt": WORDS, "max_tokens": 5, "logprobs": 2, "stream": True}
    stream = client.completions.create(**asked, **GREEDY)
    parts = [chunk.choices[0].logprobs.token_logprobs for chunk in stream]
    assert list(itertools.chain(*parts)) == given.token_logprobs
    asked = {"messages": [{"role": "user", "content": "w2"}], "max_tokens": 3, "logprobs": True}
    chat = client.chat.completions.create(**asked, top_logprobs=2, **GREEDY).choices[0]
    for token in chat.logprobs.content:
        assert bytes(token.bytes).decode() == token.token and len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob


def test_stop_seed_and_policy_values(client):
    plain = text_of(client)
    stop = plain.split()[4]
    made = client.completions.create(prompt=WORDS, max_tokens=10, stop=[stop], **GREEDY).choices[0]
    assert made.finish_reason == "stop" and stop not in made.text.split()
    warm = {"model": "tiny", "prompt": WORDS, "max_tokens": 10, "temperature": 1.5}
    drawn = [client.completions.create(seed=seed, **warm).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    # without a temperature the API's default applies, not greedy decoding
    texts = [client.completions.create(model="tiny", prompt=WORDS).choices[0].text for _ in "abc"]
    assert {*texts} != {plain}
    shares = [
        client.completions.create(
            prompt=f"{WORDS} " * 8, max_tokens=10, extra_body={"policy": own}, **GREEDY
        ).usage.model_extra["jsparse"]["attended"]
        for own in ({"dense": True}, {}, {"p": 0.2})
    ]
    assert shares[0] == pytest.approx(1) and 0.99 > shares[1] > shares[2]
    more = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3}
    more |= {"ignore_eos": True, "stop_token_ids": [299], "include_stop_str_in_output": True}
    own = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"17": 100}}
    own |= {"prompt": WORDS, "max_tokens": 4, "top_p": 0.9}
    made = client.completions.create(**own, extra_body=more, **GREEDY)
    assert made.choices[0].text.split() == ["w17"] * 4


def test_state(client, http, url):
    model, other = client.models.list().data
    assert (model.id, model.model_extra["max_model_len"]) == ("tiny", 96)
    assert model.model_extra["policy"].startswith("twilight(base=")
    assert model.model_extra["policy_short"] == "twilight(all_pages(), p=0.9)"
    assert model.model_extra["chat_template"] is True
    assert client.models.retrieve("tiny") == model
    assert client.models.retrieve("org/tiny") == other
    assert http.get("/v1/models/other/tiny").json()["error"]["code"] == "model_not_found"
    asked = {"model": "org/tiny", "prompt": WORDS, "max_tokens": 1}
    assert http.post("/v1/completions", json=asked).json()["model"] == "tiny"
    assert http.get("/health").status_code == 200
    assert "version" in http.get("/version").json()
    tokens = http.post("/tokenize", json={"prompt": WORDS}).json()
    assert tokens == {"count": 5, "max_model_len": 96, "tokens": [3, 14, 15, 92, 65]}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "w9"}]}).json()
    assert chat["tokens"] == [9, 7]
    for more, expected in (
        ({"chat_template_kwargs": {"more": "w8"}}, [9, 7, 8]),
        ({"continue_final_message": True}, [9]),
        ({"add_generation_prompt": False, "chat_template_kwargs": {"more": "w8"}}, [9, 8]),
    ):
        body = {"messages": [{"role": "user", "content": "w9"}]} | more
        assert http.post("/tokenize", json=body).json()["tokens"] == expected, more
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], "messages" in info["chat_template"]) == (None, True)
    text = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": WORDS}


def test_metrics(client, service, http):
    def text():
        return http.get("/metrics").text

    def read():
        return {
            (sample.name, sample.labels.get("finished_reason", "")): sample.value
            for family in families(text())
            for sample in family.samples
            if "le" not in sample.labels
        }

    assert at_rest(service)
    before = read()
    text_of(client, 10)
    assert at_rest(service)  # a slot is freed shortly after the response was sent
    after = read()

    def grew(name, reason=""):
        return after[f"jsparse:{name}", reason] - before.get((f"jsparse:{name}", reason), 0)

    assert grew("prompt_tokens_total") == 5
    assert grew("generation_tokens_total") == 10
    assert grew("request_success_total", "length") == 1
    assert grew("inter_token_latency_seconds_count") == 9
    assert grew("prefix_cache_queries_total") == 5
    names = "time_to_first_token_seconds", "e2e_request_latency_seconds", "attended_fraction"
    for name in (*names, "request_queue_time_seconds"):
        assert grew(f"{name}_count") == 1
    # the same under vLLM's names, for those that it has
    for name, reason in (
        ("kv_cache_usage_perc", ""),
        ("request_success_total", "length"),
        ("time_to_first_token_seconds_count", ""),
    ):
        assert after[f"vllm:{name}", reason] == after[f"jsparse:{name}", reason]
    assert "vllm:decode_steps_total" not in {name for name, _ in after}
    assert re.search(
        r'^vllm:cache_config_info\{block_size="8",.*num_gpu_blocks="\d+"\} 1', text(), re.M
    )
    assert after["jsparse:num_requests_running", ""] == 0
    assert after["jsparse:kv_cache_usage_perc", ""] == 0


def test_first_tokens_are_sent_at_once(client, service, monkeypatch):
    assert at_rest(service)
    go_on = hold(service.engine, monkeypatch, at_once=True)
    stream = client.completions.create(prompt=WORDS, max_tokens=90, stream=True, **GREEDY)
    try:
        assert next(stream).choices[0].text and not go_on.is_set()
    finally:
        go_on.set()
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


def test_all_tokens_are_sent_if_the_sequence_ends_during_the_first_event(
    client, service, monkeypatch
):
    assert at_rest(service)
    go_on = hold(service.engine, monkeypatch, at_once=True)
    output = service.texts.output

    async def slow(state, *, new):
        made = await output(state, new=new)
        if not go_on.is_set():
            go_on.set()
            while not state.finished:
                await asyncio.sleep(0.001)
        return made

    monkeypatch.setattr(service.texts, "output", slow)
    usage = {"include_usage": True}
    made = client.completions.create(
        prompt=WORDS, max_tokens=20, stream=True, stream_options=usage, **GREEDY
    )
    *chunks, last = made
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage.completion_tokens == 20


def test_live(client, http, service, monkeypatch):
    assert at_rest(service)  # otherwise the engine would be held at another test's request
    go_on = hold(service.engine, monkeypatch)
    stream = client.completions.create(prompt=WORDS, max_tokens=90, stream=True, **GREEDY)
    next(stream)
    with http.stream("GET", "/live") as live:
        lines = live.iter_lines()
        picture = json.loads(next(line for line in lines if line).removeprefix("data: "))
        go_on.set()
        for chunk in stream:
            assert chunk.choices
    assert picture["running"] == 1 and picture["waiting"] == 0
    assert 0 < picture["kv_cache_usage"] <= 1
    assert picture["dense_bound_tokens_per_second"] is None  # the bandwidth of a CPU is unknown
    (request,) = picture["requests"]
    assert request["phase"] == "decoding"
    assert request["prompt_tokens"] == 5 and request["tokens"] >= 1
    layers = picture["attended_by_layer"]
    assert layers is None or (len(layers) == 1 and all(0 < share <= 1 for share in layers))


@pytest.mark.usefixtures("url")
def test_bound_of_dense_decoding(service, monkeypatch):
    live = Live(service)
    monkeypatch.setattr(live, "_bandwidth", 1e12)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(service.engine.engine.params.weights))
    # K and V, two KV heads of 16 floats
    read = weights + 300 * 2 * 2 * 16 * 4
    assert live.dense_bound([100, 200]) == pytest.approx(2 * 1e12 / read)
    assert live.dense_bound([]) is None


@pytest.mark.parametrize(("windows", "tokens"), [((), 300), ((20, None), 170)])
def test_bound_counts_windows_and_expected_experts(windows, tokens, monkeypatch):
    experts = Experts(number=4, chosen=1, intermediate_size=8, normalized=True)
    config = replace(tiny_params().config, num_layers=2, windows=windows, experts=experts)
    layer = {"mlp": {"experts": np.zeros(1600, np.uint8)}, "norm": np.zeros(100, np.uint8)}
    params = SimpleNamespace(
        config=config, mesh=None, weights={"params": {"layers_0": layer, "layers_1": layer}}
    )
    engine = SimpleNamespace(params=params, spec=SimpleNamespace(token_bytes=10))
    service: Any = SimpleNamespace(ready=SimpleNamespace(engine=engine))
    live = Live(service)
    monkeypatch.setattr(live, "_bandwidth", 1e12)
    # two rows leave out 9 of 16 experts
    read = 2 * (1600 * 7 / 16 + 100) + 10 * tokens
    assert live.dense_bound([100, 200]) == pytest.approx(2 * 1e12 / read)


def test_keys(http, url):
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "open-sesame"},
        {"Authorization": "Bearer open-sesame2"},
        {"Authorization": "Bearer \xff"},
    ):
        for path in ("/v1/models", "/metrics", "/live", "/openapi.json"):
            got = patient.get(f"{url}{path}", headers=_raw(headers))
            assert got.status_code == 401
            assert got.json()["error"]["code"] == "invalid_api_key"
        got = patient.post(f"{url}/v1/completions", headers=_raw(headers), json={"prompt": "w1"})
        assert got.status_code == 401
        for path in ("/health", "/version", "/"):
            assert patient.get(f"{url}{path}", headers=_raw(headers)).status_code == 200


def _raw(headers):
    return {name: value.encode("latin-1") for name, value in headers.items()}


def test_page_is_strict(url):
    got = patient.get(f"{url}/")
    assert got.headers["content-type"].startswith("text/html")
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert patient.get(f"{url}/index.html").text == got.text
    for path in ("/../app.py", "/%2e%2e%2fapp.py", "/app.py", "/page/index.html"):
        assert patient.get(f"{url}{path}").status_code in (401, 404)


async def crowd(url, service, expected):
    """64 concurrent streams; every other one hangs up."""
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="open-sesame", max_retries=0, timeout=60
    ) as client:

        async def one(nth):
            stream = await client.completions.create(
                prompt=f"w{nth % 8} w2", max_tokens=20, stream=True, **GREEDY
            )
            text, seen = "", 0
            async for chunk in stream:
                text += chunk.choices[0].text
                seen += 1
                if nth % 2 and seen > nth % 5:
                    await stream.close()
                    return
            assert text == expected[nth % 8]

        await asyncio.gather(*map(one, range(64)))


@pytest.mark.slow
def test_crowd_with_half_of_the_clients_hanging_up(client, url, service):
    expected = [
        client.completions.create(prompt=f"w{nth} w2", max_tokens=20, **GREEDY).choices[0].text
        for nth in range(8)
    ]
    asyncio.run(crowd(url, service, expected))
    assert at_rest(service)


def test_hang_up_within_the_body_is_no_error(url, service, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    with connected(url) as peer:
        peer.sendall(post("/v1/completions", {"prompt": WORDS}, authorization=KEY)[:-5])
        assert soon(lambda: service.inside)
    assert at_rest(service)
    assert not caplog.records
