"""Tests policies from expressions: the resulting calls, and that nothing else is ever evaluated."""

import inspect
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jsparse
from jsparse.builder import builder, dense
from jsparse.policies import POLICIES
from jsparse.policies.expressions import ABSENT, ALIASES, as_policy, parse
from jsparse.policy import Policy


def test_expressions_build_the_same_policies_as_calls():
    for expression, built in (
        ("dense", jsparse.dense()),
        (" streaming\n", jsparse.streaming()),
        ("streaming(4)", jsparse.streaming(sink=4)),
        ("streaming(\n  8,\n  recent=16,\n)", jsparse.streaming(8, 16)),
        ("keep(policy=dense)", jsparse.keep(jsparse.dense())),
        (
            "dense_layers(keep(streaming(1, 2), 3), n=4)",
            jsparse.dense_layers(jsparse.keep(jsparse.streaming(1, 2), sink=3), 4),
        ),
        ("(((streaming)))", jsparse.streaming()),
    ):
        assert parse(expression) is built, expression


def test_name_is_an_expression_that_builds_the_policy_again():
    wanted = {
        "policy": jsparse.streaming(2, 3),
        "base": jsparse.streaming(2, 3),
        "gates": [[1, 1], [0, 1]],
    }
    for build in POLICIES.values():
        parameters = inspect.signature(build).parameters
        required = (key for key, each in parameters.items() if each.default is each.empty)
        policy = build(**{key: wanted[key] for key in required})
        assert str(policy) == policy.name
        assert as_policy(policy.name) is policy


def test_equal_arguments_give_one_object():
    assert jsparse.streaming(4) is jsparse.streaming(sink=4) is jsparse.streaming(4, 512)
    assert jsparse.streaming(4) is not jsparse.streaming(5)
    assert jsparse.streaming(4) != jsparse.streaming(5)
    assert len({jsparse.streaming(4), jsparse.streaming(4, recent=512), dense()}) == 2
    assert jsparse.oracle_top_p(1) is not jsparse.oracle_top_p(
        1.0
    )  # so that values of different types stay apart


ERRORS = [
    ("", "must be an expression such as"),
    ("streaming(", "must be an expression such as"),
    ("dense\0", "must be an expression such as"),
    ("(" * 1000 + "dense" + ")" * 1000, "must be an expression such as"),
    ("4", "'4' must be the plain name of a policy"),
    ("dense()()", "'dense\\(\\)' must be the plain name"),
    ("lru", "unknown policy 'lru', must be one of dense, auto, streaming"),
    ("keep(lru(4))", "unknown policy 'lru'"),
    ("streaming(*[4])", "must be a literal"),
    ("streaming(**{'sink': 4})", "without \\*\\*"),
    ("streaming(sink=4, sink=5)", "an argument of streaming is given twice"),
    (
        "streaming(4, sink=5)",
        "multiple values for argument 'sink'; the arguments are streaming\\(sink=4, recent=512\\)$",
    ),
    ("streaming(1, 2, 3)", "too many positional arguments"),
    ("streaming(size=4)", "unexpected keyword argument 'size'"),
    ("SnapKVPress()", "unknown policy 'SnapKVPress', did you mean snapkv\\?$"),
    ("streaming_llm(sink=4)", "did you mean streaming\\?$"),
    ("ExpectedAttentionPress()", "unknown policy '.*', did you mean expected_attention\\?$"),
    ("TOVAPress()", "policy '.*', not implemented; the nearest is h2o$"),
    ("keep(knorm)", "a literal or a policy; not implemented; the nearest is snapkv$"),
    ("quest(budget=64", r"its bracket '\(' is not closed$"),
    ("retrieval_heads(quest(), [0, 1", r"its bracket '\[' is not closed$"),
    ("keep(lru)", "'lru' must be a literal or a policy$"),
    (
        "twilight(quest(budget), p=0.95)",
        "budget of quest needs a value, such as quest\\(budget=",
    ),
    ("keep(policy)", "policy of keep needs a value$"),
    ("snapkv(budget=0.25)", "budget=0.25: must be a number of tokens: .*, budget=2048$"),
    ("keep(quest(budget=0.5))", "budget=0.5: must be a number of tokens: .*, budget=4096$"),
    (
        "snapkv(compression_ratio=0.9)",
        "compression_ratio=0.9: must be given as budget, a number of tokens: for 0.1 of 8192 "
        "tokens, budget=819$",
    ),
    ("lfps(compression_ratio=0.9)", "must be given as budget, the share .*: budget=0.1$"),
    ("streaming(compression_ratio=0.9)", "unexpected keyword .*; the arguments are streaming"),
    ("keep()", "missing a required argument: 'policy'"),
    ("keep('dense')", "policy='dense': must be a policy"),
    ("streaming(dense)", "sink=dense\\(\\): must be an integer"),
    ("streaming(sink=-1)", "sink=-1: must be an integer of at least 0"),
    ("streaming(sink=True)", "sink=True: must be an integer"),
    ("streaming(recent=0)", "recent=0: must be an integer of at least 1"),
    ("streaming(sink=b'4')", "sink=b'4': must be a number"),
    ("oracle_top_k(granularity='row')", "granularity='row': must be one of"),
    ("oracle_top_p(p=0)", "p=0: must be a number above 0 and at most 1"),
    ("hard_kv(budget=36)", "budget=36: must be at least 37: newest tokens \\+ "),
    ("hard_kv(cap=36, floor=1, budgets='n_star')", "cap=36: must be at least 37: newest"),
    ("hard_kv(floor=2049)", "floor=2049: must be at most cap=2048"),
    ("hard_kv(budget=2049, cap=2048)", "budget=2049: must be from floor=1024 to cap=2048"),
    (
        "hard_kv(budgets='n_star', merge=False)",
        "merge=False: must be True with budgets='n_star'",
    ),
    ("hard_kv(budgets='union', metric='r_kv')", "metric='r_kv': must be 'attention' with budg"),
    ("hard_kv(p=1.01)", "p=1.01: must be a number above 0 and at most 1"),
    ("hard_kv(metric='lru')", "metric='lru': must be one of \\['attention', 'snapkv', "),
    ("hard_kv(budgets='fair')", "budgets='fair': must be one of \\['joint', 'uniform', "),
    ("hard_kv(merge=1)", "merge=1: must be True or False"),
    ("hard_kv(patience=255)", "patience=255: must be at most 254"),
    ("hard_kv(recent=31)", "recent=31: must be at least window=32"),
    ("keep(hard_kv)", "policy=hard_kv.*: must keep every token"),
    ("twilight(hard_kv)", "base=hard_kv.*: must keep every token, .*; hard_kv drops some$"),
    ("snapkv(budget=8)", "budget=8: must be above 8, the number of protected slots"),
    ("snapkv(pool=4)", "pool=4: must be odd"),
    ("snapkv(pooling='sum')", "pooling='sum': must be one of \\['mean', 'max'\\]"),
    ("ada_kv(floor=0)", "floor=0: must be a number above 0 and at most 1"),
    ("expected_attention(window=0)", "window=0: must be an integer of at least 1"),
    ("expected_attention(budget=36)", "budget=36: must be above 36, the number of protected"),
    ("expected_attention(epsilon=-1)", "epsilon=-1: must be"),
    ("kvzip(chunk=0)", "chunk=0: must be an integer of at least 1"),
    ("kvzip(budget=36)", "budget=36: must be above 36, the number of protected"),
    ("magic_pig(bits=17)", "bits=17: must be at most 16"),
    ("shadow_kv(budget=7)", "budget=7: must be an integer of at least 8"),
    ("ada_kv(cap=0.5)", "cap=0.5: must be a finite number of at least 1"),
    ("snapkv(budget=2000000000)", "budget=2000000000: must be above 8.* at most 1073741824"),
    ("hard_kv(cap=2000000000)", "cap=2000000000: must be at most 1073741824"),
    ("h2o(budget=1)", "budget=1: must be an integer of at least 2"),
    ("r_kv(importance=0)", "importance=0: must be a number above 0 and at most 1"),
    ("raas(threshold=2)", "threshold=2: must be a number above 0 and at most 1"),
]


def test_errors_are_one_line():
    for expression, message in ERRORS:
        with pytest.raises(ValueError, match=message) as error:
            parse(expression)
        assert "\n" not in str(error.value), expression


def test_code_is_refused():
    for expression in (
        "().__class__",
        "dense.__globals__",
        "dense().select",
        "streaming.__wrapped__(4)",
        "__import__('os').system('true')",
        "streaming(sink=__import__('os'))",
        "(lambda: dense)()",
        "streaming(sink=[4 for _ in (1,)])",
        "streaming(sink=2**8)",
        "streaming(sink=(x := 4))",
        "streaming(sink=[4][0])",
        "streaming(sink=len('abcd'))",
        "dense or streaming",
        "await dense",
        "streaming(sink=" + "-" * 900 + "4)",
        "streaming(sink=" + "1+" * 900 + "4)",
        "dense" + ".x" * 900,
        "os:system('true')",
        "own_policies.py:newest",
        "keep(own_policies.py:newest)",
    ):
        with pytest.raises(ValueError, match=r"^policy=") as error:
            parse(expression)
        assert "\n" not in str(error.value), expression


@settings(max_examples=300)
@given(st.text("()[]{}=,.*'\"- \n\\:01ab", max_size=20) | st.text(max_size=10))
def test_any_text_builds_a_policy_or_is_refused(text):
    for expression in (text, f"streaming({text})", f"keep(dense, {text})"):
        try:
            outcome = parse(expression)
        except ValueError as error:
            outcome = str(error)
        assert isinstance(outcome, Policy) or "\n" not in outcome


def test_names_of_other_projects_lead_to_existing_policies():
    assert {*ALIASES.values(), *ABSENT.values()} <= set(POLICIES)
    own = {name.replace("_", "") for name in POLICIES}
    assert own.isdisjoint({*ALIASES, *ABSENT}) and ALIASES.keys().isdisjoint(ABSENT)


def test_python_call_errors_name_the_arguments():
    with pytest.raises(TypeError, match=r"'bugdet'; the arguments are h2o\(budget=1024, window="):
        jsparse.h2o(bugdet=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="compression_ratio=0.5: must be given as budget"):
        jsparse.ada_kv(compression_ratio=0.5)  # type: ignore[call-arg]


def test_policy_may_be_passed_itself_or_as_an_expression():
    assert as_policy(dense()) is as_policy("dense") is dense()
    for wrong in (None, 4, len, ("dense",)):
        with pytest.raises(ValueError, match="must be a policy or an expression"):
            as_policy(wrong)  # type: ignore[arg-type]


def test_builder_in_place_of_a_policy_gets_a_hint_to_call_it():
    @builder
    def mine() -> Policy:
        return dense()

    for wrong, call in ((jsparse.streaming, "jsparse.streaming()"), (mine, "mine()")):
        with pytest.raises(ValueError, match=f"^policy=\\w+: did you mean {re.escape(call)}"):
            as_policy(wrong)  # type: ignore[arg-type]


def test_builder_names_its_policies():
    @builder
    def toy(size: int = 3, base: Policy | None = None) -> Policy:
        return Policy(dense().select)

    assert toy(4).name == "toy(size=4, base=None)"
    assert toy(base=dense()).name == "toy(size=3, base=dense())"


def test_hard_kv_warns_once_about_its_default(caplog):
    told = sys.modules[jsparse.hard_kv.__module__].__dict__["_log"]
    told.cache_clear()
    for budget in (700, 701):
        parse(f"hard_kv(budget={budget})")
    (line,) = caplog.messages
    assert "drops single facts" in line
    told.cache_clear()
    parse("hard_kv(budget=702, metric='snapkv', window=8)")
    parse("hard_kv(budget=703, window=8)")
    assert len(caplog.messages) == 1
