"""Tests the command line: output streams, exit codes, and error messages."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

import jsparse
from jsparse import generation
from jsparse.benchmark import steps
from jsparse.cli import info_table, recommend
from jsparse.cli.app import app
from jsparse.cli.console import write_any_text
from jsparse.conversation import Conversation
from jsparse.models import checkpoint
from jsparse.models.gguf import GGUFFile
from jsparse.models.tokenizer import Tokenizer
from jsparse.text import prompts
from tests.support.programs import shared

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
TINY = str(FIXTURES / "llama3" / "model.gguf")
ON_TINY = ["--model", TINY, "--max-new-tokens", "6"]
COMMAND = [sys.executable, "-m", "jsparse"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def run(*args, stdin=None):
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


@shared
def ran_once(*args, stdin=None):
    """Runs a command once for all tests; also returns the prompts that the engine received."""
    with pytest.MonkeyPatch.context() as patch:
        calls = asked(patch)
        return run(*args, stdin=stdin), calls


def printed(*args, stdin=None):
    return ran_once(*args, stdin=stdin)[0]


@pytest.fixture(scope="module")
def expected():
    return jsparse.generate(jsparse.load(TINY), "the cat", max_new_tokens=6, logprobs=True)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """Makes a folder like the GGUF fixture, with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / "llama3" / name, folder)
    tokenizer = Tokenizer.from_gguf(GGUFFile(Path(TINY)).metadata)
    tokenizer.chat_template = TEMPLATE
    tokenizer.to_files(folder)
    return folder


def asked(monkeypatch):
    """Records the prompts that the engine is called with."""
    calls, encode = [], prompts.encode

    def spy(params, prompt):
        calls.append(prompt)
        return encode(params, prompt)

    monkeypatch.setattr(prompts, "encode", spy)
    return calls


def interrupt(monkeypatch):
    """Interrupts the engine after one piece of text, as Ctrl-C does."""

    def interrupted(params, prompt, *, streamer, **options):
        streamer("so far")
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupted)
    monkeypatch.setattr(Conversation, "answer", interrupted)


@pytest.mark.slow
def test_missing_platform_is_one_line():
    ran = subprocess.run(
        [*COMMAND, "info", TINY],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "no_such"},
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: JAX_PLATFORMS='no_such': must be platforms that JAX finds")


def test_unencodable_characters_of_stdout_are_replaced(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    write_any_text()
    print("a “cat”", flush=True)
    assert stdout.buffer.getvalue() == b"a ?cat?\n"


def test_stdout_has_only_the_text(expected):
    ran = printed("generate", "the cat", *ON_TINY)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, expected.text + "\n", "")


def test_stdout_has_only_json(expected):
    options = ["--json", "--logprobs", "--policy", "streaming(sink=0, recent=4096)"]
    ran = printed("generate", "the cat", *ON_TINY, *options)
    made = json.loads(ran.stdout)
    assert made["token_ids"] == expected.token_ids
    assert made["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert made["policy"] == "streaming(sink=0, recent=4096)"
    assert made["versions"]["jsparse"] == jsparse.__version__
    assert made["stats"]["new_tokens"] == 6
    assert ran.stderr == ""


def test_prompts_come_from_files_and_stdin(expected, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("the cat\n")
    assert printed("generate", "--file", file, *ON_TINY).stdout == expected.text + "\n"
    assert printed("generate", "-", *ON_TINY, stdin="the cat\n").stdout == expected.text + "\n"


def test_every_option_reaches_the_engine(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        generation, "generate", lambda p, x, **options: seen.update(options) or 1 / 0
    )
    given = {
        "policy": "dense", "max_new_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9,
        "min_p": 0.1, "repetition_penalty": 1.1, "seed": 4, "max_length": 64, "page_size": 8,
    }  # fmt: skip
    flags = [
        text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", value)
    ]
    lists = ["--stop", "a", "--stop", "b", "--eos-token-id", 5, "--eos-token-id", 6]
    ran = run("generate", "x", "--model", TINY, *flags, *lists)
    assert isinstance(
        ran.exception, ZeroDivisionError
    )  # errors other than the user's keep their traceback
    assert {name: seen[name] for name in given} == given
    assert (seen["stop"], seen["eos_token_id"]) == (["a", "b"], [5, 6])


def test_latency_uses_random_weights_only_on_request(monkeypatch):
    seen = []
    monkeypatch.setattr(steps, "shaped", lambda *_, **__: "random")
    monkeypatch.setattr(checkpoint, "load", lambda *_, **__: "loaded")
    monkeypatch.setattr(steps, "measure", lambda params, *_, **__: seen.append(params) or 1 / 0)
    for flags in ((), ("--random-weights",)):
        assert isinstance(run("bench", "latency", TINY, *flags).exception, ZeroDivisionError)
    assert seen == ["loaded", "random"]


def assert_refused(*cases):
    for args, said in cases:
        ran = run(*args, stdin="hi\n")
        assert (ran.exit_code, ran.stdout) == (2, ""), args
        assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1, args
        assert said in ran.stderr, args


def test_mistake_is_one_line_and_exit_code_2():
    assert_refused(
        (["generate", "x", "--model", "nope"], "model='nope'"),
        (["generate", "x", "--model", "no/such.gguf"], "does not exist"),
        (["generate", "x", "--policy", "nope"], "unknown policy 'nope'"),
        (["generate", "x", "--policy", "streaming(recent=0)"], "recent=0"),
        (["generate", "x", *ON_TINY, "--temperature", "-1"], "temperature=-1"),
        (["generate", "x", *ON_TINY, "--page-size", "9"], "page_size=9"),
        (["generate", "x", *ON_TINY, "--stop", ""], "at least one character"),
        (["generate", "x" * 600, *ON_TINY], "must be at most 512"),
        (["generate", "x", *ON_TINY, "--revision", "main"], "only Hub ids have revisions"),
        (["generate", "x", "--model", FIXTURES / "llama"], "needs a tokenizer"),
        (["generate", "x", "--kv-cache-dtype", "fp8"], "kv_cache_dtype='fp8': must be 'int8'"),
        (["generate", "x", *ON_TINY, "--chat"], "no chat template"),
        (["generate", "x", "--chat", "--chat-template-kwargs", "{'a': 1}"], "must be a JSON obje"),
        (["generate", "x", "--chat-template-kwargs", '{"a": 1}'], "needs --chat"),
        (["generate", "x", "--chat-template", "a.jinja"], "--chat-template needs --chat"),
        (["chat", "--chat-template", "a.jinja"], "chat_template='a.jinja': must be a file"),
        (["chat", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs [1]: must be a JSON"),
        (["chat", "--model", TINY], "no chat template: use `jsparse generate`"),
        (["info", "nope"], "model='nope'"),
        (["info", FIXTURES], "config.json"),
        (["info", TINY, "--context", "513"], "context=513: must be from 1 to 512"),
        (["info", TINY, "--context", "0"], "context=0"),
        (["info", TINY, "--policy", "twilight(all_pages(), p=2)"], "p=2"),
    )


@pytest.mark.slow
def test_unknown_prefill_is_refused_before_the_model_is_loaded():
    for command in ("generate x --model", "chat", "serve", "eval", "bench throughput"):
        ran = run(*command.split(), "no-model", "--prefill", "xatention")
        assert (ran.exit_code, ran.stdout) == (2, ""), command
        assert ran.stderr == (
            "error: prefill='xatention': unknown method 'xatention', did you mean xattention?\n"
        ), command


def test_inspect_refuses_in_one_line():
    assert_refused(
        (["inspect", "the cat", *ON_TINY[:2], "--layer", "99"], "layer=99: must be from 0 to"),
        (["inspect", "the cat", *ON_TINY[:2], "--step", "0"], "step=0: must be"),
        (["inspect", "the cat", *ON_TINY[:2], "--overlap", "99"], "overlap=99: must be at most"),
        (["inspect", *ON_TINY[:2]], "PROMPT or --file: must give exactly one of them"),
    )


def test_ctrl_c_keeps_the_generated_text(monkeypatch):
    interrupt(monkeypatch)
    ran = run("generate", "x", *ON_TINY)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (130, "so far\n", "")
    ran = run("generate", "x", *ON_TINY, "--json")
    assert ran.exit_code == 130
    assert json.loads(ran.stdout)["text"] == "so far"
    assert json.loads(ran.stdout)["finish_reason"] == "interrupted"


@pytest.mark.slow
def test_sigint_and_a_closed_pipe_leave_no_traceback():
    long = [*COMMAND, "generate", "the", "--model", TINY]
    long += ["--max-new-tokens", "400", "--eos-token-id", "287"]
    for end in (lambda p: p.send_signal(signal.SIGINT), lambda p: p.stdout.close()):
        with subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(1)
            end(process)
            assert process.stderr.read() == b""


def test_chat_keeps_the_conversation_until_reset(chat_model):
    options = ["--model", chat_model, "--max-new-tokens", "3", "--system", "be brief"]
    ran, calls = ran_once("chat", *options, stdin="one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    assert (ran.exit_code, ran.stderr) == (0, "")
    said = [call["messages"] for call in calls]
    assert [[m["role"] for m in messages] for messages in said] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert [messages[-1]["content"] for messages in said] == ["one", "two", "three"]
    assert ran.stdout.startswith(said[1][2]["content"] + "\n")


def test_chat_template_kwargs_reach_the_template(chat_model):
    options = ["--model", chat_model, "--max-new-tokens", "1"]
    given = ["--chat-template-kwargs", '{"thinks": false}']
    for command, stdin in ((["generate", "hi", "--chat"], None), (["chat"], "hi\n")):
        ran, (call,) = ran_once(*command, *options, *given, stdin=stdin)
        assert (ran.exit_code, call["chat_template_kwargs"]) == (0, {"thinks": False})
        assert call["messages"] == [{"role": "user", "content": "hi"}]


def test_interrupted_response_is_kept_and_the_chat_continues(chat_model, monkeypatch):
    interrupt(monkeypatch)
    ran = run("chat", "--model", chat_model, stdin="one\ntwo\n")
    assert (ran.exit_code, ran.stdout) == (0, "so far\nso far\n")


def test_chat_commands_are_not_sent_to_the_model(chat_model):
    options = ["--model", chat_model, "--max-new-tokens", "3"]
    ran, calls = ran_once("chat", *options, stdin="/help\n/etc/hosts\n /x\n/quit\nfour\n")
    assert ran.exit_code == 0
    assert "/reset starts over" in ran.stderr
    assert [call["messages"][-1]["content"] for call in calls] == ["/etc/hosts", "/x"]
    ran, calls = ran_once("chat", *options, stdin="/resets now\ntwo\n")
    assert (ran.exit_code, ran.stdout, calls) == (2, "", [])
    assert ran.stderr.startswith("error: /resets: must be one of /help, /reset, /exit, /quit;")


def test_info_counts_the_parameters_without_loading():
    for name in ["llama3/model.gguf", "qwen2_sharded"]:
        model = FIXTURES / name
        params = jsparse.load(model, dtype="float32")
        told = json.loads(run("info", model, "--json", "--dtype", "float32").stdout)

        leaves = jax.tree.leaves(params.weights)
        assert told["parameters"] == sum(leaf.size for leaf in leaves), name
        assert told["weight_bytes"]["float32"] == sum(leaf.nbytes for leaf in leaves), name
        assert told["config"]["num_layers"] == params.config.num_layers, name
        assert told["config"]["rope_factors"] == (
            params.config.rope_factors and list(params.config.rope_factors)
        ), name


def test_info_prints_the_largest_batch_and_context(monkeypatch):
    from jsparse.machine import memory

    per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, float32
    weights = json.loads(run("info", TINY, "--json").stdout)["weight_bytes"]["float32"]
    monkeypatch.setattr(memory, "available_bytes", lambda: weights + 100 * per_token)
    told = json.loads(run("info", TINY, "--json", "--dtype", "float32", "--context", "30").stdout)
    assert told["cache_bytes_per_token"] == per_token
    assert (told["longest_context"], told["context"], told["largest_batch"]) == (100, 30, 3)
    assert "one prompt of up to 100 tokens" in run("info", TINY, "--dtype", "float32").stdout


def test_info_prints_the_bytes_of_8_bit_k_and_v():
    per_token = 2 * 2 * 2 * (16 + 2)
    asked = ["info", TINY, "--dtype", "float32", "--kv-cache-dtype", "int8"]
    assert json.loads(run(*asked, "--json").stdout)["cache_bytes_per_token"] == per_token
    shown = run(*asked).stdout
    assert f"{per_token} B in int8" in shown
    assert "tokens, in float32, int8 KV" in shown


def test_info_prints_the_extra_bytes_of_twilight(tmp_path):
    """One 4-bit code per channel, a scale and a zero; K and V are bfloat16."""
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 128}))
    policy, share = "twilight(quest(budget=1024), p=0.95)", 0.1328 + 1 / 16
    asked = ["info", tmp_path, "--dtype", "bfloat16", "--policy", policy]
    told = json.loads(run(*asked, "--json").stdout)
    assert told["policy_fraction"] == pytest.approx(share, rel=1e-3)
    per_token = told["policy_fraction"] * told["cache_bytes_per_token"]
    assert told["policy_bytes_per_token"] == pytest.approx(per_token)
    assert told["policy_bytes_per_prompt"] == 0
    assert told["policy"] == jsparse.parse_policy(policy).name
    assert f"per token, {100 * share:.1f} % of the KV cache" in run(*asked).stdout


def test_info_bounds_the_cache_of_a_prompt_and_new_tokens():
    for policy, slots in [
        ("dense", 512),
        ("snapkv(budget=64)", 256),
        ("hard_kv(budget=64, floor=48, cap=96, window=8, period=16)", 128),
    ]:
        asked = ["info", TINY, "--context", "400", "--policy", policy]
        told = json.loads(run(*asked, "--json").stdout)
        size = slots * told["cache_bytes_per_token"]
        assert told["max_cache_bytes"] == size, policy
        shown = " ".join(run(*asked).stdout.split())
        assert f"{size / 1024:.2f} KiB" in shown and "for 400 tokens" in shown, policy
        assert ("since the policy drops tokens" in shown) == (slots < 512), policy


def test_state_per_token_and_per_prompt_is_listed():
    kept = {"policy_bytes_per_token": 64, "policy_fraction": 0.125, "policy_bytes_per_prompt": 2048}
    both = "64 B per token, 12.5 % of the KV cache and 2.00 KiB per prompt"
    assert info_table._kept(kept) == both
    assert info_table._kept(kept | {"policy_bytes_per_token": 0}) == "2.00 KiB per prompt"
    assert info_table._kept(dict.fromkeys(kept, 0)) == "nothing beside the KV cache"


def test_recommend_prints_a_dash_for_unmeasured_values():
    row = {"policy": "streaming(recent=60)", "ms": None, "kl": None}
    name, *cells = recommend._cells(row)
    assert (name, cells) == ("streaming(recent=60)", ["-"] * 6)
    row |= {"ms": 1.5, "over_dense": 2, "kl": 0.013, "agreement": 0.5, "of": 8}
    row |= {"found": {"digits": 7, "words": None}}
    assert recommend._cells(row)[1:] == ["1.5", "2.00x", "0.013", "50.0%", "7/8", "-"]


def test_policies_are_all_listed():
    from jsparse.policies import POLICIES

    listed = run("policies").stdout
    assert all(name in listed for name in POLICIES)
    assert "recent=512" in listed


@pytest.fixture
def own(tmp_path):
    """Returns a user-defined policy in a file, as a command line names it."""
    (tmp_path / "own.py").write_text("import jsparse\nmine = jsparse.streaming(sink=1, recent=4)\n")
    return f"{tmp_path / 'own.py'}:mine"


@pytest.mark.slow
def test_user_defined_policy_generates_and_is_described(own):
    options = ["--model", TINY, "--max-new-tokens", "8", "--json"]
    ran = printed("generate", "the the the the", "--policy", own, *options)
    assert ran.exit_code == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert made["policy"] == own
    same = printed(
        "generate", "the the the the", "--policy", "streaming(sink=1, recent=4)", *options
    )
    assert made["token_ids"] == json.loads(same.stdout)["token_ids"]
    ran = run("info", TINY, "--policy", own, "--json")
    assert json.loads(ran.stdout)["policy"] == own
    ran = run("generate", "the", "--policy", own.replace("mine", "other"), *options)
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)


def test_inspect_prints_a_map_and_writes_a_page(tmp_path):
    file = tmp_path / "step.html"
    given = ["--model", TINY, "--policy", "streaming(sink=1, recent=1)", "--step", "2"]
    shown = printed("inspect", "the cat", *given, "--html", file)
    assert shown.exit_code == 0, shown.output
    assert "streaming(sink=1, recent=1)" in shown.stdout
    assert "layers by position" in shown.stdout
    assert file.read_text().startswith("<!doctype html>")
    by_head = printed("inspect", "the cat", *given, "--layer", "0", "--overlap", "2")
    assert "heads of layer 0 by position" in by_head.stdout
    assert "text:" in by_head.stdout
    assert "of a head's 2 heaviest tokens" in by_head.stdout and "0-1" in by_head.stdout
