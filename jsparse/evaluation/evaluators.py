"""Measures batches of samples: policies' differences from dense attention, and their answers."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jsparse.evaluation.attention_metrics import HeadMetrics, attention_metrics, measured
from jsparse.evaluation.closeness import Closeness, closeness, windows
from jsparse.evaluation.shared_prefill import generate
from jsparse.evaluation.statistics import BY_STEP, STEP_BLOCK, YARDSTICK
from jsparse.evaluation.tasks.sample import SEED, Sample, Task
from jsparse.evaluation.teacher_forcing import Forcing, force
from jsparse.evaluation.yardstick import yardsticks
from jsparse.models.checkpoint import Params, require_full_attention
from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.host_reader import Generation, GenerationStats

COLUMNS = {
    "kl": ("kl", "agreement", "logprob", "attended", "read", "bytes_share"),
    "ppl": ("logprob", "attended", "read", "bytes_share"),
}
DRAFTS = "drafts"
MEASURES = (*COLUMNS, "attention", DRAFTS)
# tokens drafted per round of "drafts"
DRAFTED = 4
PAGE_SIZE = 16
Values = tuple[dict[str, float], dict[str, Any]]
Texts = Mapping[str, Sequence[int]]
"""The tokens of texts by name; samples are taken from them in turn."""
SampleValues = list[list[Values]]
"""[policy][sample] -> values and meta of an entry of one task."""


class Comparison:
    """Comparison of policies with dense attention, all of them fed the same tokens.

    "kl": dense attention continues excerpts of the text; "ppl": the text itself continues, in
    consecutive windows; "attention": like "kl", but compares the selections. "kl" may also measure
    the policies' yardsticks, as a separate task.

    Attributes:
        length: the total number of prompt and new tokens.
        samples: the number of samples; None: any number.
        tasks: the measured tasks.
    """

    def __init__(
        self,
        params: Params,
        name: str,
        length: int,
        texts: Texts,
        steps: int,
        batch: int,
        yardstick: bool = False,
    ) -> None:
        self._params, self._name, self.length, self._texts = params, name, length, texts
        self._steps, self._batch = steps, batch
        self.tasks = (name, YARDSTICK) if yardstick and name == "kl" else (name,)
        _require_room(length, texts, steps)
        if name == "attention":
            require_full_attention(params)
        self._windows, self.samples = None, None
        if name == "ppl":
            self._windows = [windows(text, length, steps) for text in texts.values()]
            # texts take turns, so that none may end before the last turn
            self.samples = len(texts) * min(len(cut) for cut, _ in self._windows)

    def __call__(self, policies: Sequence[str], indices: Sequence[int]) -> list[SampleValues]:
        """Returns the means over each sample's steps, for each task.

        With more than STEP_BLOCK steps, their meta also has the means of every block.
        """
        filled, continuation = _filled(indices, self._batch), None
        if self._windows is None:
            prompts = [excerpt(self._texts, self.length, self._steps, index) for index in filled]
        else:
            turns = [divmod(index, len(self._texts)) for index in filled]
            prompts, continuation = (
                [self._windows[text][part][nth] for nth, text in turns] for part in (0, 1)
            )
        forcing = force(
            self._params,
            [measured(policy) for policy in policies] if self._name == "attention" else policies,
            prompts,
            max_new_tokens=self._steps,
            continuation=continuation,
            max_length=_capacity(self.length),
        )
        rows, sources = range(len(indices)), [source(self._texts, index) for index in indices]
        if self._name == "attention":
            return [
                [
                    [_of_heads(result.heads, row, sources[row]) for row in rows]
                    for result in attention_metrics(forcing)
                ]
            ]
        result = closeness(forcing)
        means = {name: np.mean(getattr(result, name), axis=-1) for name in COLUMNS[self._name]}
        values = [
            [
                (
                    {name: float(mean[at, row]) for name, mean in means.items()},
                    blocks(result, at, row) | sources[row],
                )
                for row in rows
            ]
            for at in range(len(result.policies))
        ]
        by_task = (
            [values, _yardstick_values(forcing, result)] if YARDSTICK in self.tasks else [values]
        )
        places = [result.policies.index(policy) for policy in policies]
        return [[of_task[at][: len(indices)] for at in places] for of_task in by_task]


class Drafting:
    """A count of the DRAFTED drafts per round of a policy that dense attention accepts in excerpts.

    Dense attention drafts nothing, and has no values. Attributes are those of Comparison.
    """

    tasks, samples = (DRAFTS,), None

    def __init__(self, params: Params, length: int, texts: Texts, steps: int, batch: int) -> None:
        _require_room(length, texts, steps)
        self._params, self.length, self._texts = params, length, texts
        self._steps, self._batch = steps, batch

    def __call__(self, policies: Sequence[str], indices: Sequence[int]) -> list[SampleValues]:
        """Returns the acceptance rate, and the tokens per round."""
        answers = generate(
            self._params,
            policies,
            [
                excerpt(self._texts, self.length, self._steps, index)
                for index in _filled(indices, self._batch)
            ],
            max_new_tokens=self._steps + 1,
            eos_token_id=[],
            max_length=_capacity(self.length),
            drafts=DRAFTED,
        )
        sources = [source(self._texts, index) for index in indices]
        return [
            [
                [(_of_drafts(out.stats), of) for out, of in zip(row, sources, strict=False)]
                for row in answers
            ]
        ]


def _of_drafts(stats: GenerationStats) -> dict[str, float]:
    """Returns the acceptance of an output's drafts; {} if nothing was drafted."""
    if not stats.drafted_tokens:
        return {}
    made = stats.new_tokens - 1  # the first follows from the prompt
    return {
        "accepted": stats.accepted_tokens / stats.drafted_tokens,
        "tokens_per_round": made / (made - stats.accepted_tokens),
        "attended": stats.attended_fraction or 0.0,
        "read": stats.read_fraction or 0.0,
    }


def excerpt(texts: Texts, length: int, steps: int, index: int) -> list[int]:
    """Returns the excerpt that sample `index` continues by `steps` + 1 tokens."""
    text = [*texts.values()][index % len(texts)]
    start = random.Random(f"{SEED} {length} {index}").randint(0, len(text) - length)
    return list(text[start : start + length - steps - 1])


def source(texts: Texts, index: int) -> dict[str, Any]:
    """Returns the meta that names a sample's text, if there are several."""
    return {"source": [*texts][index % len(texts)]} if len(texts) > 1 else {}


def _require_room(length: int, texts: Texts, steps: int) -> None:
    """Raises ValueError if a text or a length is too short for its excerpts."""
    if length < steps + 2:
        raise ValueError(f"length={length}: must be at least steps + 2 = {steps + 2}")
    for name, text in texts.items():
        if len(text) < length:
            raise ValueError(
                f"length={length}: must be at most {len(text)}, the tokens of the text"
                f"{f' {name}' if name else ''}: give a longer one"
            )


class GreedyAnswers:
    """Scores of the policies' greedy answers; attributes are those of Comparison.

    For a chat model the length includes the chat's template, unlike in RULER itself. An open-ended
    task has the length of its longest sample, and is sent as a chat to every model with a template.
    """

    def __init__(
        self,
        params: Params,
        tokenizer: Tokenizer,
        task: Task,
        length: int | None,
        batch: int,
        chat: bool,
    ) -> None:
        self._params, self._tokenizer, self._task, self._batch = params, tokenizer, task, batch
        self._chat = chat or (task.open_ended and tokenizer.chat_template is not None)
        self.samples, self.tasks = task.num_samples, (task.name,)
        self.length = self._longest() if length is None else length
        self._room = self.length - len(self._ids(Sample("", "", (), 0, {})))

    def __call__(self, policies: Sequence[str], indices: Sequence[int]) -> list[SampleValues]:
        """Returns scores and attended shares of the one task, with the answers in meta."""
        samples = [self._task.sample(self._encode, self._room, index) for index in indices]
        filled = _filled(samples, self._batch)
        later = [self._encode(sample.question + sample.prefix) for sample in filled]
        completions = generate(
            self._params,
            policies,
            [self._ids(sample) for sample in filled],
            max_new_tokens=max(sample.max_new_tokens for sample in samples),
            max_length=_capacity(self.length),
            questions=later if samples[0].question else None,
        )
        return [
            [
                [self._scored(out, sample) for out, sample in zip(row, samples, strict=False)]
                for row in completions
            ]
        ]

    def _scored(self, out: Generation, sample: Sample) -> Values:
        shares = {"attended": out.stats.attended_fraction, "read": out.stats.read_fraction}
        values = {"score": self._task.score(out.text, sample)}
        values |= {name: share for name, share in shares.items() if share is not None}
        if self._task.open_ended:
            values["new_tokens"] = float(out.stats.new_tokens)
            values["cut_off"] = float(out.finish_reason == "length")
        return values, sample.meta | {"text": out.text, "answers": list(sample.answers)}

    def _longest(self) -> int:
        """Returns the number of tokens of an open-ended task's longest sample."""
        assert self._task.num_samples is not None
        samples = (self._task.sample(self._encode, 0, i) for i in range(self._task.num_samples))
        prompt, limit = max((len(self._ids(sample)), sample.max_new_tokens) for sample in samples)
        maximum = self._params.config.max_position_embeddings
        if prompt + limit > maximum:
            raise ValueError(
                f"max_new_tokens={limit}: must leave room for the longest prompt of "
                f"{self._task.name} ({prompt} tokens) within {maximum}, the model's maximum"
            )
        return prompt + limit

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _ids(self, sample: Sample) -> list[int]:
        """Encodes the prompt, in the chat's template if requested, then the answer's prefix.

        A prompt with a second turn's question is encoded alone.
        """
        if sample.question:
            return self._tokenizer.encode(sample.prompt)
        if not self._chat or not sample.meta.get("chat_template", True):
            return self._tokenizer.encode(sample.prompt + sample.prefix)
        turn = [{"role": "user", "content": sample.prompt}]
        text = self._tokenizer.apply_chat_template(turn, add_generation_prompt=True)
        return self._encode(text + sample.prefix)


def blocks(result: Closeness, policy: int, row: int) -> dict[str, Any]:
    """Returns the meta with a row's means over blocks of STEP_BLOCK steps; {} for one block."""
    steps = result.kl.shape[-1]
    if steps <= STEP_BLOCK:
        return {}
    starts = range(0, steps, STEP_BLOCK)
    measures = {name: getattr(result, name)[policy, row] for name in COLUMNS["kl"]}
    return {
        BY_STEP: {
            name: [float(np.mean(values[start : start + STEP_BLOCK])) for start in starts]
            for name, values in measures.items()
        }
    }


def _yardstick_values(forcing: Forcing, result: Closeness) -> SampleValues:
    """Returns the means of the yardsticks, without values if there is none."""
    oracle = yardsticks(forcing, result)
    return [
        [
            ({"kl": float(np.mean(kl))} if budget else {}, {"budget": int(budget)})
            for budget, kl in zip(budgets, of_policy, strict=True)
        ]
        for budgets, of_policy in zip(*oracle, strict=True)
    ]


def _of_heads(heads: HeadMetrics, row: int, meta: dict[str, Any]) -> Values:
    """Averages one sample over the layers and heads that selected; adds tokens by head to meta."""
    values = {}
    for name in ("recall", "mass", "output_error", "attended", "pages", "bytes_read"):
        of_row = getattr(heads, name)[:, row]
        if np.isfinite(of_row).any():
            values[name] = float(np.mean(of_row[np.isfinite(of_row)]))
    attended = heads.attended[:, row]
    return values, meta | {
        "attended_heads": [
            [float(x) if np.isfinite(x) else None for x in layer] for layer in attended
        ]
    }


def _filled(items: Sequence[Any], size: int) -> list[Any]:
    """Pads a batch by repeating its last item, so that only one batch size is compiled."""
    return [*items, *[items[-1]] * (size - len(items))]


def _capacity(length: int) -> int:
    return -(-length // PAGE_SIZE) * PAGE_SIZE
