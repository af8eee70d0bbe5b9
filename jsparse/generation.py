"""`generate`: checks requests and runs them with jsparse.runtime.session."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack, overload

import jax
import jax.core as jax_core
import numpy as np
from jaxtyping import Array

from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, require_params
from jsparse.names import GENERATE, takes
from jsparse.policies.sparse_prefill import with_prefill
from jsparse.policy import AnyPolicy, PrefillMethod
from jsparse.runtime import capacity
from jsparse.runtime.generate_options import (
    GenerateOptions,
    chosen_sampling,
    num_drafts,
    streamers_of,
)
from jsparse.runtime.host_reader import Generation, OnChunk, Streamer
from jsparse.runtime.request import per_prompt, requests
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.runtime.session import Session
from jsparse.runtime.turn import run
from jsparse.text import prompts

Message = Mapping[str, Any]


OnePrompt = str | dict[str, Any] | Sequence[int] | Sequence[Message]


# str is a sequence of str, so a batch of texts is a list or a tuple
ManyPrompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]


@overload
def generate(
    params: Params, prompt: OnePrompt, **options: Unpack[GenerateOptions]
) -> Generation: ...


@overload
def generate(
    params: Params, prompt: ManyPrompts, **options: Unpack[GenerateOptions]
) -> list[Generation]: ...


@overload
def generate(
    params: Params, prompt: np.ndarray | Array, **options: Unpack[GenerateOptions]
) -> Any: ...


@takes(GENERATE)
@own_settings()
def generate(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    min_new_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    logprobs: bool = False,
    streamer: Streamer | Sequence[Streamer] | None = None,
    policy: AnyPolicy | str = "dense",
    prefill: PrefillMethod | str = "dense",
    exact: bool = False,
    num_speculative_tokens: int | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    max_length: int | None = None,
    page_size: int = 16,
    on_progress: OnChunk | None = None,
) -> Any:
    """Continues a prompt, or a batch of prompts.

    Programs are compiled for each policy, batch size and capacity, and separately for greedy
    decoding and sampling.

    Args:
        params: the model that `jsparse.load` returned.
        prompt: text, chat messages (dicts of role and content), token ids, or a list of these. A
            dict {"messages": …, "chat_template_kwargs": …} gives the chat template variables.
        max_new_tokens: the maximum number of tokens to generate.
        do_sample: False: greedy; True: sampling, at temperature 1 if neither `temperature` nor the
            model sets one; None: the temperature decides.
        temperature: the sampling temperature; 0: greedy. For this and the next four options, None
            means the value in the model's generation_config, else off.
        top_k: the number of most likely tokens to keep; 0: off.
        top_p: the total probability of the most likely tokens to keep; 1: off.
        min_p: the least probability to keep, relative to the most likely token's; 0: off.
        repetition_penalty: divides positive and multiplies negative logits of seen tokens; 1: off.
        seed: the random seed; the same seed gives the same text.
        min_new_tokens: the number of tokens before which nothing ends the text.
        stop: strings that end the text and are cut off; `stop_strings` is another name for it.
        stop_strings: the same.
        eos_token_id: ids that end the text; []: never stops; None: the model's own.
        logprobs: whether to return each token's log-probability.
        streamer: a callable that receives each new piece of text, an object with the methods `put`
            and `end` of Hugging Face's streamers, which receives ids, or a list with one per
            prompt.
        policy: the policy that selects tokens for decoding, or its expression; "auto": the policy
            measured to be fastest for these sizes.
        prefill: how prompts attend to themselves: "dense"; "xattention(threshold=0.9)",
            "vertical_slash(…)" or "streaming(sink, recent)", which leave out blocks of 128 tokens;
            "auto": the first of these, from where it saves time; or a PrefillMethod.
        exact: whether the policy only drafts, and dense attention verifies the drafts. The text is
            then that of dense attention, greedy or sampled, and the policy only saves time; after a
            sparse `prefill`, that of dense decode steps.
            Policies that drop tokens or keep K and V in host memory are refused.
        num_speculative_tokens: with `exact`, the tokens drafted per verification round, up to 32;
            None: chosen from the acceptance rate and the measured time of rounds.
        sampling: one SamplingParams for all prompts or one per prompt, instead of the options from
            max_new_tokens to logprobs; `seed` then applies to those without one.
        max_length: the cache's capacity in tokens; None: prompt and new tokens, rounded up.
        page_size: the number of tokens per page: 8, 16, 32 or 64.
        on_progress: a callable that receives ("prefill" | "decode", done, total), in tokens.

    Returns:
        A Generation, or a list of them for a list of prompts.

    Raises:
        ValueError: an argument is out of range or refused, or the tokens do not fit.
        TypeError: there is no option of that name.
        FloatingPointError: the model's logits are NaN.
    """
    require_params(params)
    _require_concrete(params, prompt)
    rows, alone = prompts.encode(params, prompt)
    given = chosen_sampling(
        params,
        sampling,
        seed,
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens,
        stop=stop,
        stop_strings=stop_strings,
        eos_token_id=eos_token_id,
        logprobs=logprobs,
    )
    options = per_prompt(given, len(rows))
    lengths = [own.max_tokens for own in options]
    spec = capacity.cache_spec(params, rows, lengths, max_length, page_size)
    drafts = num_drafts(exact, num_speculative_tokens)
    session = Session(params, with_prefill(policy, prefill), spec, drafts=drafts)
    turn = requests(params, rows, options, session.deployment.policy, seed=seed)
    outs = run(session, turn, streamers_of(streamer, len(rows)), on_progress or (lambda *_: None))
    return outs[0] if alone else outs


def _require_concrete(params: Params, prompt: Any) -> None:
    """Raises ValueError in a function that jax traces."""
    weights = jax.tree.leaves(params.weights)[0]
    for name, value in (("params", weights), ("prompt", prompt)):
        if isinstance(value, jax_core.Tracer):
            raise ValueError(
                f"{name}: must not be traced, since generate reads tokens on the host; use "
                "jsparse.prefill and jsparse.decode_step in jitted functions"
            )
