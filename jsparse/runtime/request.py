"""Request, a prompt with its sampling parameters, and the checks that create it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jsparse.runtime.bad_words import BadWords, bad_words
from jsparse.runtime.sampling_params import MAX_END_IDS, OFF, SamplingParams
from jsparse.runtime.structured_outputs import StructuredOutputsParams
from jsparse.text import prompts

if TYPE_CHECKING:
    from jaxtyping import Array

    from jsparse.models.checkpoint import Params
    from jsparse.models.tokenizer import Tokenizer
    from jsparse.policy import Policy
    from jsparse.runtime.constraint import Constraint


@dataclass(frozen=True, eq=False)
class Request:
    """One checked prompt with its options.

    Attributes:
        ids: the prompt, int32 [T].
        sampling: the options, with the model's defaults in place of None.
        ends: the tokens that end the text.
        stream: the number of the seed's random stream to sample from.
        constraint: the first state of its outputs' grammar or bad words, if they have any.
    """

    ids: np.ndarray
    sampling: SamplingParams
    ends: frozenset[int]
    stream: int
    constraint: "Constraint | BadWords | None" = None

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of prompt and output together."""
        return len(self.ids) + self.sampling.max_tokens


def requests(
    params: "Params",
    rows: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    policy: "Policy",
    *,
    seed: int = 0,
) -> list[Request]:
    """Checks the requests of a batch.

    Args:
        params: the model.
        rows: the prompts, as `prompts.encode` returns them.
        sampling: the options of all prompts, or one entry per prompt.
        policy: the policy that decodes.
        seed: the seed of prompts without a seed of their own.

    Raises:
        ValueError: the model or the policy does not support an option, or there is not one entry
            per prompt.
    """
    given = per_prompt(sampling, len(rows))
    return [
        _request(params, ids, own, policy, seed, row)
        for row, (ids, own) in enumerate(zip(rows, given, strict=True))
    ]


def per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams], prompts: int
) -> Sequence[SamplingParams]:
    """Returns the options of each prompt.

    Raises:
        ValueError: there is not one entry per prompt.
    """
    given = _listed(sampling)
    if isinstance(sampling, SamplingParams):
        given = [sampling] * prompts
    if len(given) != prompts:
        raise ValueError(
            f"sampling has {len(given)} entries: must have one for each of the {prompts} prompt(s)"
        )
    return given


def require_alone(sampling: SamplingParams | Sequence[SamplingParams]) -> None:
    """Refuses options that only engines support, such as several sequences.

    Raises:
        ValueError: one is set, or `sampling` is neither SamplingParams nor a list of them.
    """
    for own in _listed(sampling):
        if own.n != 1:
            raise ValueError(f"n={own.n}: must be 1 for generate; jsparse.LLM takes more")
        if own.exact is not None:
            raise ValueError(
                f"exact={own.exact}: must be None in SamplingParams for generate, which has "
                "its own argument for it"
            )
        if own.logprobs:
            raise ValueError(
                f"logprobs={own.logprobs}: must be None or 0 for generate; jsparse.LLM takes more"
            )
        if own.prompt_logprobs is not None:
            raise ValueError(
                f"prompt_logprobs={own.prompt_logprobs}: must be None for generate; jsparse.LLM "
                "takes more, and jsparse.logits(params, ids) returns all logits"
            )
        if own.priority:
            raise ValueError(
                f"priority={own.priority}: must be 0 for generate, which starts all prompts at once"
            )


def _listed(sampling: Any) -> Sequence[SamplingParams]:
    given = sampling if isinstance(sampling, Sequence) else [sampling]
    for own in given:
        if not isinstance(own, SamplingParams):
            raise ValueError(f"sampling={own!r}: must be SamplingParams, or a list of them")
    return given


def _request(
    params: "Params",
    ids: list[int],
    sampling: SamplingParams,
    policy: "Policy",
    seed: int,
    row: int,
) -> Request:
    from jsparse.builder import require_knob

    for name, value in sampling.policy.items():
        if name == "dense" and not isinstance(value, bool):
            raise ValueError(f"dense={value!r}: must be true or false")
        if name == "dense" and value and policy.evicts:
            raise ValueError(
                f"dense={value!r}: must not be set for a policy that drops tokens, as {policy} does"
            )
        if name != "dense":
            require_knob(policy, name, value)
    if sampling.stop:
        _require_possible(sampling, prompts.tokenizer_of(params, "stop"))
    last = params.config.vocab_size - 1
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token in getattr(sampling, name) or ():
            if token > last:
                raise ValueError(f"{name}={token}: must be token ids from 0 to {last}")
    defaults = OFF | {k: v for k, v in params.generation_defaults.items() if k in OFF}
    chosen = {name: getattr(sampling, name) for name in OFF}
    own_seed = sampling.seed is not None
    resolved = replace(
        sampling,
        **{name: defaults[name] if value is None else value for name, value in chosen.items()},
        seed=sampling.seed if own_seed else seed,
    )
    ends = _ends(params, sampling)
    if sampling.min_tokens and len(ends) > MAX_END_IDS:
        raise ValueError(
            f"min_tokens={sampling.min_tokens}: must be 0 if more than {MAX_END_IDS} tokens end "
            f"the text; here {len(ends)} do"
        )
    if sampling.min_tokens and ends.issuperset(sampling.allowed_token_ids or (-1,)):
        raise ValueError(
            f"min_tokens={sampling.min_tokens}: must be 0 if all of allowed_token_ids end the text"
        )
    array, constraint = np.asarray(ids, np.int32), None
    sizes = ends, params.config.vocab_size
    if isinstance(wanted := sampling.structured_outputs, StructuredOutputsParams):
        from jsparse.runtime.constraint import constraint as compiled

        tokenizer = prompts.tokenizer_of(params, "structured_outputs")
        constraint = compiled(tokenizer, wanted, *sizes, array, sampling.min_tokens)
    elif sampling.bad_words:
        tokenizer, skip = prompts.tokenizer_of(params, "bad_words"), sampling.skip_special_tokens
        constraint = bad_words(tokenizer, sampling.bad_words, *sizes, skip_special=skip)
    stream = 0 if own_seed else row
    return Request(array, resolved, ends, stream, constraint)


def _require_possible(sampling: SamplingParams, tokenizer: "Tokenizer") -> None:
    """Raises ValueError if a stop string contains a control token, which has no text."""
    for stop in sampling.stop or () if sampling.skip_special_tokens else ():
        for token in tokenizer.control_tokens:
            if token in stop and token != stop:
                raise ValueError(
                    f"stop={stop!r}: can never match, because the text leaves out the control "
                    f"token {token!r}: must be {token!r} alone, or come with "
                    "skip_special_tokens=False"
                )


def _ends(params: "Params", sampling: SamplingParams) -> frozenset[int]:
    own = () if sampling.ignore_eos else end_tokens(params)
    return frozenset((*(sampling.stop_token_ids or ()), *own))


def knobs(batch: Sequence[Request]) -> "dict[str, Array] | None":
    """Returns the hyper-parameters that any request sets, each with a number per row.

    Rows that do not set one have NaN, which means the policy's own value. `dense` is a flag.
    """
    import jax.numpy as jnp

    set_by = [request.sampling.policy for request in batch]
    # a flag that no row sets needs no separate program
    names = sorted({name for own in set_by for name, value in own.items() if value is not False})
    rows = {name: [own.get(name, float("nan")) for own in set_by] for name in names}
    return {
        name: jnp.asarray([value is True for value in row])
        if name == "dense"
        else jnp.asarray(row, jnp.float32)
        for name, row in rows.items()
    } or None


def knob_rows(requests: Sequence[Request], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the hyper-parameters `names` that requests set, by row; unset ones are NaN."""
    own = [request.sampling.policy for request in requests]
    return {
        name: np.array([each.get(name, False) for each in own])
        if name == "dense"
        else np.array([each.get(name, np.nan) for each in own], np.float32)
        for name in names
    }


def default_sampling(params: "Params") -> SamplingParams:
    """Returns SamplingParams with the model's own defaults in place of None."""
    defaults = params.generation_defaults
    return SamplingParams(**{name: defaults[name] for name in OFF if name in defaults})


def end_tokens(params: "Params") -> frozenset[int]:
    """Returns the model's own end tokens, from its generation_config and its tokenizer."""
    named = params.generation_defaults.get("eos_token_id", ())
    own = params.tokenizer.eos_token_ids if params.tokenizer else ()
    return frozenset((*(named if isinstance(named, Sequence) else [named]), *own))
