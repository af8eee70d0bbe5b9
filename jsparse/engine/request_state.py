"""Defines RequestState, a request with its sequences, and the counters of an engine."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jsparse.engine.outputs import RequestMetrics, RequestOutput
from jsparse.engine.step_plan import SequenceState, StepPlan
from jsparse.policy import Policy
from jsparse.runtime.collecting import OutputBuilder


@dataclass
class Counters:
    """Counts of an engine's work so far.

    Attributes:
        prefill_tokens: computed prompt tokens.
        decode_steps, row_steps: decode steps or verification rounds, and the rows in them.
        new_tokens: tokens of sequences.
        drafts: verification rounds with drafts, counted once per row.
        draft_tokens, accepted_tokens: drafted tokens, and accepted ones.
        accepted_at: accepted tokens, by their position in a round.
        compressed_rows: compressions of a row's tokens; policies that evict compress a row after
            its prompt and while it decodes.
        preemptions: the number of times that a sequence was preempted.
        blocks_out, blocks_in: blocks copied to host memory, and back to the device.
        plan_seconds, dispatch_seconds, results_seconds: the host's time.
    """

    prefill_tokens: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    new_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    compressed_rows: int = 0
    preemptions: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    plan_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    results_seconds: float = 0.0

    def count(self, plan: StepPlan, policy: Policy) -> None:
        """Counts the work of a plan under a policy."""
        if plan.prefill is not None and not plan.prefill.replay:
            self.prefill_tokens += sum(chunk.valid for chunk in plan.prefill.chunks)
        if plan.decode is not None:
            self.decode_steps += plan.decode.steps
            # in a verification round, a row's `steps` count tokens
            self.row_steps += sum(min(row.steps, plan.decode.steps) for row in plan.decode.rows)
        self.preemptions += len(plan.preempted)
        copies = [*plan.copies, *plan.late_copies]
        self.blocks_out += sum(copy.out for copy in copies)
        self.blocks_in += sum(not copy.out for copy in copies)
        if policy.evicts:
            chunks, rows = (
                plan.prefill and plan.prefill.chunks,
                plan.decode and plan.decode.rows,
            )
            self.compressed_rows += sum(len(chunk.kept) > 0 for chunk in chunks or ())
            if period := policy.services.period:
                self.compressed_rows += sum(row.age % period == 0 for row in rows or ())

    def count_drafts(self, drafted: int, tokens: int) -> None:
        """Counts a row's verification round of `drafted` drafts, which yielded `tokens` tokens."""
        if drafted > 0:
            self.drafts += 1
            self.draft_tokens += drafted
            self.accepted_tokens += tokens - 1
            self.accepted_at.update(range(tokens - 1))


def policy_of(policy: Policy, settings: Mapping[str, float | bool]) -> str:
    """Returns the name of the policy for a request that sets some of its hyper-parameters."""
    if settings.get("dense"):
        return "dense"
    changed = ", ".join(f"{name}={value}" for name, value in settings.items() if name != "dense")
    return f"{policy.name} with {changed}" if changed else policy.name


@dataclass(eq=False)
class RequestState:
    """A request with its sequences."""

    request_id: str
    prompt: str | None
    ids: np.ndarray
    seqs: list[SequenceState]
    builders: list[OutputBuilder]
    metrics: RequestMetrics
    policy: str

    @property
    def finished(self) -> bool:
        """Whether all sequences are complete."""
        return None not in (builder.finish for builder in self.builders)

    def output(self, *, new: bool = False) -> RequestOutput:
        """Returns the sequences so far, or only the part that is `new` since the last output."""
        # built once: another thread may add tokens in the meantime
        outputs = [builder.output(new=new) for builder in self.builders]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.ids,
            outputs,
            max(seq.cached_tokens for seq in self.seqs),
            self.metrics,
            all(seq.finish_reason is not None for seq in outputs),
            self.policy,
            self.builders[0].of_prompt,
            self.builders[0].request.sampling.prompt_logprobs or 0,
        )
