"""Compares policies on a text, at equal bytes read per decode step.

Windows of the text are prefilled densely, once for all policies, and each policy is fed the last
tokens of a window through its decode step (`force`, `closeness`), as in the task ppl of `jsparse
eval`. A policy's size is set such that K and V of its attended tokens, and whatever it selects by,
are the wanted bytes (`equal_bytes`). Methods that evict attend to all tokens that they hold, so
they hold as many bytes of K and V as the others read.
"""

from collections.abc import Sequence
from typing import Any

from jsparse.builder import dense
from jsparse.cache import CacheSpec
from jsparse.evaluation.closeness import windows
from jsparse.evaluation.comparison.equal_bytes import Sizing, counted_metric
from jsparse.evaluation.comparison.result import ComparedPolicy, PolicyComparison
from jsparse.evaluation.comparison.window_scores import WindowScores
from jsparse.hyper_parameters import whole_number
from jsparse.models.checkpoint import Params, require_full_attention
from jsparse.policies.expressions import as_policy
from jsparse.policies.sizes import has_open_size
from jsparse.policy import AnyPolicy, Policy, StandIn, resolved
from jsparse.runtime import capacity
from jsparse.runtime.host_reader import OnChunk
from jsparse.text import prompts

ROUNDS = 3  # sizes that are tried per policy and number of bytes
OWN_SIZE = "own size"
MEANS = ("read", "attended", "kl", "agreement", "perplexity")


def compare(
    params: Params,
    text: Any,
    policies: Sequence[Any],
    *,
    bytes: float | Sequence[float] | None = None,
    length: int | None = None,
    samples: int = 8,
    steps: int = 64,
    batch: int = 4,
    page_size: int = 16,
    on_progress: OnChunk | None = None,
) -> PolicyComparison:
    """Compares policies with dense attention on a text, at equal bytes read per decode step.

        result = jsparse.compare(params, text, ["quest", "streaming", "snapkv"], bytes=(0.1, 0.25))
        print(result)

    Args:
        params: the model.
        text: a text, or its token ids.
        policies: policies or their expressions. An expression without a size, such as "quest",
            "lfps(exact=True)" or "dense_layers(quest, n=2)", gets one for each of `bytes`. Other
            policies are compared once, as they are. dense() need not be named.
        bytes: the bytes to read per step and sequence, one number or several: up to 1 as a share of
            those of dense attention, else in bytes. 1 stands for all tokens, whatever selecting
            reads in addition. None: no size is set.
        length: the tokens of a window; None: the whole text, up to the model's maximum.
        samples: the maximum number of windows, from the beginning of the text.
        steps: the number of last tokens of a window that are scored, each by a decode step.
        batch: the number of windows that are run together.
        page_size: the tokens per page of the cache.
        on_progress: receives ("prefill" | "decode", done, total), in tokens of the longest prompt
            and steps of all policies, for each batch.

    Raises:
        ValueError: an argument is out of range, a policy is refused, the text is too short, or the
            model has sliding windows.
    """
    require_full_attention(params)
    for name, value in (("samples", samples), ("steps", steps), ("batch", batch)):
        whole_number(name, value, 1)
    ids, alone = prompts.encode(params, text)
    if not alone:
        raise ValueError(f"text: must be one text or its token ids, not a list of {len(ids)}")
    maximum = params.config.max_position_embeddings
    length = min(len(ids[0]), maximum) if length is None else length
    whole_number("length", length, 3)  # a prompt, a token that is fed, and one that is scored
    if length > maximum:
        raise ValueError(f"length={length}: must be at most {maximum}, the model's maximum")
    if steps > length - 2:
        raise ValueError(f"steps={steps}: must be at most length - 2 = {length - 2}")
    beginnings, ends = (part[:samples] for part in windows(ids[0], length, steps))
    spec = capacity.spec_of(params, min(batch, len(ends)), length, page_size)
    tokens = length - (steps + 1) / 2  # in the cache at the average step
    whole = round(tokens * spec.ranks * spec.token_bytes)
    shares = _shares(bytes, whole)
    scores = WindowScores(params, beginnings, ends, spec, on_progress)
    searches = [
        Sizing(params, form, policy, share, spec, tokens)
        for form, (policy, is_open) in _given(policies).items()
        for share in (shares if shares and is_open else [None])
    ]
    for _ in range(ROUNDS):
        proposed = [(search, search.propose()) for search in searches]
        trials = [trial for _, trial in proposed if trial is not None]
        scores.add([dense(), *(trial.policy for trial in trials)])
        for search, trial in proposed:
            if trial is not None:
                share = scores.mean(trial.policy, counted_metric(trial.policy))
                search.measured(trial, share)
    metrics = scores.metrics()

    def row(policy: AnyPolicy, form: str, wanted: float | None, note: str) -> ComparedPolicy:
        own, share = metrics[policy], metrics[policy][counted_metric(policy)]["mean"]
        interval = own["kl"]["interval"]  # of the difference from dense attention, whose KL is 0
        return ComparedPolicy(
            str(policy),
            form,
            wanted,
            bytes_share=share,
            bytes_read=round(share * whole),
            held=_held(policy, spec, length, steps, own["read"]["mean"]),
            kl_interval=interval and tuple(interval),
            note=note,
            **{name: own[name]["mean"] for name in MEANS},
        )

    rows = [row(dense(), "dense()", None, "")]
    for search in searches:
        note = OWN_SIZE if shares and search.wanted is None else search.note
        policy = search.best.policy
        if (rows[-1].form, rows[-1].policy) != (search.form, str(policy)):  # one size may be two's
            rows.append(row(policy, search.form, search.wanted, note))
    return PolicyComparison(params.name, params.types, length, len(ends), steps, tuple(rows))


def _given(policies: Sequence[Any]) -> dict[str, tuple[AnyPolicy, bool]]:
    """Returns the policies by their texts, each with whether its size is open.

    dense() is left out, since it is always compared.
    """
    if isinstance(policies, str | Policy | StandIn) or not policies:
        raise ValueError(f"policies={policies!r}: must be a list of at least one policy")
    given: dict[str, tuple[AnyPolicy, bool]] = {}
    for one in policies:
        policy = as_policy(one)
        form = one.strip() if isinstance(one, str) else policy.name
        if given.setdefault(form, (policy, False))[0] is not policy:
            raise ValueError(f"policies: must have different names, two are called {form!r}")
        given[form] = policy, isinstance(one, str) and has_open_size(form)
    return {form: one for form, one in given.items() if one[0] is not dense()}


def _shares(wanted: Any, whole: int) -> list[float]:
    """Returns the wanted bytes over those of dense attention, `whole` per step and sequence."""
    if wanted is None:
        return []
    numbers = list(wanted) if isinstance(wanted, Sequence) else [wanted]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"bytes={wanted!r}: must be a number or a list of numbers")
        if not 0 < number <= whole:
            raise ValueError(
                f"bytes={number!r}: must be above 0 and at most 1, as a share, or at most {whole}, "
                "the bytes of dense attention"
            )
    if not numbers:
        raise ValueError(f"bytes={wanted!r}: must hold at least one number")
    return list(dict.fromkeys(x if x <= 1 else x / whole for x in numbers))


def _held(policy: AnyPolicy, spec: CacheSpec, length: int, steps: int, read: float) -> float:
    """Returns the bytes in memory of K, V and the state, over those of K and V of all tokens.

    A method that evicts holds the share `read` of K and V, all of which it reads.
    """
    runs, own = resolved(policy, spec), spec
    if runs.eviction is not None and runs.eviction.max_length is not None:
        slots = min(runs.eviction.max_length(length - steps, steps), spec.capacity)
        own = spec._replace(num_pages=-(-slots // spec.page_size))
    state = capacity.policy_bytes(own, runs) / (spec.batch * length * spec.token_bytes)
    return state + (read if runs.evicts else 1.0)
