"""Defines Conversation, which answers the turns of a chat and reads each of them once."""

import itertools
import reprlib
from collections.abc import Sequence
from typing import Any, Unpack

from jsparse.cache import CacheSpec
from jsparse.generation import Message, generate
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, require_params
from jsparse.names import GENERATE, takes
from jsparse.policies.expressions import as_policy
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

# options of `generate` that belong to one answer, not to a conversation
OF_A_TURN = ("streamer", "on_progress", "logprobs")


class Conversation:
    """Answers the turns of a chat; a further turn reads at most the last answer and what is new.

    Earlier turns stay in the cache, up to the end of the last prompt; with `exact`, and under dense
    attention, so does the last answer, as far as the chat template leaves its tokens as they are.
    Everything is read anew where that is impossible: the policy changes the cache after the prompt,
    the chat template rewrites earlier turns, or the cache has become too small.

        chat = Conversation(params, policy="quest(budget=1024)")
        chat.answer([{"role": "user", "content": "Who was Turing?"}]).text

    Attributes:
        reads_anew: why every turn reads the whole conversation, or None if it does not.
    """

    @takes(GENERATE, more=generate)
    @own_settings()
    def __init__(self, params: Params, **options: Unpack[GenerateOptions]) -> None:
        """Begins a conversation.

        Args:
            params: the model; it must have a chat template.
            options: keyword arguments of `jsparse.generate` for every turn, without streamer,
                on_progress and logprobs.

        Raises:
            ValueError: an option is out of its range or is refused.
            TypeError: there is no option of that name.
        """
        require_params(params)
        given: dict[str, Any] = dict(options)
        for name in given:
            if name in OF_A_TURN:
                raise ValueError(f"{name}={given[name]!r}: must not be given to a conversation")
        self._params, self._policy = params, as_policy(given.pop("policy", "dense"))
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
        # sizes of any cache: only the owners of the policy's state matter
        spec = capacity.cache_spec(params, [[0]], 1, None, self._page_size)
        running = resolved(self._policy, spec, drafts=self._drafts != 0)
        if self._drafts != 0:
            require_drafting(running, spec)
        try:
            require_resumable(running, spec)
        except ValueError as error:
            reason = f"{short_name(running)} drops tokens" if running.evicts else error
            self.reads_anew = f"{reason}, so every turn reads the whole conversation again"

    @own_settings()
    def answer(
        self,
        messages: Sequence[Message],
        *,
        streamer: Streamer = lambda piece: None,
        on_progress: OnChunk = lambda *_: None,
    ) -> Generation:
        """Answers the last message of the whole conversation so far.

        Args:
            messages: the conversation; dicts with role and content.
            streamer: a callable that gets each piece of the answer as it is made, or an object with
                Hugging Face's `put` and `end`.
            on_progress: a callable that gets ("prefill" | "decode", done, total), in tokens.

        Raises:
            ValueError: the conversation and a new answer do not fit in the model or in memory, or
                it is a text.
            FloatingPointError: the model's logits are NaN.
        """
        if isinstance(messages, str):
            message = [{"role": "user", "content": messages}]
            raise ValueError(
                f"messages={reprlib.repr(messages)}: must be the whole conversation, such as "
                f"{reprlib.repr(message)}; generate continues a text"
            )
        rows, _ = prompts.encode(self._params, messages)
        (options,) = per_prompt(self._sampling, len(rows))
        session, start = self._session_for(rows[0], options)
        asked = requests(self._params, rows, options, session.deployment.policy, seed=self._seed)
        try:
            begins = None if start is None else [start]
            (out,) = run(session, asked, [streamer], on_progress, begins)
        finally:
            # of an answer that was interrupted, the prompt has been read, or not
            if session.prompt_lengths == [len(rows[0])]:
                self._session, self._read, self._answered = session, rows[0], []
        self._answered = out.token_ids
        return out

    def _session_for(
        self, prompt: list[int], options: SamplingParams
    ) -> tuple[Session, int | None]:
        """Returns the session that answers next, and how much of the prompt it holds.

        None is that it is new.
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
        """Returns how much of a prompt that goes on a session need not read again."""
        end = len(self._read)
        if not held.deployment.keeps_generated:
            return end
        # the newest token of an answer has not been read
        known = zip(prompt[end:-1], self._answered[:-1], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], known))
        return max(end, min(end + same, len(prompt) - held.deployment.policy.window))

    def _with_room(self, spec: CacheSpec, needed: int) -> CacheSpec:
        """Returns these sizes, or those of a cache with room for turns to come if memory has it."""
        maximum = self._params.config.max_position_embeddings
        room = min(2 * needed, maximum)
        if self._max_length is None and self.reads_anew is None:
            larger = capacity.bucket(room, self._page_size) // self._page_size
            roomy = spec._replace(num_pages=larger)
            if capacity.fits(roomy, resolved(self._policy, roomy, drafts=self._drafts != 0)):
                return roomy
        return spec
