"""Conversation: a chat that keeps the KV cache between turns."""

import itertools
import reprlib
from collections.abc import Sequence
from typing import Any, Unpack

from jsparse.cache import CacheSpec
from jsparse.generation import Message, generate
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, require_params
from jsparse.names import GENERATE, takes
from jsparse.policies.sparse_prefill import with_prefill
from jsparse.policy import resolved
from jsparse.runtime import capacity
from jsparse.runtime.admission import require_drafting, require_resumable
from jsparse.runtime.generate_options import GenerateOptions, chosen_sampling, num_drafts
from jsparse.runtime.host_reader import Generation, OnChunk, Streamer
from jsparse.runtime.request import per_prompt, requests
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.runtime.session import Session
from jsparse.runtime.turn import run
from jsparse.text import prompts
from jsparse.text.short_names import short_name

# options of `generate` that belong to one turn, not to a conversation
OF_A_TURN = ("streamer", "on_progress", "logprobs")


class Conversation:
    """A chat that keeps the KV cache between turns, so that each turn prefills only new tokens.

    The cache keeps earlier turns up to the end of the last prompt. With `exact`, and under dense
    attention, it also keeps the last output, as far as the chat template preserves its tokens. The
    whole conversation is prefilled again if the policy changes the cache after the prompt, if the
    chat template rewrites earlier turns, or if the cache has become too small.

        chat = Conversation(params, policy="quest(budget=1024)")
        chat.answer([{"role": "user", "content": "Who was Turing?"}]).text

    Attributes:
        reads_anew: why every turn prefills the whole conversation; None: it does not.
    """

    @takes(GENERATE, more=generate)
    @own_settings()
    def __init__(self, params: Params, **options: Unpack[GenerateOptions]) -> None:
        """Starts a conversation.

        Args:
            params: the model; it must have a chat template.
            options: keyword arguments of `jsparse.generate` for every turn, without streamer,
                on_progress and logprobs.

        Raises:
            ValueError: an option is out of range or refused.
            TypeError: there is no option of that name.
        """
        require_params(params)
        given: dict[str, Any] = dict(options)
        for name in given:
            if name in OF_A_TURN:
                raise ValueError(f"{name}={given[name]!r}: must not be given to a conversation")
        policy, prefill = given.pop("policy", "dense"), given.pop("prefill", "dense")
        self._params, self._policy = params, with_prefill(policy, prefill)
        self._max_length = given.pop("max_length", None)
        self._page_size = given.pop("page_size", 16)
        exact, number = given.pop("exact", False), given.pop("num_speculative_tokens", None)
        self._drafts = num_drafts(exact, number)
        self._seed, sampling = given.pop("seed", 0), given.pop("sampling", None)
        given = {"max_new_tokens": 128} | given
        self._sampling = chosen_sampling(params, sampling, self._seed, **given)
        self._session: Session | None = None
        self._read: list[int] = []
        self._answered: list[int] = []
        self.reads_anew: str | None = None
        # any sizes will do: only the owners of the policy's state matter
        spec = capacity.cache_spec(params, [[0]], 1, None, self._page_size)
        running = resolved(self._policy, spec, drafts=self._drafts != 0)
        if self._drafts != 0:
            require_drafting(running, spec)
        try:
            require_resumable(running, spec)
        except ValueError as error:
            reason = f"{short_name(running)} drops tokens" if running.evicts else error
            self.reads_anew = f"{reason}, so every turn prefills the whole conversation again"

    @own_settings()
    def answer(
        self,
        messages: Sequence[Message] | dict[str, Any],
        *,
        streamer: Streamer = lambda piece: None,
        on_progress: OnChunk = lambda *_: None,
    ) -> Generation:
        """Answers the last message of the whole conversation so far.

        Args:
            messages: the conversation, dicts with role and content; or a dict of these `messages`
                with `chat_template_kwargs`, `tools` and the like.
            streamer: a callable that receives each new piece of the output, or an object with
                Hugging Face's `put` and `end`.
            on_progress: a callable that receives ("prefill" | "decode", done, total), in tokens.

        Raises:
            ValueError: the conversation and a new output do not fit in the model or in memory, or
                `messages` is a text.
            FloatingPointError: the model's logits are NaN.
        """
        if isinstance(messages, str):
            message = [{"role": "user", "content": messages}]
            raise ValueError(
                f"messages={reprlib.repr(messages)}: must be the whole conversation, such as "
                f"{reprlib.repr(message)}; generate continues a text"
            )
        rows, alone = prompts.encode(self._params, messages)
        if not alone:
            raise ValueError(f"messages={reprlib.repr(messages)}: must be one conversation")
        (options,) = per_prompt(self._sampling, len(rows))
        session, start = self._session_for(rows[0], options)
        turn = requests(self._params, rows, options, session.deployment.policy, seed=self._seed)
        try:
            starts = None if start is None else [start]
            (out,) = run(session, turn, [streamer], on_progress, starts)
        finally:
            # an interrupted turn may have stopped before or after its prefill
            if session.prompt_lengths == [len(rows[0])]:
                self._session, self._read, self._answered = session, rows[0], []
        self._answered = out.token_ids
        return out

    def _session_for(
        self, prompt: list[int], options: SamplingParams
    ) -> tuple[Session, int | None]:
        """Returns the session for the next turn, and the number of prompt tokens in its cache.

        None: the session is new.
        """
        minimum = capacity.cache_spec(
            self._params, [prompt], options.max_tokens, self._max_length, self._page_size
        )
        needed = len(prompt) + options.max_tokens
        held, read = self._session, self._read
        if held is not None and held.can_continue:
            fits = needed <= held.deployment.spec.capacity
            if len(prompt) > len(read) and fits and prompt[: len(read)] == read:
                return held, self._start(held, prompt)
        self._session = held = None  # frees its cache
        spec = self._with_room(minimum, needed)
        resumable = self.reads_anew is None
        session = Session(
            self._params, self._policy, spec, resumable=resumable, drafts=self._drafts
        )
        return session, None

    def _start(self, held: Session, prompt: list[int]) -> int:
        """Returns the number of tokens of a continued prompt that need no prefill."""
        end = len(self._read)
        if not held.deployment.keeps_generated:
            return end
        # the newest token of an output is not in the cache yet
        known = zip(prompt[end:-1], self._answered[:-1], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], known))
        return max(end, min(end + same, len(prompt) - held.deployment.policy.window))

    def _with_room(self, spec: CacheSpec, needed: int) -> CacheSpec:
        """Returns these sizes, or larger ones with room for later turns if memory allows."""
        maximum = self._params.config.max_position_embeddings
        room = min(2 * needed, maximum)
        if self._max_length is None and self.reads_anew is None:
            larger = capacity.bucket(room, self._page_size) // self._page_size
            roomy = spec._replace(num_pages=larger)
            if capacity.fits(roomy, resolved(self._policy, roomy, drafts=self._drafts != 0)):
                return roomy
        return spec
