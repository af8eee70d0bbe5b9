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
jsparse.evaluation.lm_eval` in place of its command `lm_eval`. This module needs the package
lm-eval; the harness' RULER also needs transformers, for a tokenizer that
`metadata={"tokenizer": …}` names.

Only generation decodes, so policies apply to `generate_until` alone: log-likelihoods are one dense
pass over a text, whatever the policy, and the results' config says so.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jsparse.generation import generate
from jsparse.models.checkpoint import load
from jsparse.policies.expressions import as_policy
from jsparse.policies.own_code import resolve
from jsparse.policy import AnyPolicy
from jsparse.runtime import capacity, scoring
from jsparse.runtime.capacity import PAGE_SIZES
from jsparse.runtime.request import end_tokens
from jsparse.runtime.sampling_params import OFF
from jsparse.text.prompts import tokenizer_of

_log = logging.getLogger(__name__)

TokenizedPair = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request's texts (None for a window of a text), and the ids of context and continuation."""


@register_model("jsparse")
class JSparseLM(TemplateLM):
    """Reads prompts densely and decodes with a policy.

    Texts that are too long are cut from the left, with a warning that says by how much.

    Attributes:
        tokenizer: the model's tokenizer, which the harness asks for its chat template.
        policy: the policy that `generate_until` decodes with.
        max_length: the most tokens that context and answer may have together.
        batch_size: the number of texts in a batch.
        max_gen_toks: the number of new tokens for requests that do not give one.
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
        device: str | None = None,
    ) -> None:
        """Loads the model.

        Args:
            pretrained: smollm2, a folder, a .gguf file, or a Hub id.
            policy: a policy or its expression.
            dtype: float32, bfloat16 or float16; None means bfloat16 on a GPU and float32 elsewhere.
            revision: a branch, tag or commit of a Hub id.
            max_length: an integer, at most the model's maximum, which None means.
            batch_size: an integer, also as text.
            max_gen_toks: an integer less than max_length.
            page_size: tokens per page, one of 8, 16, 32, 64.
            device: a name that is ignored, since jax chooses; the harness' command always gives
                one.

        Raises:
            ValueError: an argument is out of its range, or the model has no tokenizer.
        """
        super().__init__()
        _log.info("device=%s is ignored: jax runs on %s", device, jax.local_devices()[0])
        self.policy = resolve(policy) if isinstance(policy, str) else as_policy(policy)
        self.batch_size = _count("batch_size", batch_size)
        self.max_gen_toks = _count("max_gen_toks", max_gen_toks)
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={page_size!r}: must be one of {PAGE_SIZES}")
        self._page_size, self._pretrained = page_size, pretrained
        self._params = load(pretrained, dtype=dtype, revision=revision)
        self.tokenizer = tokenizer_of(self._params, "the harness")
        maximum = self._params.config.max_position_embeddings
        self.max_length = maximum if max_length is None else _count("max_length", max_length)
        if self.max_length > maximum:
            raise ValueError(
                f"max_length={max_length}: must be at most {maximum}, the model's maximum"
            )
        self._attended: list[float] = []

    @property
    def eot_token_id(self) -> int:
        """Returns the first of the tokens that end a text."""
        ends = self.tokenizer.eos_token_ids
        if not ends:
            raise ValueError(
                f"pretrained={self._pretrained!r}: must be a model whose tokenizer names an end "
                "token"
            )
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """Returns the token that stands before a text without a context.

        This is the beginning of a sequence, where the tokenizer has such a token.
        """
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Returns the model's name as a part of file names."""
        return self._pretrained.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encodes a text.

        With add_special_tokens=None, special tokens are added unless the text begins with one, as
        chat templates write it.
        """
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

        Without a generation prompt the last message stays open, to be continued.

        Raises:
            ValueError: there is no template, it fails, or it changes a message that is to be
                continued.
        """
        text = self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        before, found, _ = text.rpartition(last)
        if not found:
            raise ValueError(
                f"message {last!r}: must stand in the chat template's text to be continued"
            )
        return before + last

    def get_model_info(self) -> dict[str, Any]:
        """Returns what the results' config says about the model.

        It includes the mean share of tokens that generation attended to.
        """
        return {
            "policy": self.policy.name,
            "loglikelihood": "dense, by one pass over the text: the policy has no part in it",
            "attended_fraction": float(np.mean(self._attended)) if self._attended else None,
            "max_length": self.max_length,
            "max_gen_toks": self.max_gen_toks,
            "model_dtype": str(self._params.dtype),
        }

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Decodes answers with the policy, greedily unless a request asks for sampling.

        The model's own sampling defaults are ignored. Requests with equal arguments share batches,
        the longest first.

        Raises:
            ValueError: a request's generation arguments are unknown or out of their range.
        """
        asked: list[Any] = [request.args for request in requests]
        options = [self._arguments(arguments) for _, arguments in asked]
        rooms = [self.max_length - given["max_new_tokens"] for given in options]
        rows = self._cut(
            [self.tok_encode(context) or [self.prefix_token_id] for context, _ in asked], rooms
        )
        texts = [""] * len(rows)
        for nth, places in enumerate(self._batches(rows, options, "Generating", disable_tqdm)):
            made = generate(
                self._params,
                [rows[place] for place in places],
                policy=self.policy,
                page_size=self._page_size,
                seed=nth,  # otherwise repeats of a prompt would draw the same in every batch
                **options[places[0]],
            )
            for place, out in dict(zip(places, made, strict=True)).items():
                if out.finish_reason == "overflow":
                    raise ValueError(
                        f"policy={self.policy}: must leave room in the cache for the whole answer"
                    )
                texts[place] = out.text
                self.cache_hook.add_partial("generate_until", asked[place], out.text)
                if out.stats.attended_fraction is not None:
                    self._attended.append(out.stats.attended_fraction)
        return texts

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Computes log-likelihoods of whole texts, in windows of max_length tokens.

        They are dense, whatever the policy.
        """
        windows = [self._windows(request.args[0]) for request in requests]
        found = iter(self._loglikelihood_tokens(list(itertools.chain(*windows)), disable_tqdm))
        sums = [sum(value for value, _ in itertools.islice(found, len(parts))) for parts in windows]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenizedPair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Computes log-likelihoods of continuations, and whether dense greedy decoding gives them.

        They are dense, whatever the policy.

        Raises:
            ValueError: a continuation is empty, or alone exceeds max_length.
        """
        _log.warning(
            "log-likelihoods are dense: one pass over each text, without decoding, so policy=%s "
            "has no part in them. Generation tasks measure it, and so does `jsparse eval`.",
            self.policy.name,
        )
        counts = [len(continuation) for _, _, continuation in requests]
        for (texts, _, _), count in zip(requests, counts, strict=True):
            if not 1 <= count <= self.max_length:
                raise ValueError(
                    f"{texts!r}: the continuation has {count} tokens, must have 1 to "
                    f"{self.max_length}"
                )
        rooms = [self.max_length + 1] * len(requests)
        rows = self._cut([context + continuation for _, context, continuation in requests], rooms)
        answers = [(0.0, True)] * len(rows)
        for places in self._batches(rows, [None] * len(rows), "Scoring, densely", disable_tqdm):
            found = self._scores(
                [rows[place] for place in places], [counts[place] for place in places]
            )
            for place, answer in dict(zip(places, found, strict=True)).items():
                answers[place] = answer
                if (texts := requests[place][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _scores(self, rows: list[list[int]], counts: list[int]) -> list[tuple[float, bool]]:
        """Scores each row's last `counts` tokens: log-likelihood, and whether all are likeliest."""
        longest = max(map(len, rows)) - 1
        width = min(
            capacity.bucket(longest, self._page_size), self._params.config.max_position_embeddings
        )
        tokens = np.zeros((len(rows), width + 1), np.int32)
        scored = np.zeros((len(rows), width), np.bool_)
        for b, (ids, count) in enumerate(zip(rows, counts, strict=True)):
            tokens[b, : len(ids)] = ids
            scored[b, len(ids) - 1 - count : len(ids) - 1] = True
        logits = scoring.logits(self._params, tokens[:, :-1])
        values, greedy = jax.device_get(_log_likelihoods(logits, tokens[:, 1:], scored))
        return list(zip(values.tolist(), greedy.tolist(), strict=True))

    def _windows(self, text: str) -> list[TokenizedPair]:
        """Cuts a text into disjoint windows; each token is in the continuation of one."""
        ids = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(
            ids, self.prefix_token_id, self.max_length, context_len=1
        )
        return [(None, *make_disjoint_window(window)) for window in windows]

    def _arguments(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Converts a request's arguments to those of `jsparse.generate`; what it omits is off."""
        given: dict[str, Any] = {**normalize_gen_kwargs(asked, self.max_gen_toks)}
        del given["do_sample"]  # it has set the temperature
        stop = [text for text in given.pop("until") if text]
        new_tokens = _count("max_gen_toks", given.pop("max_gen_toks"))
        if unknown := given.keys() - OFF.keys():
            known = ("until", "max_gen_toks", "do_sample", *OFF)
            raise ValueError(
                f"generation arguments {sorted(unknown)}: must be among {', '.join(known)}"
            )
        if new_tokens >= self.max_length:
            raise ValueError(
                f"max_gen_toks={new_tokens}: must be less than max_length={self.max_length}"
            )
        ends = end_tokens(self._params) | self._control_tokens(stop)
        return (
            OFF
            | given
            | {
                "max_new_tokens": new_tokens,
                "stop": stop,
                "eos_token_id": sorted(ends),
            }
        )

    def _control_tokens(self, texts: list[str]) -> set[int]:
        """Returns the ids of texts that are one control token, which generated text never shows."""
        encoded = [self.tok_encode(text, add_special_tokens=False) for text in texts]
        return {ids[0] for ids in encoded if len(ids) == 1 and not self.tokenizer.decode(ids)}

    def _cut(self, rows: list[list[int]], rooms: list[int]) -> list[list[int]]:
        """Keeps the last tokens of each row that there is room for."""
        lost = [len(ids) - room for ids, room in zip(rows, rooms, strict=True) if len(ids) > room]
        if lost:
            _log.warning(
                "%d of %d texts do not fit in max_length=%d and are cut from the left: %d tokens "
                "are lost, up to %d of a text",
                *(len(lost), len(rows), self.max_length, sum(lost), max(lost)),
            )
        return [ids[-room:] for ids, room in zip(rows, rooms, strict=True)]

    def _batches(
        self, rows: list[list[int]], options: list[Any], what: str, disable_tqdm: bool
    ) -> Iterator[list[int]]:
        """Yields the indices of rows with equal options, the longest first.

        All batches have the same size; the last is filled by repetition.
        """
        size = min(self.batch_size, len(rows))
        names = [repr(given) for given in options]
        order = sorted(range(len(rows)), key=lambda i: (names[i], -len(rows[i])))
        with tqdm(total=len(rows), desc=what, disable=disable_tqdm) as bar:
            for _, equal in itertools.groupby(order, key=lambda i: names[i]):
                for places in itertools.batched(equal, size):
                    yield [*places, *places[-1:] * (size - len(places))]
                    bar.update(len(places))


@jax.jit
def _log_likelihoods(
    logits: Float32[Array, "B T V"], targets: Int32[Array, "B T"], scored: Bool[Array, "B T"]
) -> tuple[Float32[Array, "B"], Bool[Array, "B"]]:
    """Sums the log-probabilities of each row's scored targets, and says if all are likeliest."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    log_probs = picked - jax.nn.logsumexp(logits, axis=-1)
    greedy = jnp.argmax(logits, axis=-1) == targets
    return jnp.sum(log_probs, axis=-1, where=scored), jnp.all(greedy, axis=-1, where=scored)


def _count(name: str, value: int | str) -> int:
    """Checks a positive integer, which the harness' command passes as text."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    return number


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
