"""Tests the server by the harness' own client, without jsparse's model class."""

import httpx
import pytest

from tests.support.serving_http import a_service, an_engine, at_rest, serving

pytest.importorskip("lm_eval", reason="needs the package lm-eval")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion


@pytest.fixture(scope="module")
def engine():
    """Compiles all programs as shared ones, since CI runs this file apart from its neighbours."""
    return an_engine(prepare=True)


def test_the_harness_chats(engine):
    service, asked = a_service(), ("w1 w2", "w3", "w4 w5 w6", "w7")
    with serving(service, engine) as url:
        path = f"{url}/v1/chat/completions"
        model = LocalChatCompletion(
            base_url=path, model="tiny", num_concurrent=2, max_retries=1, tokenizer_backend=None
        )
        wanted = {"until": ["w299"], "max_gen_toks": 6, "temperature": 0}
        talks = [model.apply_chat_template([{"role": "user", "content": text}]) for text in asked]
        requests = [Instance("generate_until", {}, (talk, dict(wanted)), 0) for talk in talks]
        answers = model.generate_until(requests, disable_tqdm=True)
        for text, answer in zip(asked, answers, strict=True):
            body = {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 6,
                "temperature": 0,
                "stop": ["w299"],
            }
            got = httpx.post(path, json=body, timeout=60).json()
            assert answer == got["choices"][0]["message"]["content"] and answer
        assert at_rest(service)
