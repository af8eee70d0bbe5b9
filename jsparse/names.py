"""The names of options that people type: those taken, those refused and what to use instead.

Functions that take options by name are marked with `takes`. A name that another library has and
jsparse lacks stands in a table below with what to use instead; the value at which such an option
asks for nothing is taken, since nothing is lost then. This module knows nothing of jsparse.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple


class Refused(NamedTuple):
    """Says why an option is not taken.

    Attributes:
        rule: what to do instead, as a sentence goes on after the option's name and value.
        nothing: the value at which the option asks for nothing, beside None.
    """

    rule: str
    nothing: Any = None

    def allows(self, value: Any) -> bool:
        """Returns whether a value asks for nothing; True is no 1."""
        return value is None or (type(value) is type(self.nothing) and value == self.nothing)


_BEAMS = "beam search is not supported; jsparse.LLM draws up to n=16 answers"
_STRUCTURE = "structured output is not supported; logit_bias forbids or favours single tokens"
_PROCESSORS = "functions of logits are not supported; logit_bias adds to those of chosen tokens"
_NO_CODE = "no code that comes with a checkpoint is ever run; must be False"
_PADDING = "prompts need no padding; give a list of prompts of any lengths"
_LORA = "adapters are not supported; merge them into the weights before loading"

SAMPLING: Mapping[str, Refused] = {
    "allowed_token_ids": Refused("must not be given; logit_bias favours up to 300 tokens"),
    "bad_words": Refused("must be empty; logit_bias={id: -100} forbids a token", []),
    "best_of": Refused("must be 1; use n, which returns all answers", 1),
    "detokenize": Refused("must be True; answers have a text and token_ids", True),
    "early_stopping": Refused(_BEAMS, False),
    "extra_args": Refused("must not be given; policy holds what the policy takes"),
    "guided_decoding": Refused(_STRUCTURE),
    "length_penalty": Refused(_BEAMS, 1.0),
    "logits_processors": Refused(_PROCESSORS, []),
    "output_kind": Refused("must not be given; outputs hold everything so far"),
    "prompt_logprobs": Refused(
        "log-probabilities of the prompt are not supported; jsparse.logits(params, ids) gives them"
    ),
    "spaces_between_special_tokens": Refused("must be True", True),
    "structured_outputs": Refused(_STRUCTURE),
    "truncate_prompt_tokens": Refused("must not be given; cut the prompt's token ids"),
    "use_beam_search": Refused(_BEAMS, False),
}
"""vLLM's names, for SamplingParams and for the server's requests."""

GENERATE: Mapping[str, Refused] = {
    "assistant_model": Refused("speculative decoding is not supported"),
    "attention_mask": Refused(_PADDING),
    "bad_words_ids": Refused("use sampling=SamplingParams(logit_bias={id: -100})"),
    "cache_implementation": Refused("policy says what the cache keeps; max_length is its capacity"),
    "early_stopping": Refused(_BEAMS, False),
    "generation_config": Refused(
        "give its options by name, or sampling=SamplingParams(…); the model's own holds by itself"
    ),
    "input_ids": Refused("give token ids as the prompt, the second argument"),
    "inputs": Refused("give text or token ids as the prompt, the second argument"),
    "length_penalty": Refused(_BEAMS, 1.0),
    "logits_processor": Refused(_PROCESSORS, []),
    "n": Refused("must be 1; give the prompt n times, or SamplingParams(n=…) to jsparse.LLM", 1),
    "no_repeat_ngram_size": Refused("must be 0; use repetition_penalty", 0),
    "num_beams": Refused(f"must be 1: {_BEAMS}", 1),
    "num_return_sequences": Refused(
        "must be 1; give the prompt as often as you want answers, [prompt] * 4, or "
        "SamplingParams(n=4) to jsparse.LLM",
        1,
    ),
    "output_attentions": Refused("use `jsparse inspect`, or out.stats.attended_fraction", False),
    "output_logits": Refused("use logprobs=True, or jsparse.logits(params, ids)", False),
    "output_scores": Refused("use logprobs=True", False),
    "pad_token_id": Refused(_PADDING),
    "past_key_values": Refused("use jsparse.Conversation, which keeps the cache between turns"),
    "return_dict_in_generate": Refused(
        "leave it out; what generate returns always has attributes", False
    ),
    "stopping_criteria": Refused("use stop, eos_token_id or max_new_tokens", []),
    "suppress_tokens": Refused("use sampling=SamplingParams(logit_bias={id: -100})", []),
    "tokenizer": Refused("params has the tokenizer; jsparse.load(model, tokenizer=…) takes one"),
    "use_cache": Refused("must be True; there is always a cache", True),
}
"""Hugging Face's names, for `jsparse.generate` and Conversation."""

LOAD: Mapping[str, Refused] = {
    "attn_implementation": Refused("policy chooses the attention, in generate and LLM"),
    "device_map": Refused(
        "a model lies on jax's default device; CUDA_VISIBLE_DEVICES or JAX_PLATFORMS choose it"
    ),
    "load_in_4bit": Refused("weights are not quantised", False),
    "load_in_8bit": Refused("weights are not quantised", False),
    "low_cpu_mem_usage": Refused("tensors are always read one by one", True),
    "quantization": Refused("weights are not quantised"),
    "quantization_config": Refused("weights are not quantised"),
    "token": Refused("log in with `hf auth login`, or set HF_TOKEN"),
    "torch_dtype": Refused('use dtype, such as dtype="bfloat16"'),
    "trust_remote_code": Refused(_NO_CODE, False),
}
"""Hugging Face's and vLLM's names, for `jsparse.load`."""

ENGINE: Mapping[str, Refused] = {
    **LOAD,
    "block_size": Refused("use page_size, the number of tokens per page"),
    "cpu_offload_gb": Refused(
        "an engine keeps all K and V on the device; jsparse.generate takes the policy offloaded(…)",
        0,
    ),
    "enable_chunked_prefill": Refused("must be True; prompts are always read in chunks", True),
    "enable_lora": Refused(_LORA, False),
    "enforce_eager": Refused(
        "programs are always compiled; prepare=False compiles each when it is first needed", False
    ),
    "kv_cache_dtype": Refused("K and V have the dtype of the model", "auto"),
    "load_format": Refused("the format is that of the model's files", "auto"),
    "max_num_batched_tokens": Refused("use ladder, the sizes of prompt chunks"),
    "pipeline_parallel_size": Refused("must be 1; an engine runs on one device", 1),
    "speculative_config": Refused("speculative decoding is not supported"),
    "swap_space": Refused("nothing is ever swapped; a request that was admitted stays", 0),
    "tensor_parallel_size": Refused(
        "must be 1; an engine runs on one device: start one server per GPU, with "
        "CUDA_VISIBLE_DEVICES",
        1,
    ),
    "tokenizer_mode": Refused("tokenizers are always fast ones", "auto"),
}
"""vLLM's names, for LLM and AsyncEngine."""

ANSWER: Mapping[str, Refused] = {
    "lora_request": Refused(_LORA),
    "priority": Refused("requests have no priority"),
    "prompt_token_ids": Refused("give token ids as the prompts"),
}
"""vLLM's names, for `LLM.generate`."""

CHAT: Mapping[str, Refused] = {
    **ANSWER,
    "add_generation_prompt": Refused(
        "must be True: a chat is always answered; generate() continues a text", True
    ),
    "chat_template": Refused(
        "the model's own template is used; jsparse.load(model, tokenizer=…) takes another"
    ),
    "chat_template_content_format": Refused("content is text", "auto"),
    "chat_template_kwargs": Refused("the model's own template is used as it is"),
    "continue_final_message": Refused("must be False; generate() continues a text", False),
    "tools": Refused("tools are not supported"),
}
"""vLLM's names, for `LLM.chat`."""


def takes[**P, R](
    refused: Mapping[str, Refused], /, *, more: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function refuse options that it lacks, by name and with what to use instead.

    Args:
        refused: options that the function refuses. It may have some of them as parameters, so that
            they are listed; their values are checked all the same.
        more: a function whose options are taken, too, as `**options`.

    The function raises ValueError for a refused option and TypeError for an unknown one, which
    lists those that there are.
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
                    raise ValueError(f"{name}={reprlib.repr(value)}: {refused[name].rule}")
                if name in named:
                    continue
                if name not in refused:
                    raise TypeError(unknown(f"{title}()", name, named, refused))
                del kept[name]
            return run(*args, **kept)

        wrapper.__dict__["__signature__"] = signature
        return wrapper

    return decorate


def unknown(title: str, name: str, names: Iterable[str], others: Iterable[str] = ()) -> str:
    """Returns the message that there is no such name, with one like it and all that there are.

    Args:
        title: what has names.
        name: the name that it lacks.
        names: the names that it has.
        others: further names that may be meant.
    """
    names = list(names)
    near = get_close_matches(name, [*names, *others], 1)
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
