"""CachedPrompt: a prompt that is prefilled, and compressed, once for many continuations."""

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.cache import CacheSpec
from jsparse.generation import generate
from jsparse.hyper_parameters import whole_number
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, require_on_one_device, require_params
from jsparse.names import GENERATE, takes
from jsparse.policies.expressions import as_policy
from jsparse.policies.sparse_prefill import with_prefill
from jsparse.policy import AnyPolicy, Policy, PrefillMethod
from jsparse.runtime import capacity, prompt_files, turn
from jsparse.runtime.compilation import clock, keep_compilations, waited
from jsparse.runtime.generate_options import GenerateOptions, chosen_sampling, streamers_of
from jsparse.runtime.host_reader import Generation, OnChunk
from jsparse.runtime.prompt_files import PromptFile
from jsparse.runtime.request import per_prompt, requests
from jsparse.runtime.sampling import forced
from jsparse.runtime.session import Session
from jsparse.runtime.session_prefill import PrefillResult
from jsparse.runtime.store import empty_rows, on_host
from jsparse.text import prompts

# options of `generate` that belong to the prompt, or that its continuations lack
OF_PROMPT = (
    *("policy", "prefill", "exact", "num_speculative_tokens", "max_length", "page_size"),
    "on_progress",
)


class _Prefilled(NamedTuple):
    """A prefilled prompt, compressed if the policy evicts."""

    policy: Policy
    spec: CacheSpec
    token_ids: list[int]
    room: int
    result: PrefillResult


class CachedPrompt:
    """A prompt that is prefilled once, and compressed if its policy evicts.

    Every continuation starts from it. Decode steps process the tokens of a question one by one, so
    a policy that evicts keeps the tokens that it chose without the question. `kvzip` and
    `expected_attention` are meant for this.

        book = jsparse.CachedPrompt(params, text, policy="kvzip(budget=2048)")
        book.generate("Who finds the letter?", max_new_tokens=50).text
        book.save("book.safetensors")

    Attributes:
        token_ids: the prompt's tokens.
        room: the most tokens of a question and its output together.
    """

    @own_settings()
    def __init__(
        self,
        params: Params,
        prompt: Any,
        *,
        policy: AnyPolicy | str = "kvzip",
        prefill: PrefillMethod | str = "dense",
        room: int = 1024,
        page_size: int = 16,
        on_progress: OnChunk | None = None,
    ) -> None:
        """Prefills and compresses a prompt.

        Args:
            params: the model, on one device.
            prompt: text, chat messages or token ids, as for `jsparse.generate`. Messages end
                without the start of an answer.
            policy: the policy or its expression. It must keep K and V on the device, and rework
                nothing between decode steps.
            prefill: how the prompt attends to itself, as for `jsparse.generate`.
            room: the most tokens of a question and its output together.
            page_size: the number of tokens per page.
            on_progress: a callable that receives ("prefill", done, total), in tokens.

        Raises:
            ValueError: an argument is out of range or refused, or memory does not suffice.
        """
        require_params(params)
        require_on_one_device(params)
        whole_number("room", room, 1)
        policy = with_prefill(policy, prefill)
        if isinstance(policy, Policy):
            _require_at_once(policy)
        rows, alone = prompts.encode(params, _open_ended(prompt))
        if not alone:
            raise ValueError(f"prompt: must be one prompt, not {len(rows)}")
        most = params.config.max_position_embeddings - len(rows[0])
        if room > most:
            raise ValueError(
                f"room={room}: must be at most {most} after a prompt of {len(rows[0])} tokens, "
                f"since the model's maximum is {params.config.max_position_embeddings}"
            )
        spec = capacity.cache_spec(params, rows, room, None, page_size)
        session = Session(params, policy, spec)
        chosen = session.deployment.policy
        _require_at_once(chosen)
        keep_compilations()
        with capacity.exhaustion(spec):
            session.prefill(rows, on_progress or (lambda *_: None))
            session.compress([room])
        self._set(params, _Prefilled(chosen, spec, rows[0], room, session.prefilled))

    def _set(self, params: Params, prefilled: _Prefilled) -> None:
        self._params, self._prefilled = params, prefilled
        self.token_ids, self.room = prefilled.token_ids, prefilled.room

    @takes(GENERATE, more=generate)
    @own_settings()
    def generate(self, continuation: Any, **options: Unpack[GenerateOptions]) -> Generation:
        """Generates text after the prompt and a continuation of it.

        Args:
            continuation: a text or token ids that follow the prompt; or chat messages, the whole
                conversation, whose first tokens must be the prompt's. A text gets no
                beginning-of-sequence token.
            options: keyword arguments of `jsparse.generate` for sampling, and `streamer`.

        Raises:
            ValueError: an option is out of range or belongs to the prompt, the continuation and its
                output exceed `room`, or a conversation does not begin with the prompt.
            TypeError: there is no option of that name.
            FloatingPointError: the model's logits are NaN.
        """
        given: dict[str, Any] = dict(options)
        for name in OF_PROMPT:
            if name in given:
                raise ValueError(f"{name}={given[name]!r}: must be given with the prompt")
        params, (policy, spec, ids, *_) = self._params, self._prefilled
        seed = given.pop("seed", 0)
        sampling, streamer = given.pop("sampling", None), given.pop("streamer", None)
        chosen = chosen_sampling(params, sampling, seed, **({"max_new_tokens": 128} | given))
        (own,) = per_prompt(chosen, 1)
        rest = self._after_prompt(continuation)
        if len(rest) + own.max_tokens > self.room:
            raise ValueError(
                f"a continuation of {len(rest)} tokens and max_new_tokens={own.max_tokens}: must "
                f"be at most room={self.room} together"
            )
        asked = requests(params, [[*ids, *rest]], own, policy, seed=seed)
        keep_compilations()
        began, waits = clock(), waited()
        streamers = streamers_of(streamer, 1)
        turn.stream_prompts(asked, streamers)
        with capacity.exhaustion(spec):
            session = self._session(self._after(rest))
            (out,) = turn.answers(session, asked, streamers, lambda *_: None, began, waits)
        return out

    @own_settings()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the compressed prompt to a safetensors file, for `load`.

        Raises:
            OSError: the file cannot be written.
            ValueError: the policy has no expression, from which `load` could build it.
        """
        params, (policy, spec, ids, room, result) = self._params, self._prefilled
        try:
            as_policy(policy.name)
        except ValueError as error:
            raise ValueError(
                f"policy={policy}: must have an expression to be saved ({error})"
            ) from None
        file = PromptFile(
            prompt_files.digest(params),
            params.name,
            policy.name,
            spec.page_size,
            spec.capacity,
            result.cache.layers[0].num_pages,
            room,
        )
        prompt_files.write(path, file, ids, result)

    @classmethod
    @own_settings()
    def load(cls, params: Params, path: str | os.PathLike[str]) -> Self:
        """Reads a prompt that `save` wrote.

        Raises:
            ValueError: the file cannot be read, or is of another model or version.
        """
        require_params(params)
        require_on_one_device(params)
        file, ids = prompt_files.read_header(path)
        if file.model != prompt_files.digest(params):
            raise ValueError(
                f"path={os.fspath(path)!r}: is of model {file.name!r} with other weights or types "
                f"than {params!r}: must be of the same"
            )
        spec = capacity.cache_spec(params, [ids], file.room, file.capacity, file.page_size)
        policy = Session(params, as_policy(file.policy), spec, adopts=True).deployment.policy
        compressed = spec._replace(num_pages=file.pages)

        def empty() -> PrefillResult:
            logits = jnp.zeros((1, params.config.vocab_size), jnp.float32)
            return PrefillResult(logits, *empty_rows(compressed, policy))

        result = prompt_files.read_arrays(path, jax.eval_shape(empty))
        loaded = cls.__new__(cls)
        loaded._set(params, _Prefilled(policy, spec, ids, file.room, result))
        return loaded

    def _after_prompt(self, continuation: Any) -> list[int]:
        """Returns the tokens that follow the prompt.

        Raises:
            ValueError: a conversation does not begin with the prompt.
        """
        (row, *others), _ = prompts.encode(self._params, continuation, continues=True)
        if others:
            raise ValueError(f"continuation: must be one prompt, not {1 + len(others)}")
        if not _is_chat(continuation):
            return row
        ids = self.token_ids
        same = next((n for n, (a, b) in enumerate(zip(ids, row, strict=False)) if a != b), None)
        if same is not None or len(row) <= len(ids):
            at = min(len(row), len(ids)) if same is None else same
            raise ValueError(
                f"continuation: must begin with the prompt's {len(ids)} tokens, and differs from "
                f"token {at} on"
            )
        return row[len(ids) :]

    def _after(self, rest: Sequence[int]) -> PrefillResult:
        """Returns a copy of the prompt that has also processed the tokens in `rest`."""
        # decoding donates its inputs; several steps at a time would process tokens past `rest`
        start = jax.tree.map(jnp.copy, self._prefilled.result)
        session = self._session(start, steps_per_program=1)
        # the last entry is chosen but not processed; few sizes, since each compiles
        table = np.zeros((capacity.bucket(len(rest) + 1, 1), 1), np.int32)
        table[: len(rest), 0] = rest
        steps = session.steps(forced, jnp.asarray(table), limits=[len(rest) + 1], keep_logits=True)
        with closing(steps):
            *_, last = (result.logits for result in steps)
        assert last is not None
        return session.prefilled._replace(logits=last[-1])

    def _session(self, start: PrefillResult, steps_per_program: int | None = None) -> Session:
        """Returns a session that decodes from `start`, which it consumes."""
        policy, spec, *_ = self._prefilled
        session = Session(
            self._params, policy, spec, adopts=True, steps_per_program=steps_per_program
        )
        session.adopt(start, compressed=True)
        return session


def _is_chat(prompt: Any) -> bool:
    """Whether a prompt is chat messages, with or without options."""
    if isinstance(prompt, dict):
        return prompts.MESSAGES in prompt
    return isinstance(prompt, Sequence) and any(isinstance(item, dict) for item in prompt)


def _open_ended(prompt: Any) -> Any:
    """Returns the prompt; messages get no start of an answer, unless their options say so."""
    if not _is_chat(prompt):
        return prompt
    chat = dict(prompt) if isinstance(prompt, dict) else {prompts.MESSAGES: prompt}
    return {"add_generation_prompt": False} | chat


def _require_at_once(policy: Policy) -> None:
    """Raises ValueError unless a prompt can be stored under this policy."""
    if policy.services.every or on_host(policy):
        raise ValueError(
            f"policy={policy}: must keep K and V on the device and rework nothing between decode "
            "steps, as kvzip, expected_attention, snapkv and ada_kv"
        )
