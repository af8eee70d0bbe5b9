"""Finds the size at which a policy's decode step reads a wanted share of dense attention's bytes.

A step reads K and V of the attended tokens, and whatever it selects by. The first size that is
tried follows from the bytes of selecting and from the heads that are always dense; later ones from
the bytes that earlier ones were measured to read.
"""

import re
from typing import NamedTuple

from jsparse.cache import CacheSpec
from jsparse.evaluation.selection_bytes import selection_bytes
from jsparse.models.checkpoint import Params
from jsparse.policies.sizes import besides_dense, sized
from jsparse.policy import AnyPolicy, resolved

# they read all keys to select, which does not count: they show what a perfect selector keeps
YARDSTICKS = {"oracle_top_k", "oracle_top_p"}


def is_yardstick(policy: AnyPolicy | str) -> bool:
    """Returns whether a policy selects by exact weights, so that its reads to select do not count.

    It may also be in a wrapper.
    """
    return not YARDSTICKS.isdisjoint(re.findall(r"\w+", str(policy)))


def counted_metric(policy: AnyPolicy) -> str:
    """Returns the field of Closeness with the bytes of a policy that count."""
    return "read" if is_yardstick(policy) else "bytes_share"


class Trial(NamedTuple):
    """A policy that was measured, its tokens per head that is not dense, and the bytes it read.

    The bytes are a share of those of dense attention.
    """

    policy: AnyPolicy
    tokens: int
    share: float


class Sizing:
    """The search for the size of one policy.

    Attributes:
        form: the expression of the policy, with an open size if bytes are wanted.
        wanted: the wanted bytes over those of dense attention; 1 stands for all tokens, whatever
            selecting reads in addition; None: the policy is measured as it is.
    """

    def __init__(
        self,
        params: Params,
        form: str,
        policy: AnyPolicy,
        wanted: float | None,
        spec: CacheSpec,
        tokens: float,
    ) -> None:
        """Starts a search, and finds the first size to try.

        `policy` is the one that `form` builds, `spec` has the sizes of the cache, and `tokens` is
        the mean number of tokens in it.
        """
        self.form, self.wanted = form, wanted
        self._policy, self._spec, self._tokens = policy, spec, tokens
        self._trials: list[Trial] = []
        self._refusal = ""
        # tokens per head that is not dense, and the share of bytes that one more of them adds
        self._next, self._slope = spec.capacity, 1 / tokens
        if wanted is not None and wanted < 1:
            self._next = self._first_size(params, wanted)

    @property
    def best(self) -> Trial:
        """The measured size that came nearest to the wanted bytes."""
        wanted = self.wanted or 0.0
        return min(self._trials, key=lambda trial: abs(trial.share - wanted))

    @property
    def note(self) -> str:
        """The reason why the policy does not read the wanted bytes, or "" if it does."""
        if self.wanted is None or self._reached():
            return ""
        return self._refusal or "nearest size"

    def propose(self) -> Trial | None:
        """Returns the policy to measure next, with share 0; None: the search is over."""
        if self._reached():
            return None
        if self.wanted is not None and not self._refusal:
            made = self._sized(self._next)
            if made is not None:
                tried = any(trial.policy is made for trial in self._trials)
                return None if tried else Trial(made, self._next, 0.0)
        return None if self._trials else Trial(self._policy, 0, 0.0)

    def measured(self, trial: Trial, share: float) -> None:
        """Records the share of bytes that the proposed policy read, and finds the next size."""
        if self._trials and self._trials[-1].share != share:
            last = self._trials[-1]
            self._slope = (share - last.share) / (trial.tokens - last.tokens)
        self._trials.append(trial._replace(share=share))
        if self.wanted is not None:
            step = round((self.wanted - share) / self._slope)
            self._next = min(max(trial.tokens + step, 1), self._spec.capacity)

    def _reached(self) -> bool:
        if self.wanted is None or self.wanted >= 1 or not self._trials:
            return bool(self._trials)
        pages = abs(self.best.share - self.wanted) * self._tokens / self._spec.page_size
        return pages <= 1

    def _first_size(self, params: Params, wanted: float) -> int:
        """Returns the tokens that the heads that are not dense may read."""
        spec, tokens = self._spec, self._tokens
        made = self._sized(round(wanted * tokens))
        if made is None:
            return 0
        policy, heads = resolved(made, spec), spec.model_kv_heads
        always = [len(policy.dense_heads(layer, heads)) for layer in range(spec.num_layers)]
        dense = sum(always) / (spec.num_layers * heads)
        if dense == 1:
            return 1
        self._slope = (1 - dense) / tokens
        read = 0 if is_yardstick(policy) else selection_bytes(params, policy, spec)
        rest = wanted * tokens - read / (spec.batch * spec.ranks * spec.token_bytes)
        return min(max(round(besides_dense(rest, tokens, dense)), 1), spec.capacity)

    def _sized(self, tokens: int) -> AnyPolicy | None:
        try:
            return sized(self.form, max(tokens, 1), self._spec.capacity)
        except ValueError as error:
            self._refusal = str(error).partition(", ")[0]  # without the reason
            return None
