"""Tests the server's log: a line for each finished request, and throughput."""

from types import SimpleNamespace

from jsparse.server import log


def request(times=(1.5, 2.0, 3.5), finishes=("stop",), cached=0):
    return SimpleNamespace(
        request_id="cmpl-1",
        ids=[1] * 7,
        seqs=[SimpleNamespace(cached_tokens=cached)],
        builders=[SimpleNamespace(finish=finish) for finish in finishes],
        metrics=SimpleNamespace(arrived=1.0, token_times=list(times)),
    )


def test_request_has_one_line():
    for given, line in [
        (request(), "7 prompt tokens, 3 new, first after 0.50 s, 1.0 tokens/s, stop"),
        (request(cached=4), "7 prompt tokens (4 cached), 3 new, first after 0.50 s, 1.0"),
        (request(times=(), finishes=(None,)), "7 prompt tokens, 0 new, abort"),
        (request(times=(2.0,)), "7 prompt tokens, 1 new, first after 1.00 s, stop"),
        (request(times=(2.0, 2.0), finishes=("stop", "length")), "1.00 s, length/stop"),
    ]:
        assert log.of_request(given).startswith("cmpl-1: "), given
        assert line in log.of_request(given), given


def make_engine(running=0, waiting=0, read=0, new=0):
    pool = SimpleNamespace(available=30, size=40)
    scheduler = SimpleNamespace(begun=[0] * running, reading=[], waiting=[0] * waiting, pool=pool)
    return SimpleNamespace(
        scheduler=scheduler, counters=SimpleNamespace(prefill_tokens=read, new_tokens=new)
    )


def test_throughput_is_logged_while_requests_exist():
    before, now = log.EngineSnapshot(1.0, 10, 20), log.EngineSnapshot(3.0, 30, 21)
    assert log.of_speed(make_engine(running=2, waiting=1), before, now) == (
        "10.0 prompt tokens/s, 0.5 new tokens/s, 2 running, 1 waiting, KV cache 25.0% in use"
    )
    assert log.of_speed(make_engine(), now, now._replace(time=9.0)) == ""
    assert "0.0 new tokens/s, 0 running, 1 waiting" in log.of_speed(
        make_engine(waiting=1), now, now._replace(time=9.0)
    )
