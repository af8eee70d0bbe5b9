"""Follows an output through a grammar, and tells which tokens may come next.

The library llguidance parses it.
"""

import json
import re
import reprlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache, lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from jaxtyping import UInt32
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.bad_words import BadWords
from jsparse.runtime.structured_outputs import EVERY_TOKEN, StructuredOutputsParams, bits
from jsparse.text.reasoning import BEGIN, END, TAIL, opens_reasoning

MAX_MESSAGE = 500  # characters of the library's errors, which can quote the whole grammar
KEPT = 16  # compiled grammars
STACK = 2**30  # bytes of addresses, for the longest chain of rules in MAX_CHARS
# between the parts of JSON; with more, some models write nothing else to the end
SPACES = r" ?|\n[ \t]{0,64}"
# the library's table of tokens, and a function that compiles grammars and keeps the newest few
Compiler = tuple[LLTokenizer, Callable[[str], LLMatcher]]
_by_vocabulary: WeakKeyDictionary[Tokenizer, dict[int, Compiler]] = WeakKeyDictionary()
_making = threading.Lock()


class Constraint:
    """The state of one output in its grammar.

    Attributes:
        matcher: the library's parser.
        table_words: the words of the bits that it finds.
        own_ends: the bits of the tokens that it takes for the end.
        ends: the bits of the tokens that end the output.
        reasoning: the free text before the output; None: there is none.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        table_words: int,
        own_ends: np.ndarray,
        ends: np.ndarray,
        reasoning: "Reasoning | None" = None,
    ) -> None:
        """Starts an output; `constraint` compiles the grammar."""
        self.matcher, self.table_words, self.own_ends = matcher, table_words, own_ends
        self.ends, self.reasoning = ends, reasoning

    def copy(self) -> "Constraint":
        """Returns the state of another output that has begun alike."""
        others = self.table_words, self.own_ends, self.ends
        return Constraint(self.matcher.deep_copy(), *others, copy(self.reasoning))

    @property
    def reasons(self) -> bool:
        """Whether the output is in its reasoning."""
        return self.reasoning is not None and self.reasoning.inside

    def allowed(self) -> UInt32[np.ndarray, "words"]:
        """Returns the bits of the tokens that may come next: see `allowed`."""
        return allowed([self])[0]

    def take(self, ids: Sequence[int]) -> None:
        """Appends tokens to the output."""
        for token in ids:
            if self.reasoning is None or not self.reasoning.take(token):
                self.matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the output cannot be continued, such as a limit of the parser's, or None."""
        found = self.matcher.is_error() and _shortened(self.matcher.get_error())
        return f"structured_outputs: {found}" if found else None


def allowed(states: Sequence[Constraint | BadWords]) -> UInt32[np.ndarray, "n words"]:
    """Returns a bit for each token, the lowest of the first word for id 0: may it come next?

    All outputs are of the same model.
    """
    grammars = [state for state in states if isinstance(state, Constraint)]
    parsed = iter(_allowed(grammars) if grammars else ())
    return np.stack(
        [next(parsed) if isinstance(state, Constraint) else state.allowed() for state in states]
    )


def _allowed(states: Sequence[Constraint]) -> UInt32[np.ndarray, "n words"]:
    """Returns these bits for grammars; ends may come where the output is complete."""
    # the library knows only the tokenizer's tokens; a model may have more logits
    found = np.zeros((len(states), states[0].table_words), np.uint32)
    parsed = [(state.matcher, nth) for nth, state in enumerate(states) if not state.reasons]
    if parsed:
        _executor().unsafe_compute_mask_ptr(
            parsed, found.ctypes.data, found.strides[0], len(states)
        )
    words = np.zeros((len(states), states[0].ends.size), np.uint32)
    common = min(found.shape[1], words.shape[1])
    words[:, :common] = found[:, :common]
    for own, state in zip(words, states, strict=True):
        if state.reasoning is not None and state.reasoning.inside:
            own[:] = state.reasoning.free & ~state.ends
            continue
        own &= ~state.own_ends
        if state.matcher.is_accepting():
            own |= state.ends
        if state.reasoning is not None:
            own |= state.reasoning.opening
        if not own.any():  # the parser refuses whatever is chosen, and says why
            own[:] = EVERY_TOKEN
    return words


_executor = cache(LLExecutor)  # its threads


class Reasoning:
    """The free text from <think> to </think> at the beginning of an output.

    Attributes:
        inside: whether the output is in it.
        free: the bits of the tokens that have bytes.
        opening: the bits of the tokens that may open it now.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, opened: bool) -> None:
        """Starts an output; `opened` is whether the prompt left <think> open.

        Otherwise only the token of <think> opens it, if there is one.
        """
        begin = tokenizer.encode(BEGIN, add_special_tokens=False)
        self.inside, self._bytes, self._newest = opened, tokenizer.token_bytes(), b""
        known = [token for token, text in enumerate(self._bytes[:vocab_size]) if text]
        self.free = bits(known, vocab_size)
        self._begin = begin[0] if len(begin) == 1 and not opened else None
        self.opening = bits([] if self._begin is None else begin, vocab_size)

    def take(self, token: int) -> bool:
        """Appends a token to the output; returns whether it belongs to the reasoning."""
        begins, self._begin = token == self._begin, None
        self.opening = np.zeros_like(self.opening)
        if self.inside:
            text = self._bytes[token] if token < len(self._bytes) else b""
            self._newest = self._newest[-len(END) :] + text
            self.inside = END.encode() not in self._newest
            return True
        self.inside = begins
        return begins


def constraint(
    tokenizer: Tokenizer,
    wanted: StructuredOutputsParams,
    ends: frozenset[int],
    vocab_size: int,
    prompt: np.ndarray,
    min_tokens: int = 0,
) -> Constraint:
    """Compiles a grammar, in a thread of its own: some take seconds.

    Args:
        tokenizer: the model's.
        wanted: what the output must consist of.
        ends: the tokens that end the output.
        vocab_size: the number of the model's logits.
        prompt: the ids before the output, whose last ones may open reasoning.
        min_tokens: the number of tokens before which nothing ends the output.

    Raises:
        ValueError: the grammar is malformed or too complex, no token may come first, or the bytes
            of tokens are unknown.
    """
    given = tokenizer, wanted, ends, vocab_size, prompt, min_tokens
    return _thread().submit(_compiled, *given).result()


@cache
def _thread() -> ThreadPoolExecutor:
    """Returns the thread that compiles grammars; nested ones take much of its stack."""
    before = threading.stack_size(STACK)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix="jsparse-grammars")
        pool.submit(int).result()
    finally:
        threading.stack_size(before)
    return pool


def _compiled(
    tokenizer: Tokenizer,
    wanted: StructuredOutputsParams,
    ends: frozenset[int],
    vocab_size: int,
    prompt: np.ndarray,
    min_tokens: int,
) -> Constraint:
    name = f"structured_outputs.{wanted.format}"
    table, compiled = _compiler(tokenizer, vocab_size)
    matcher = compiled(_grammar(wanted))
    if matcher.is_error():
        raise ValueError(f"{name}: {_shortened(matcher.get_error())}")
    own_ends, of_request = (
        bits([token for token in some if token < vocab_size], vocab_size)
        for some in (tokenizer.eos_token_ids, ends)
    )
    reasoning = None
    if wanted.after_reasoning:
        tail = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
        opened = wanted.after_reasoning == "begun" or opens_reasoning(tail)
        reasoning = Reasoning(tokenizer, vocab_size, opened=opened)
    words = -(-table.vocab_size // 32)
    made = Constraint(matcher.deep_copy(), words, own_ends, of_request, reasoning)
    first = matcher.deep_copy()
    mask = np.frombuffer(first.compute_bitmask(), np.uint32)[: own_ends.size] & ~own_ends[:words]
    if first.is_error():
        raise ValueError(f"{name}: {_shortened(first.get_error())}")
    if not mask.any() and not (of_request.any() and first.is_accepting() and min_tokens == 0):
        raise ValueError(f"{name}={reprlib.repr(wanted.text)}: must allow a first token")
    return made


def _grammar(wanted: StructuredOutputsParams) -> str:
    """Returns a grammar in the library's own format.

    Raises:
        ValueError: it is not JSON, or malformed GBNF.
    """
    text = wanted.text
    match wanted.format:
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            # one token of the grammar: as rules, the library takes only 2,000
            quoted = (json.dumps(each, ensure_ascii=False) for each in wanted.choice or ())
            choices = " | ".join(quoted).replace("\x7f", "\\u007f")
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "grammar":
            try:
                return LLMatcher.grammar_from_lark(any_to_lark(text))
            except Exception as error:  # the library names no class of errors
                raise ValueError(f"structured_outputs.grammar: {_shortened(f'{error}')}") from None
    spaces: Any = {"whitespace_flexible": False}
    if not wanted.disable_any_whitespace:
        spaces = {"whitespace_pattern": SPACES}
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=spaces)
    except ValueError as error:
        raise ValueError(f"structured_outputs.json: {_shortened(f'{error}')}") from None


def _compiler(tokenizer: Tokenizer, vocab_size: int) -> Compiler:
    """Returns the table of a model's tokens, which takes up to a second to make, and a compiler."""
    with _making:
        made = _by_vocabulary.setdefault(tokenizer, {})
        if vocab_size not in made:
            ends = [token for token in tokenizer.eos_token_ids if token < vocab_size]
            if not ends:
                raise ValueError("structured_outputs: needs a tokenizer with an end token")
            table = LLTokenizer(
                TokenizerWrapper(_Tokens(tokenizer, vocab_size)),
                n_vocab=vocab_size,
                eos_token=ends,
            )
            compiled = lru_cache(KEPT)(partial(LLMatcher, table, log_level=0))
            made[vocab_size] = table, compiled
        return made[vocab_size]


class _Tokens:
    """A tokenizer as the library wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = tokenizer.token_bytes()[:vocab_size]
        self.special_token_ids = [
            token for token in tokenizer.control_token_ids() if token < vocab_size
        ]
        self._tokenizer = ref(tokenizer)

    def __call__(self, text: bytes) -> list[int]:
        """Returns the ids of a text, which may be cut off within a character."""
        tokenizer = self._tokenizer()
        return tokenizer.encode(text.decode(), add_special_tokens=False) if tokenizer else []


def _shortened(message: str) -> str:
    """Returns the library's message without its own state."""
    message = re.split(r"\n?<(?:state|backtrace)>", message)[0]
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
