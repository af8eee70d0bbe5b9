"""Registers jsparse on import as the model `jsparse` of EleutherAI's lm-evaluation-harness.

    import lm_eval
    import jsparse.evaluation.lm_eval
    policy = "streaming(sink=4, recent=512)"
    lm_eval.simple_evaluate(
        model="jsparse",
        model_args={"pretrained": "smollm2", "policy": policy},
        tasks=["gsm8k"],
    )

The harness does not find models of other packages, so in the shell use `python -m
jsparse.evaluation.lm_eval` instead of its command `lm_eval`. This module needs the package lm-eval;
the harness' RULER also needs transformers, for the tokenizer in `metadata={"tokenizer": …}`.

Only generation decodes, so policies apply only to `generate_until`. Log-likelihoods are one dense
pass over a text under every policy, and the results' config states that.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from jsparse.evaluation.continuation_scores import score_continuations
from jsparse.evaluation.harness_requests import (
    TokenizedPair,
    continuation_lengths,
    cut_to_fit,
    equal_batches,
    generation_options,
    positive_integer,
    text_windows,
)
from jsparse.generation import generate
from jsparse.models.checkpoint import load
from jsparse.policies.expressions import as_policy
from jsparse.policies.own_code import resolve
from jsparse.policy import AnyPolicy
from jsparse.runtime.capacity import PAGE_SIZES
from jsparse.text.prompts import tokenizer_of

_log = logging.getLogger(__name__)


@register_model("jsparse")
class JSparseLM(TemplateLM):
    """A model of the harness that prefills densely and decodes with a policy.

    Texts that are too long are truncated from the left, with a warning about the number of tokens.

    Attributes:
        tokenizer: the model's tokenizer, from which the harness gets its chat template.
        policy: the policy of `generate_until`.
        max_length, batch_size, max_gen_toks: as given.
    """

    def __init__(
        self,
        pretrained: str = "smollm2",
        policy: AnyPolicy | str = "dense",
        dtype: str | None = None,
        revision: str | None = None,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        page_size: int = 16,
        weights: str | None = None,
        tensor_parallel_size: int | str = 1,
        kv_cache_dtype: str = "auto",
        device: str | None = None,
    ) -> None:
        """Loads the model.

        Args:
            pretrained: smollm2, a folder, a .gguf file, or a Hub id.
            policy: a policy or its expression.
            dtype: float32, bfloat16 or float16; None: bfloat16 on a GPU and float32 elsewhere.
            revision: a branch, tag or commit of a Hub id.
            max_length: an integer, at most the model's maximum, which is the default.
            batch_size: an integer, or its text.
            max_gen_toks: an integer less than max_length.
            page_size: tokens per page, one of 8, 16, 32, 64.
            weights: that of `jsparse.load`, such as "q8_0".
            tensor_parallel_size: the number of devices for tensor parallelism.
            kv_cache_dtype: "int8" stores K and V in 8 bits.
            device: ignored, since jax chooses; the harness' command always passes one.

        Raises:
            ValueError: an argument is out of range, or the model has no tokenizer.
        """
        super().__init__()
        _log.info("device=%s is ignored: jax runs on %s", device, jax.local_devices()[0])
        self.policy = resolve(policy) if isinstance(policy, str) else as_policy(policy)
        self.batch_size = positive_integer("batch_size", batch_size)
        self.max_gen_toks = positive_integer("max_gen_toks", max_gen_toks)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={page_size!r}: must be one of {PAGE_SIZES}")
        self._page_size, self._pretrained = page_size, pretrained
        ranks = positive_integer("tensor_parallel_size", tensor_parallel_size)
        self._params = load(
            pretrained,
            dtype=dtype,
            weights=weights,
            revision=revision,
            tensor_parallel_size=ranks,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.tokenizer = tokenizer_of(self._params, "the harness")
        maximum = self._params.config.max_position_embeddings
        self.max_length = (
            maximum if max_length is None else positive_integer("max_length", max_length)
        )
        if self.max_length > maximum:
            raise ValueError(
                f"max_length={max_length}: must be at most {maximum}, the model's maximum"
            )
        self._attended: list[float] = []

    @property
    def eot_token_id(self) -> int:
        """The first of the tokens that end a text."""
        ends = self.tokenizer.eos_token_ids
        if not ends:
            raise ValueError(
                f"pretrained={self._pretrained!r}: must be a model whose tokenizer names an end "
                "token"
            )
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the tokenizer's first, else its end token."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """The model's name as a part of file names."""
        return self._pretrained.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encodes a text; None: special tokens are added unless the text starts with one."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token_id
            opening = (
                None if begin is None else self.tokenizer.decode([begin], skip_special_tokens=False)
            )
            add_special_tokens = opening is None or not string.startswith(opening)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation.

        Without a generation prompt, the last message stays open, to be continued.

        Raises:
            ValueError: there is no template, it fails, or it changes a message to be continued.
        """
        text = self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        before, separator, _ = text.rpartition(last)
        if not separator:
            raise ValueError(
                f"message {last!r}: must occur in the chat template's text to be continued"
            )
        return before + last

    def get_model_info(self) -> dict[str, Any]:
        """Returns the model's entries in the results' config, with the mean attended share."""
        return {
            "policy": self.policy.name,
            "loglikelihood": "dense, by one pass over the text: the policy has no part in it",
            "attended_fraction": float(np.mean(self._attended)) if self._attended else None,
            "max_length": self.max_length,
            "max_gen_toks": self.max_gen_toks,
            "model_dtype": self._params.types,
        }

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decodes outputs with the policy, greedily unless a request specifies sampling.

        The model's own sampling defaults are ignored. Requests with equal arguments share batches.
        """
        contexts: list[Any] = [request.args for request in requests]
        limits = {"max_gen_toks": self.max_gen_toks, "max_length": self.max_length}
        options = [generation_options(arguments, **limits) for _, arguments in contexts]
        rooms = [self.max_length - each["max_new_tokens"] for each in options]
        whole = [self.tok_encode(context) or [self.prefix_token_id] for context, _ in contexts]
        rows = cut_to_fit(whole, rooms, self.max_length)
        texts = [""] * len(rows)
        batches = equal_batches(rows, self.batch_size, "Generating", disable_tqdm, options)
        for nth, places in enumerate(batches):
            completions = generate(
                self._params,
                [rows[place] for place in places],
                policy=self.policy,
                page_size=self._page_size,
                seed=nth,  # otherwise repeats of a prompt would sample the same in every batch
                **options[places[0]],
            )
            for place, out in dict(zip(places, completions, strict=True)).items():
                if out.finish_reason == "overflow":
                    raise ValueError(
                        f"policy={self.policy}: must leave room in the cache for the whole answer"
                    )
                texts[place] = out.text
                self.cache_hook.add_partial("generate_until", contexts[place], out.text)
                if out.stats.attended_fraction is not None:
                    self._attended.append(out.stats.attended_fraction)
        return texts

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Computes dense log-likelihoods of whole texts, in windows of max_length tokens."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        windows = [text_windows(ids, self.prefix_token_id, self.max_length) for ids in texts]
        pairs = iter(self._loglikelihood_tokens(list(itertools.chain(*windows)), disable_tqdm))
        sums = [sum(value for value, _ in itertools.islice(pairs, len(parts))) for parts in windows]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenizedPair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Computes dense log-likelihoods of continuations, and whether they are greedy."""
        _log.warning(
            "log-likelihoods are dense: one pass over each text, without decoding, so policy=%s "
            "has no part in them. Generation tasks measure it, and so does `jsparse eval`.",
            self.policy.name,
        )
        counts = continuation_lengths(requests, self.max_length)
        rooms = [self.max_length + 1] * len(requests)
        whole = [context + continuation for _, context, continuation in requests]
        rows = cut_to_fit(whole, rooms, self.max_length)
        answers = [(0.0, True)] * len(rows)
        batches = equal_batches(rows, self.batch_size, "Scoring, densely", disable_tqdm)
        for places in batches:
            scores = score_continuations(
                self._params,
                [rows[place] for place in places],
                [counts[place] for place in places],
                page_size=self._page_size,
            )
            for place, answer in dict(zip(places, scores, strict=True)).items():
                answers[place] = answer
                if (texts := requests[place][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
