"""Tests the client that measures servers: its figures, its timeline, its errors.

Timelines run in virtual time: the event loop's clock jumps to the next event, and a scripted server
sleeps in it.
"""

import asyncio
import json

import httpx
import numpy as np
import pytest

from jsparse.benchmark import serve
from jsparse.benchmark.latency import DETAILS, figures
from jsparse.benchmark.serve import BenchRequest, RequestResult, ask, body_of, drive

pytestmark = pytest.mark.pure

COMPLETIONS, CHAT = serve.ENDPOINTS
BODY = body_of(BenchRequest("hi", 3), COMPLETIONS, "tiny", ignore_eos=True, options={})
DONE = "[DONE]"


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock jumps to when the next thing is due."""

    def __init__(self):
        super().__init__()
        self.now, wait = 0.0, self._selector.select

        def select(timeout):
            self.now += timeout or 0.0
            return wait(0)

        self._selector.select = select

    def time(self):
        return self.now


def in_virtual_time(task):
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(task)


class Script(httpx.AsyncByteStream):
    """Sends each event after a pause in seconds; raises those that are errors."""

    def __init__(self, events):
        self.events = events

    async def __aiter__(self):
        for pause, event in self.events:
            await asyncio.sleep(pause)
            if isinstance(event, Exception):
                raise event
            data = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {data}\n\n".encode()


def scripted(*scripts, status=200):
    """A client whose requests get these scripts, the last of them again and again."""
    left = list(scripts)

    def handle(request):
        events = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(status, stream=Script(events))

    return httpx.AsyncClient(
        transport=httpx.MockTransport(handle), base_url="http://server", timeout=None
    )


def piece(text, finish=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(prompt, new):
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new}}


def answered(*pieces, prompt=4, new=None):
    """A script: pieces at these pauses, then the usage."""
    events = [(pause, piece("x")) for pause in pieces]
    return [*events, (0, usage(prompt, new or len(pieces))), (0, DONE)]


def done(sent, *times, new=None, prompt=10, due=None, ended=None):
    return RequestResult(
        due=sent if due is None else due,
        sent=sent,
        times=list(times),
        ended=times[-1] if ended is None else ended,
        prompt_tokens=prompt,
        output_tokens=len(times) if new is None else new,
        text="x" * len(times),
    )


def test_figures_of_given_times():
    answers = [
        done(1.0, 1.5, 1.75, 2.0, 2.25),
        done(2.0, 4.0, 5.0, new=9, prompt=30),
        RequestResult(due=2.5, sent=2.5, ended=11.0, error="HTTP 500: broken"),
        done(3.0, 3.25, new=1, prompt=2),
    ]
    made = figures(answers, percentiles=(50, 99.9), goodput={"ttft": 500, "tpot": 250})
    assert made["duration"] == 10.0
    assert (made["completed"], made["failed"]) == (3, 1)
    assert (made["total_input_tokens"], made["total_output_tokens"]) == (42, 14)
    assert made["request_throughput"] == 0.3
    assert made["output_throughput"] == 1.4
    assert made["total_token_throughput"] == 5.6
    # of 500, 2000 and 250 ms
    assert made["mean_ttft_ms"] == pytest.approx(2750 / 3)
    assert made["median_ttft_ms"] == made["p50_ttft_ms"] == 500
    assert made["std_ttft_ms"] == pytest.approx(np.std([500, 2000, 250]))
    assert made["p99.9_ttft_ms"] == pytest.approx(500 + 0.998 * 1500)
    # 0.75 s for 3 tokens behind the first, 1 s for 8; the answer of one token has none
    assert made["mean_tpot_ms"] == pytest.approx((250 + 125) / 2)
    assert made["median_itl_ms"] == 250
    assert made["mean_itl_ms"] == pytest.approx((3 * 250 + 1000) / 4)
    assert made["mean_e2el_ms"] == pytest.approx((1250 + 3000 + 250) / 3)
    # the second waits too long for its first token; the last has no token behind it
    assert made["request_goodput"] == 0.2
    # half of the nine tokens of the second answer come 3 s after the first was sent
    assert made["max_output_tokens_per_s"] == 4.5
    assert made["max_concurrent_requests"] == 2
    assert made["errors"] == ["", "", "HTTP 500: broken", ""]
    assert made["output_lens"] == [4, 9, 0, 1]
    assert made["ttfts"] == [0.5, 2.0, 0.0, 0.25]
    assert made["itls"] == [[0.25] * 3, [1.0], [], []]
    assert made["start_times"] == [0.0, 1.0, 1.5, 2.0]
    assert set(DETAILS) <= set(made)


def test_one_that_ends_makes_room_for_one_sent_just_then():
    assert figures([done(0.0, 1.0), done(1.0, 2.0)])["max_concurrent_requests"] == 1
    assert figures([done(0.0, 1.0), done(0.9, 2.0)])["max_concurrent_requests"] == 2


def test_of_nothing_complete_there_is_no_figure():
    made = figures([RequestResult(error="x", ended=2.0)], goodput={"ttft": 1}, queued=True)
    assert (made["completed"], made["failed"]) == (0, 1)
    assert made["request_throughput"] == made["request_goodput"] == 0
    assert made["mean_ttft_ms"] is None
    assert made["p99_client_queue_time_ms"] is None
    json.dumps(made, allow_nan=False)


def test_a_stream_is_timed_piece_by_piece():
    script = [
        (0.5, piece("a")),
        (0.25, piece("")),  # a token whose text is held back
        (0.25, piece("bc")),
        (0.125, piece("", "length")),
        (1, usage(7, 5)),
        (1, DONE),
    ]
    answer = in_virtual_time(ask(scripted(script), COMPLETIONS, BODY))
    assert answer.error == ""
    assert answer.times == [0.5, 0.75, 1.0]
    assert answer.ended == 1.125
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("abc", 7, 5)


def test_the_last_piece_may_say_why_it_ended():
    script = [(1, piece("a")), (1, piece("b", "length")), (0, usage(7, 2)), (0, DONE)]
    answer = in_virtual_time(ask(scripted(script), COMPLETIONS, BODY))
    assert (answer.times, answer.ended) == ([1.0, 2.0], 2.0)


def test_a_chat_is_timed_from_its_first_content():
    def delta(finish=None, **given):
        return {"choices": [{"index": 0, "delta": given, "finish_reason": finish}]}

    script = [
        (0.5, delta(role="assistant", content="")),
        (0.5, delta(content="a")),
        (0.5, delta(content="b")),
        (0.5, delta("stop") | usage(3, 2) | {"choices": delta("stop")["choices"]}),
        (0, DONE),
    ]
    answer = in_virtual_time(ask(scripted(script), CHAT, BODY))
    assert (answer.times, answer.ended, answer.text) == ([1.0, 1.5], 2.0, "ab")
    # an answer whose only token has no text
    script = [(1, delta(role="assistant")), (1, delta("stop")), (0, usage(3, 1)), (0, DONE)]
    assert in_virtual_time(ask(scripted(script), CHAT, BODY)).times == [2.0]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([(1, piece("a")), (0, usage(1, 1))], "the stream ended without [DONE]"),
        ([(1, piece("a")), (0, DONE)], "the stream has no usage"),
        ([(1, usage(1, 0)), (0, DONE)], "the answer is empty"),
        ([(1, piece("a")), (0, {"error": {"message": "boom"}})], "while streaming: boom"),
        ([(1, piece("a")), (0, {"error": "bust"})], "while streaming: bust"),
        ([(1, "{nonsense")], "no JSON object: {nonsense"),
        ([(1, "[1]")], "no JSON object: [1]"),
        ([(1, piece("a")), (0, httpx.ReadError(""))], "ReadError"),
        ([(1, httpx.ReadTimeout("slow"))], "ReadTimeout: slow"),
    ],
)
def test_what_goes_wrong_is_an_error_of_its_request(script, message):
    answer = in_virtual_time(ask(scripted(script), COMPLETIONS, BODY))
    assert message in answer.error
    assert answer.ended == 1.0
    assert figures([answer])["failed"] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long"}}, "HTTP 400: too long"),
        ({"object": "error", "message": "too long"}, "HTTP 400: too long"),
        ({"detail": "no"}, "HTTP 400: {'detail': 'no'}"),
        ("busy", "HTTP 400: busy"),
        ("", "HTTP 400"),
    ],
)
def test_refusals_are_quoted(body, message):
    content = body if isinstance(body, str) else json.dumps(body)
    transport = httpx.MockTransport(lambda request: httpx.Response(400, text=content))
    server = httpx.AsyncClient(transport=transport, base_url="http://server")
    assert in_virtual_time(ask(server, COMPLETIONS, BODY)).error == message


def test_requests_are_sent_when_they_are_due():
    server = scripted(answered(1.0, 0.5), answered(0.25), answered(2.0))
    answers = in_virtual_time(drive(server, COMPLETIONS, [BODY] * 3, [0.0, 0.5, 3.0]))
    assert [answer.sent for answer in answers] == [0.0, 0.5, 3.0]
    assert [answer.times for answer in answers] == [[1.0, 1.5], [0.75], [5.0]]
    made = figures(answers)
    assert made["duration"] == 5.0
    assert made["max_concurrent_requests"] == 2


def test_concurrency_is_bounded_and_what_waits_is_not_timed_but_told():
    seen = []
    answers = in_virtual_time(
        drive(
            scripted(answered(1.0)),
            COMPLETIONS,
            [BODY] * 4,
            [0.0, 0.0, 0.0, 0.5],
            max_concurrency=2,
            on_answer=seen.append,
        )
    )
    assert [answer.sent for answer in answers] == [0.0, 0.0, 1.0, 1.0]
    assert len(seen) == 4
    made = figures(answers, queued=True)
    assert made["max_concurrent_requests"] == 2
    assert made["mean_ttft_ms"] == 1000
    assert made["mean_client_queue_time_ms"] == pytest.approx(1e3 * (1.0 + 0.5) / 4)


def test_a_body_has_what_was_asked_for():
    assert BODY == {
        "model": "tiny",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": "hi",
        "ignore_eos": True,
    }
    chat = body_of(BenchRequest("hi", 3), CHAT, "m", ignore_eos=False, options={"temperature": 0.5})
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert chat["temperature"] == 0.5
    assert "prompt" not in chat and "ignore_eos" not in chat
