"""The settings of a training run, besides the model and its data."""

import math
from dataclasses import dataclass
from typing import get_args

from jsparse.train import distill, lagrangian
from jsparse.train.data import check_at_least
from jsparse.train.families import FAMILIES
from jsparse.train.lagrangian import Lagrangian

# rate, start, damping
PENALTIES = {
    "ascent": (0.5, 0.0, 1000.0),
    "exponential": (1e-3, 2.0, 0.0),
    "fixed": (0.0, 0.05, 0.0),
}


@dataclass(frozen=True)
class Settings:
    """The settings of a training run.

    Attributes:
        target: the wanted number of retrieval heads, including those of layer 0.
        family: "hard_kuma", "hard_concrete" or "direct".
        penalty, penalty_rate, penalty_start, damping, anneal: see `lagrangian.Lagrangian`; None:
            the penalty's default.
        rate: AdamW learning rate.
        keep: the fraction of the context that a sparse head inherits.
        sets: "handed_on", "refreshed" or "streaming"; see `distill`.
        match: the outputs that are compared, "logits" or "hidden".
        seeds: the number of seeds trained side by side, on the same samples.
        held_out: the number of batches, after the training batches, on which the result is
            measured.
    """

    target: int
    family: str = "hard_kuma"
    penalty: lagrangian.Penalty = "ascent"
    penalty_rate: float | None = None
    penalty_start: float | None = None
    damping: float | None = None
    anneal: float = 0.5
    steps: int = 3000
    batch: int = 1
    rate: float = 0.01
    keep: float = 0.3
    sets: distill.Sets = "handed_on"
    match: distill.Match = "logits"
    seeds: int = 1
    held_out: int = 16

    def lagrangian(self, layers: int, heads: int) -> Lagrangian:
        """Returns the rules for a model with these numbers of layers and KV heads.

        Raises:
            ValueError: a setting is out of range.
        """
        kinds = {"penalty": lagrangian.Penalty, "match": distill.Match, "sets": distill.Sets}
        for name, known in {
            "family": tuple(FAMILIES),
            **{name: get_args(kind) for name, kind in kinds.items()},
        }.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}"
                )
        check_at_least(
            1, steps=self.steps, batch=self.batch, seeds=self.seeds, held_out=self.held_out
        )
        if not heads <= self.target <= layers * heads:
            raise ValueError(
                f"target={self.target}: must be from {heads}, layer 0's KV heads, to "
                f"{layers * heads}, all of them"
            )
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep}: must be above 0 and at most 1")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate={self.rate}: must be a finite number above 0")
        if not 0 <= self.anneal <= 1:
            raise ValueError(f"anneal={self.anneal}: must be from 0 to 1")
        if self.penalty == "fixed" and self.penalty_rate is not None:
            raise ValueError(
                f"penalty_rate={self.penalty_rate}: must not be given where penalty='fixed'"
            )
        usual: dict[str, float] = dict(
            zip(("penalty_rate", "penalty_start", "damping"), PENALTIES[self.penalty], strict=True)
        )
        chosen = {name: getattr(self, name) for name in usual}
        penalty = {name: usual[name] if value is None else value for name, value in chosen.items()}
        for name, value in penalty.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be finite and at least 0")
        family = FAMILIES[self.family]
        return Lagrangian(
            family,
            (layers, heads),
            self.target,
            self.steps,
            self.rate,
            self.penalty,
            anneal=self.anneal,
            **penalty,
        )
