"""From prompts to text: prefill, the decode loop, stop rules, streaming.

The host runs ahead of the device: it reads each token a few steps after it was made, so the device never waits for it.
What it finds then (a stop rule, a full cache) ends the loop; the few steps made in the meantime are dropped.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jsparse import cache as kv_cache
from jsparse import memory, prefill, prompts, sampling
from jsparse.cache import CacheSpec, KVCache
from jsparse.compilation import keep_compilations
from jsparse.decode import StepStats, decode_step
from jsparse.models.checkpoint import Params
from jsparse.models.transformer import to_logits
from jsparse.policies import as_policy
from jsparse.policy import Policy, State
from jsparse.sampling import Sampling
from jsparse.text_stream import TextStream

HOST_LAG = 2
PAGE_SIZES = (8, 16, 32, 64)
Streamer = Callable[[str], Any]
OnProgress = Callable[[str, int, int], Any]

_logits = jax.jit(to_logits, static_argnames=("decoder",))
_step = jax.jit(decode_step, static_argnames=("decoder", "policy"), donate_argnames=("cache", "state"))
_sample = jax.jit(sampling.sample, static_argnames=("sampling",))
_mark_seen = jax.jit(sampling.mark_seen, donate_argnames=("seen",))


@dataclass(frozen=True)
class GenerationStats:
    """How one prompt's generation went. Times are of the whole batch.

    Attributes:
        prompt_tokens, new_tokens: of this prompt.
        prefill_seconds: until the first token of the batch was known, compilation included.
        decode_tokens_per_second: of all rows together, from the second token on, so without compilation; None for fewer
            than three tokens.
        attended_fraction: tokens attended over positions so far, mean over steps, layers and KV heads; None where no
            decode step was run.
        read_fraction: the same for tokens whose K and V were read.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_tokens_per_second: float | None
    attended_fraction: float | None
    read_fraction: float | None


@dataclass(frozen=True)
class Generation:
    """What was generated for one prompt.

    Attributes:
        text: without the prompt, special tokens and the stop string; "" where the model has no tokenizer.
        token_ids: the new ids, the end token included if one came.
        logprobs: their natural log-probabilities under the model's own softmax, before sampling options; if asked for.
        finish_reason: "stop" (an end token or a stop string) or "length".
        stats: counts, times and what was attended.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    logprobs: list[float] | None = None


def generate(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    eos_token_id: int | Sequence[int] | None = None,
    logprobs: bool = False,
    streamer: Streamer | Sequence[Streamer] | None = None,
    policy: Policy | str = "dense",
    max_length: int | None = None,
    page_size: int = 16,
    on_progress: OnProgress | None = None,
) -> Any:
    """Continues a prompt, or a batch of them.

    Args:
        params: what `jsparse.load` returned.
        prompt: text, chat messages (dicts with role and content), token ids, or a list of any of these.
        max_new_tokens: at most so many tokens are generated.
        temperature: 0 is greedy. None of this and the next four: the model's generation_config, else off.
        top_k: keep the k likeliest tokens; 0 is off.
        top_p: keep the likeliest tokens whose probabilities sum to p; 1 is off.
        min_p: drop tokens below min_p times the likeliest; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen so far; 1 is off.
        seed: of the random draws; the same seed gives the same text.
        stop: strings that end the text and are cut off.
        eos_token_id: ids that end the text; [] never stops; None takes the model's.
        logprobs: also return each token's log-probability.
        streamer: called with each piece of text as it is made; for several prompts a list of them.
        policy: what is attended to while decoding: a policy or its expression. The prompt is always read densely.
        max_length: the cache's capacity in tokens; None fits the longest prompt and max_new_tokens, rounded up so that
            few sizes are compiled.
        page_size: tokens a page, one of 8, 16, 32, 64.
        on_progress: called with ("prefill" | "decode", done, total) tokens.

    Returns:
        A Generation, or a list of them for a list of prompts.

    Raises:
        ValueError: an argument is out of its range, or prompt and new tokens do not fit.
    """
    rows, alone = prompts.encode(params, prompt)
    options = _sampling(params, temperature, top_k, top_p, min_p, repetition_penalty)
    chosen = as_policy(policy)
    stop = _stop_strings(params, stop)
    ends = _end_tokens(params, eos_token_id)
    spec = _spec(params, rows, max_new_tokens, max_length, page_size)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: must be an integer from 0 to 2^63 - 1")
    streamers = _streamers(streamer, len(rows), alone)
    memory.require_fit(spec, chosen)
    keep_compilations()
    report = on_progress or (lambda *_: None)
    run = _Run([_Row(TextStream(params.tokenizer, stop), ends, piece) for piece in streamers], max_new_tokens, report)
    began = time.perf_counter()
    primed = _prefill(params, chosen, rows, spec, report)
    _decode(params, chosen, options, rows, primed, seed, run)
    outs = [run.generation(i, len(ids), began, logprobs) for i, ids in enumerate(rows)]
    return outs[0] if alone else outs


class _Step(NamedTuple):
    """One step's results, still on the device."""

    tokens: Array
    logprobs: Array
    stats: StepStats | None
    overflow: Array


@dataclass
class _Row:
    """One prompt's growing output on the host."""

    stream: TextStream
    ends: frozenset[int]
    emit: Streamer
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    attended: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    finish: str | None = None

    def take(self, token: int, logprob: float, attended: float | None, read: float | None) -> None:
        if self.finish:
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if attended is not None and read is not None:
            self.attended.append(attended)
            self.read.append(read)
        piece = "" if token in self.ends else self.stream.push(token)
        if piece:
            self.emit(piece)
        if token in self.ends or self.stream.stopped:
            self.close("stop")

    def close(self, reason: str) -> None:
        if self.finish is None:
            self.finish = reason
            if piece := self.stream.finish():
                self.emit(piece)


@dataclass
class _Run:
    """The host's side of the decode loop: reads steps late, and knows when to stop."""

    rows: list[_Row]
    max_new_tokens: int
    report: OnProgress
    pending: deque[_Step] = field(default_factory=deque)
    times: list[float] = field(default_factory=list)

    def push(self, step: _Step) -> None:
        for array in jax.tree.leaves(step):
            array.copy_to_host_async()
        self.pending.append(step)
        while len(self.pending) > HOST_LAG:
            self._read()

    def drain(self) -> None:
        while self.pending:
            self._read()
        for row in self.rows:
            row.close("length")

    @property
    def finished(self) -> bool:
        return all(row.finish for row in self.rows)

    def _read(self) -> None:
        step = jax.device_get(self.pending.popleft())
        if self.finished:
            return
        if step.overflow:
            raise RuntimeError("the cache's page pool ran out: nothing after this token would be right")
        self.times.append(time.perf_counter())
        for b, row in enumerate(self.rows):
            shares = (None, None) if step.stats is None else (float(step.stats.attended[b]), float(step.stats.read[b]))
            row.take(int(step.tokens[b]), float(step.logprobs[b]), *shares)
        self.report("decode", len(self.times), self.max_new_tokens)

    def generation(self, index: int, prompt_tokens: int, began: float, logprobs: bool) -> Generation:
        row, times = self.rows[index], self.times
        # the first interval holds the compilation of the step
        rate = len(self.rows) * (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
        stats = GenerationStats(
            prompt_tokens=prompt_tokens,
            new_tokens=len(row.ids),
            prefill_seconds=times[0] - began,
            decode_tokens_per_second=rate,
            attended_fraction=float(np.mean(row.attended)) if row.attended else None,
            read_fraction=float(np.mean(row.read)) if row.read else None,
        )
        return Generation(row.stream.text, row.ids, row.finish or "length", stats, row.logprobs if logprobs else None)


class _Primed(NamedTuple):
    logits: Float32[Array, "B V"]
    cache: KVCache
    state: State


@partial(jax.jit, static_argnames=("spec", "policy"))
def _empty(spec: CacheSpec, policy: Policy) -> tuple[KVCache, State]:
    return kv_cache.init(spec, fields=policy.needs), policy.init(spec)


@partial(jax.jit, static_argnames=("policy",), donate_argnames=("cache", "state"))
def _maintain(policy: Policy, cache: KVCache, state: State) -> tuple[KVCache, State]:
    state, cache = policy.maintain(state, cache)
    return cache, state


def prefill_chunk_tokens(batch: int) -> int:
    """Tokens of a prompt chunk: enough to fill the device, few enough that activations stay small."""
    whole = 512 if jax.default_backend() == "cpu" else 8192
    return max(64, 2 ** int(math.log2(whole / batch))) if batch < whole else 64


def _prefill(params: Params, policy: Policy, rows: list[list[int]], spec: CacheSpec, report: OnProgress) -> _Primed:
    longest = max(map(len, rows))
    sizes = prefill.chunk_sizes(longest, prefill_chunk_tokens(len(rows)))
    tokens = np.zeros((len(rows), sum(sizes)), np.int32)
    for b, ids in enumerate(rows):
        tokens[b, : len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows], np.int32)
    carry = prefill.start(params.decoder, policy, *_empty(spec, policy))
    done = 0
    for size in sizes:
        carry = prefill.prefill_chunk(
            params.decoder,
            policy,
            params.weights,
            jnp.asarray(tokens[:, done : done + size]),
            jnp.asarray(np.clip(lengths - done, 0, size)),
            carry,
            last=done + size >= longest,
        )
        done += size
        report("prefill", min(done, longest), longest)
    return _Primed(_logits(params.decoder, params.weights, carry.last_hidden), carry.cache, carry.state)


def _decode(
    params: Params, policy: Policy, options: Sampling, rows: list[list[int]], primed: _Primed, seed: int, run: _Run
) -> None:
    logits, cache, state = primed
    stats = None
    # a key takes 32 bits of a seed: the upper ones are folded in
    decoder, key = params.decoder, jax.random.fold_in(jax.random.key(seed % 2**32), seed >> 32)
    seen = _seen(rows, params.config.vocab_size) if options.repetition_penalty != 1.0 else None
    recent: deque[Array] = deque(maxlen=policy.correct_every or 1)
    for step in range(run.max_new_tokens):
        tokens, logprobs = _sample(options, logits, key, jnp.int32(step), seen)
        run.push(_Step(tokens, logprobs, stats, cache.overflow + False))  # a copy: the cache is donated below
        if run.finished or step + 1 == run.max_new_tokens:
            break
        seen = _mark_seen(seen, tokens)
        logits, cache, state, stats = _step(decoder, policy, params.weights, tokens, cache, state)
        recent.append(tokens)
        if policy.correct_every and (step + 1) % policy.correct_every == 0:
            newest = jnp.stack(recent, axis=1)
            cache, state = prefill.correct(decoder, policy, params.weights, newest, cache, state)
        if policy.period and (step + 1) % policy.period == 0:
            cache, state = _maintain(policy, cache, state)
    run.drain()


def _seen(rows: list[list[int]], vocab_size: int) -> Array:
    seen = np.zeros((len(rows), vocab_size), np.bool_)
    for b, ids in enumerate(rows):
        seen[b, ids] = True
    return jnp.asarray(seen)


def _sampling(params: Params, temperature, top_k, top_p, min_p, repetition_penalty) -> Sampling:
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name}={value!r}: must be a number")
    defaults = {k: v for k, v in params.generation_defaults.items() if k in Sampling._fields}
    return Sampling(**(defaults | {k: v for k, v in given.items() if v is not None})).validate()


def _stop_strings(params: Params, stop: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(stop, Sequence):
        raise ValueError(f"stop={stop!r}: must be a string or a list of strings")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop={list(stop)!r}: must be strings of at least one character")
    if stop:
        prompts.tokenizer_of(params, "stop")
    return stop


def _end_tokens(params: Params, eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        eos_token_id = params.generation_defaults.get("eos_token_id")
    if eos_token_id is None:
        return frozenset(params.tokenizer.eos_token_ids if params.tokenizer else ())
    ids = list(eos_token_id) if isinstance(eos_token_id, Sequence) else [eos_token_id]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < params.config.vocab_size:
            raise ValueError(f"eos_token_id={token!r}: must be token ids from 0 to {params.config.vocab_size - 1}")
    return frozenset(ids)


def _spec(
    params: Params, rows: list[list[int]], max_new_tokens: int, max_length: int | None, page_size: int
) -> CacheSpec:
    """The cache's sizes; ValueError where prompt and new tokens do not fit the model or the capacity asked for."""
    for name, value in (("max_new_tokens", max_new_tokens), ("max_length", max_length)):
        if name == "max_length" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
        raise ValueError(f"page_size={page_size!r}: must be one of {PAGE_SIZES}")
    config, longest = params.config, max(map(len, rows))
    needed = longest + max_new_tokens
    limits = {"the model's maximum": config.max_position_embeddings, "max_length": max_length}
    for name, limit in limits.items():
        if limit is not None and needed > limit:
            raise ValueError(
                f"prompt of {longest} tokens + max_new_tokens={max_new_tokens} is {needed}: "
                f"must be at most {limit}, {name}"
            )
    capacity = memory.bucket(needed, page_size) if max_length is None else max_length
    return CacheSpec(
        num_layers=config.num_layers,
        batch=len(rows),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        num_pages=-(-capacity // page_size),
        dtype=jnp.dtype(params.dtype),
    )


def _streamers(streamer: Streamer | Sequence[Streamer] | None, rows: int, alone: bool) -> list[Streamer]:
    if streamer is None:
        return [lambda piece: None] * rows
    given = list(streamer) if isinstance(streamer, Sequence) else [streamer]
    if len(given) != rows or not all(callable(s) for s in given):
        raise ValueError(f"streamer={streamer!r}: must be one callable for each of the {rows} prompt(s)")
    return given
