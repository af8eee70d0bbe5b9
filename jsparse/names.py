"""The names of options: accepted names, and refused ones with their alternatives.

Functions that take options by name are marked with `takes`. The tables below list names that other
libraries have and jsparse lacks, each with an alternative. A value at which such an option does
nothing is accepted. This module is independent of the rest of jsparse.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """The reason why an option is refused.

    Attributes:
        rule: the alternative, phrased to follow the option's name and value; {value} is replaced by
            the value.
        nothing: the value, besides None, at which the option does nothing.
    """

    rule: str
    nothing: Any = None

    def allows(self, value: Any) -> bool:
        """Returns whether a value leaves the option off; True does not count as 1."""
        return value is None or (type(value) is type(self.nothing) and value == self.nothing)


_BEAMS = "beam search is not supported; jsparse.LLM samples up to n=16 sequences"
_PROCESSORS = "functions of logits are not supported; logit_bias adds to those of chosen tokens"
_XLA = "programs are compiled by XLA, whose flags are those of XLA_FLAGS"
_NO_CODE = "no code that comes with a checkpoint is ever run; must be False"
_PADDING = "prompts need no padding; give a list of prompts of any lengths"
_QUANTIZED = 'a checkpoint keeps its format; weights="q8_0" quantizes any other'
_LORA = "adapters are not supported; merge them into the weights before loading"

_GUIDED = ("choice", "grammar", "json", "regex")

SAMPLING: Mapping[str, Refusal] = {
    "best_of": Refusal("must be 1; use n, which returns all sequences", 1),
    "detokenize": Refusal("must be True; outputs have a text and token_ids", True),
    "early_stopping": Refusal(_BEAMS, False),
    "extra_args": Refusal("must not be given; policy sets the policy's own options"),
    **{f"guided_{kind}": Refusal(f'use structured_outputs={{"{kind}": …}}') for kind in _GUIDED},
    "guided_decoding": Refusal("use structured_outputs"),
    "length_penalty": Refusal(_BEAMS, 1.0),
    "logits_processors": Refusal(_PROCESSORS, []),
    "output_kind": Refusal("must not be given; outputs hold everything so far"),
    "spaces_between_special_tokens": Refusal("must be True", True),
    "truncate_prompt_tokens": Refusal("must not be given; cut the prompt's token ids"),
    "use_beam_search": Refusal(_BEAMS, False),
}
"""vLLM's names, for SamplingParams and for the server's requests."""

GENERATE: Mapping[str, Refusal] = {
    "assistant_model": Refusal("use exact=True: the model drafts for itself, under policy"),
    "attention_mask": Refusal(_PADDING),
    "bad_words_ids": Refusal("use sampling=SamplingParams(bad_words=[…])"),
    "cache_implementation": Refusal("policy chooses the kept tokens; max_length is the capacity"),
    "early_stopping": Refusal(_BEAMS, False),
    "generation_config": Refusal(
        "give its options by name, or sampling=SamplingParams(…); the model's own always applies"
    ),
    "input_ids": Refusal("give token ids as the prompt, the second argument"),
    "inputs": Refusal("give text or token ids as the prompt, the second argument"),
    "length_penalty": Refusal(_BEAMS, 1.0),
    "logits_processor": Refusal(_PROCESSORS, []),
    "n": Refusal("must be 1; give the prompt n times, or SamplingParams(n=…) to jsparse.LLM", 1),
    "no_repeat_ngram_size": Refusal("must be 0; use repetition_penalty", 0),
    "num_beams": Refusal(f"must be 1: {_BEAMS}", 1),
    "num_return_sequences": Refusal(
        "must be 1; repeat the prompt, [prompt] * {value}, or pass "
        "SamplingParams(n={value}) to jsparse.LLM",
        1,
    ),
    "output_attentions": Refusal("use `jsparse inspect`, or out.stats.attended_fraction", False),
    "output_logits": Refusal("use logprobs=True, or jsparse.logits(params, ids)", False),
    "output_scores": Refusal("use logprobs=True", False),
    "pad_token_id": Refusal(_PADDING),
    "past_key_values": Refusal("use jsparse.Conversation, which keeps the cache between turns"),
    "return_dict_in_generate": Refusal(
        "leave it out; the result of generate always has attributes", False
    ),
    "stopping_criteria": Refusal("use stop, eos_token_id or max_new_tokens", []),
    "suppress_tokens": Refusal("use sampling=SamplingParams(logit_bias={id: -100})", []),
    "tokenizer": Refusal("params has the tokenizer; jsparse.load(model, tokenizer=…) takes one"),
    "use_cache": Refusal("must be True; there is always a cache", True),
}
"""Hugging Face's names, for `jsparse.generate` and Conversation."""

LOAD: Mapping[str, Refusal] = {
    "attn_implementation": Refusal("policy chooses the attention, in generate and LLM"),
    "device_map": Refusal(
        "a model is on jax's default device; CUDA_VISIBLE_DEVICES or JAX_PLATFORMS choose it"
    ),
    "hf_overrides": Refusal("config.json always applies; edit it in a copy of the folder", {}),
    "load_in_4bit": Refusal("a 4-bit checkpoint is kept in 4 bits on a Hopper GPU", False),
    "load_in_8bit": Refusal('weights="q8_0" keeps them in 8 bits', False),
    "low_cpu_mem_usage": Refusal("tensors are always read one by one", True),
    "quantization": Refusal(_QUANTIZED),
    "quantization_config": Refusal(_QUANTIZED),
    "rope_scaling": Refusal("write it into config.json in a copy of the folder", {}),
    "token": Refusal("log in with `hf auth login`, or set HF_TOKEN"),
    "torch_dtype": Refusal('use dtype, such as dtype="bfloat16"'),
    "trust_remote_code": Refusal(_NO_CODE, False),
}
"""Hugging Face's and vLLM's names, for `jsparse.load`."""

ENGINE: Mapping[str, Refusal] = {
    **LOAD,
    "block_size": Refusal("use page_size, the number of tokens per page"),
    "compilation_config": Refusal(_XLA, {}),
    "cpu_offload_gb": Refusal(
        "use the policy offloaded(…), which keeps K and V in host memory, or kv_offloading_size",
        0,
    ),
    "data_parallel_size": Refusal(
        "must be 1; jsparse serve --data-parallel-size starts several engines",
        1,
    ),
    "disable_cascade_attn": Refusal("use cascade_attention=False", False),
    "disable_custom_all_reduce": Refusal("must be False; XLA reduces over devices", False),
    "disable_log_stats": Refusal("must be True; LLM logs no statistics", True),
    "enable_chunked_prefill": Refusal("must be True; prefill always runs in chunks", True),
    "enable_expert_parallel": Refusal("mixtures of experts are not supported", False),
    "enable_lora": Refusal(_LORA, False),
    "enable_sleep_mode": Refusal("must be False; sleep() needs no option", False),
    "enforce_eager": Refusal(
        "programs are always compiled; prepare=False compiles each when it is first needed", False
    ),
    "kv_offloading_backend": Refusal("kv_offloading_size alone sets the host memory", "native"),
    "load_format": Refusal("the format is that of the model's files", "auto"),
    "limit_mm_per_prompt": Refusal("prompts are text only", {}),
    "max_num_batched_tokens": Refusal(
        "use ladder, the sizes of prompt chunks by their position: ladder=[(0, 512)] gives chunks "
        "of 512 tokens"
    ),
    "override_generation_config": Refusal("give SamplingParams to generate", {}),
    "pipeline_parallel_size": Refusal("must be 1; use tensor_parallel_size", 1),
    "speculative_config": Refusal(
        "use exact=True and num_speculative_tokens: the model drafts for itself, under policy"
    ),
    "runner": Refusal("models generate text only", "generate"),
    "skip_tokenizer_init": Refusal("must be False; the tokenizer is always loaded", False),
    "swap_space": Refusal(
        "use kv_offloading_size, the GiB of host memory for prefixes and preempted sequences", 0
    ),
    "task": Refusal("models generate text only", "generate"),
    "tokenizer_mode": Refusal("tokenizers are always fast ones", "auto"),
}
"""vLLM's names, for LLM and AsyncEngine."""

ANSWER: Mapping[str, Refusal] = {
    "lora_request": Refusal(_LORA),
    "priority": Refusal("use SamplingParams(priority=…)"),
    "prompt_token_ids": Refusal("give token ids as the prompts"),
}
"""vLLM's names, for `LLM.generate`."""

CHAT: Mapping[str, Refusal] = {
    **ANSWER,
    "chat_template": Refusal(
        "the model's own template is used; jsparse.load(model, chat_template=…) takes another"
    ),
    "chat_template_content_format": Refusal("content is text", "auto"),
}
"""vLLM's names, for `LLM.chat`."""


METHODS: Mapping[str, str] = {
    "beam_search": _BEAMS,
    "classify": "models generate text only",
    "collective_rpc": "the engine runs in this process; LLM.engine is it",
    "embed": "models generate text only",
    "encode": "models generate text only; get_tokenizer().encode(text) returns token ids",
    "reward": "models generate text only",
    "score": "models generate text only; jsparse.logits(params, ids) scores tokens",
    "shutdown": "an engine ends with its last reference: del llm",
    "start_profile": "jax.profiler traces programs",
}
"""Methods of vLLM's LLM that jsparse lacks, with the reason or the alternative."""


def takes[**P, R](
    refused: Mapping[str, Refusal], /, *, more: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse options that it lacks, by name and with an alternative.

    Args:
        refused: options that the function refuses. It may have some of them as parameters, so that
            they are listed; their values are checked anyway.
        more: a function whose options are also accepted, as `**options`.

    The function raises ValueError for a refused option. For an unknown one it raises a TypeError
    that lists the known ones.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        title = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
        signature = _merged(inspect.signature(function), more)
        named = _options(signature)
        run: Callable[..., R] = function

        @functools.wraps(function)
        def wrapper(*args: P.args, **given: P.kwargs) -> R:
            kept = dict(given)
            for name, value in given.items():
                if name in refused and not refused[name].allows(value):
                    shown = reprlib.repr(value)
                    rule = refused[name].rule.replace("{value}", shown)
                    raise ValueError(f"{name}={shown}: {rule}")
                if name in named:
                    continue
                if name not in refused:
                    raise TypeError(unknown(f"{title}()", name, named))
                del kept[name]
            return run(*args, **kept)

        wrapper.__dict__["__signature__"] = signature
        return wrapper

    return decorate


def unknown(title: str, name: str, names: Iterable[str]) -> str:
    """Returns the message for an unknown name: the closest known name, and all known names.

    Args:
        title: the kind of object that has these names.
        name: the unknown name.
        names: the known names.
    """
    names = list(names)
    near = get_close_matches(name, names, 1)
    meant = f", did you mean {near[0]}?" if near else "."
    return f"{title} has no {name}{meant} It has {', '.join(names) or 'none'}"


def _merged(signature: inspect.Signature, more: Callable[..., Any] | None) -> inspect.Signature:
    """Returns a signature with the options of another function in place of `**options`."""
    own = list(signature.parameters.values())
    if more is None or own[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return signature
    further = inspect.signature(more).parameters.values()
    known = signature.parameters
    added = [p for p in further if p.kind is p.KEYWORD_ONLY and p.name not in known]
    return signature.replace(parameters=[*own[:-1], *added])


def _options(signature: inspect.Signature) -> list[str]:
    positional, word = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    kinds = (positional, word)
    return [p.name for p in signature.parameters.values() if p.kind in kinds and p.name != "self"]
