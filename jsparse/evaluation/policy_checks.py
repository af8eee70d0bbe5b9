"""Checks that a policy keeps the contract, on a small random model.

Some part of jsparse relies on each rule for every method. A policy that breaks a rule may work on
its own but give wrong results in a batch, in an engine or after a longer prompt.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from jsparse.builder import dense
from jsparse.cache import spec_of, step_view
from jsparse.evaluation.contract_rules import NAMES, RULES, ContractRule
from jsparse.evaluation.contract_violations import (
    Violation,
    check_close,
    check_mass,
    check_selection,
    leaves_out,
    one_line,
    row_arrays,
    with_checked_types,
)
from jsparse.evaluation.policy_trial import (
    LENGTHS,
    PAGE,
    PIECE,
    STEPS,
    VOCAB,
    Trial,
    TrialResult,
    TrialRows,
    random_model,
    random_prompts,
    traces,
)
from jsparse.evaluation.selection_mass import with_recency
from jsparse.models.checkpoint import Params
from jsparse.policy import AnyPolicy, Policy, resolved
from jsparse.runtime.admission import admit
from jsparse.runtime.state_axes import state_axes
from jsparse.runtime.store import on_host


class Finding(NamedTuple):
    """Whether a policy keeps a rule; None: it was not checked.

    `detail` is the violation, a measurement, or the reason why the rule was not checked.
    """

    rule: ContractRule
    kept: bool | None
    detail: str = ""


class CheckResult(NamedTuple):
    """The finding of each rule.

    `leaves_out` is whether the policy left out any token: if it left out none, rules that dense
    attention keeps are hardly tested. None: the policy does not run, drops tokens or has dense
    rows.
    """

    findings: list[Finding]
    leaves_out: bool | None

    @property
    def broken(self) -> list[str]:
        """The names of the broken rules."""
        return [finding.rule.name for finding in self.findings if finding.kept is False]


class _Skip(Exception):
    """The reason why a rule was not checked."""


def check(
    policy: AnyPolicy,
    full: AnyPolicy | None = None,
    *,
    params: Params | None = None,
    rules: Sequence[str] = NAMES,
) -> CheckResult:
    """Checks that a policy keeps the rules of these names.

    The policy's budget must be small enough that it leaves out some of 30 tokens. `full` is the
    same policy with a budget for all tokens; None: it has no budget in tokens. The default model is
    random.

    Raises:
        ValueError: the model lacks constants that the policy needs.
    """
    checks = _Checks(params or random_model(), policy, full)
    findings = [checks.finding(rule) for rule in RULES if rule.name in rules]
    return CheckResult(findings, checks.leaves_out)


class _Checks:
    """Checks of the rules; runs that several of them need are made once, on first use."""

    def __init__(self, params: Params, policy: AnyPolicy, full: AnyPolicy | None) -> None:
        self._params, self._prompts = params, random_prompts(LENGTHS, seed=1)
        rng = np.random.default_rng(2)
        self._forced = rng.integers(VOCAB, size=(len(LENGTHS), STEPS)).astype(np.int32)
        spec = Trial(params, dense()).spec(len(LENGTHS))
        self.policy = _on_device(resolved(policy, spec))
        self._full = None if full is None else _on_device(resolved(full, spec))
        admit(params, self.policy, spec)
        self._spec, self._traced = spec, 0

    def finding(self, rule: ContractRule) -> Finding:
        """Checks one rule."""
        look: Callable[[], str | None] = getattr(self, f"_{rule.name}")
        try:
            if rule.name not in ("types", "runs", "owners") and self._failure:
                raise _Skip("the policy does not run")
            if rule.name in ("pool", "inactive") and not self._owned:
                raise _Skip("the state's arrays have no owners")
            detail = look()
        except Violation as broken:
            return Finding(rule, False, str(broken))
        except _Skip as reason:
            return Finding(rule, None, str(reason))
        except Exception as error:  # the policy's code may raise any error
            return Finding(rule, False, one_line(error))
        return Finding(rule, True, detail or "")

    @cached_property
    def _failure(self) -> Exception | None:
        """The error that prevents the policy from running, or None."""
        try:
            if isinstance(self._changes, Exception):
                return self._changes
            assert self._base
        except Exception as error:  # the policy's code may raise any error
            return error
        return None

    @cached_property
    def _owned(self) -> bool:
        try:
            state_axes(self.policy, self._spec)
        except Exception:  # `init` may raise any error
            return False
        return True

    @cached_property
    def _trial(self) -> Trial:
        return Trial(self._params, self.policy, owned=self._owned)

    @cached_property
    def _changes(self) -> str | Exception | None:
        """How a hook changes the state's types, or any other error of tracing it."""
        try:
            self._trace_watched()
        except Violation as broken:
            return str(broken)
        except Exception as error:  # the policy's code may raise any error
            return error
        return None

    @cached_property
    def _base(self) -> TrialResult:
        """Two rows, prefilled together; records how many programs its last steps traced."""
        every = max((n for n in self.policy.services.every.values() if n <= STEPS), default=0)
        trial, first = self._trial, min(every + 1, STEPS)
        result = trial.run(self._prompts, self._forced[:, :first])
        before = traces()
        whole = trial.run(self._prompts, self._forced)
        self._traced = traces() - before
        assert len(result.logits) == first
        return whole

    @cached_property
    def _others(self) -> TrialResult:
        """The second row in the first's position, with another one."""
        (other,) = random_prompts([LENGTHS[0] - 3], seed=3)
        before = traces()
        result = self._trial.run([self._prompts[1], other], self._forced[::-1])
        self._traced += traces() - before
        return result

    def _types(self) -> None:
        if isinstance(self._changes, Exception):
            raise _Skip("the policy does not run")
        if self._changes:
            raise Violation(self._changes)

    def _trace_watched(self) -> None:
        """Traces a prompt of two chunks, a step and the services, comparing types at each hook."""
        watched = Trial(self._params, with_checked_types(self.policy), owned=False)

        def run() -> Any:
            carry = watched.begin(self._spec)
            carry = watched.read(carry, [ids[:PAGE] for ids in self._prompts], PAGE // 2)
            # eviction after the prompt runs outside of jit: the step takes the cache as it is
            _, _, rows = watched.step(TrialRows(carry.cache, carry.state), self._forced[:, 0])
            view = step_view(rows.cache, watched.read_only)
            return watched.policy.services.maintain(rows.state, view)

        jax.eval_shape(run)

    def _runs(self) -> None:
        if isinstance(self._changes, str):
            raise _Skip("the state changes its types")
        if self._failure:
            raise self._failure

    def _owners(self) -> None:
        try:
            state_axes(self.policy, self._spec)
        except ValueError as error:
            raise Violation(str(error).partition(": ")[2]) from None

    def _selections(self) -> None:
        if not self._base.chosen:
            raise _Skip("short rows are dense under this policy")
        layers = self._params.config.num_layers
        for nth, (selection, lengths, *_) in enumerate(self._base.chosen):
            where = f"in step {nth // layers + 1}, layer {nth % layers}"
            check_selection(selection, np.asarray(lengths), where)

    def _finite(self) -> None:
        bad = ~np.isfinite(self._base.logits).all(axis=-1)
        if bad.any():
            step, row = np.argwhere(bad)[0]
            raise Violation(f"logits of row {row} are not finite in step {step + 1}")

    def _rows(self) -> None:
        check_close("beside another row", self._others.logits[:, 0], self._base.logits[:, 1])

    def _alone(self) -> None:
        result = self._trial.run(self._prompts[1:], self._forced[1:])
        check_close("alone", result.logits[:, 0], self._base.logits[:, 1])

    def _pieces(self) -> None:
        result = self._trial.run(self._prompts, self._forced, PIECE)
        check_close(f"read {PIECE} tokens at a time", result.logits, self._base.logits)

    def _pool(self) -> None:
        result = self._trial.run_in_a_used_pool(self._prompts, self._forced)
        check_close("in a shared pool", result.logits, self._base.logits)

    def _inactive(self) -> None:
        rows, tokens = self._base.rows, self._forced[:, 0]
        logits, _, after = self._trial.step(rows, tokens, [True, False])
        together, *_ = self._trial.step(rows, tokens)
        spec = spec_of(rows.cache, self._params.config.num_heads)
        arrays = (row_arrays(self.policy, spec, each, 1) for each in (rows, after))
        for (name, was), (_, now) in zip(*arrays, strict=True):
            if not np.array_equal(was, now, equal_nan=True):
                raise Violation(f"{name} of the inactive row changed")
        check_close("beside an inactive row", logits[:1], together[:1])

    def _retrace(self) -> None:
        state = jax.eval_shape(lambda: self.policy.init(self._spec))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if getattr(leaf, "weak_type", False):
                name = jax.tree_util.keystr(path)
                raise Violation(f"init gives state{name} no dtype of its own, which hooks then do")
        assert self._others
        if self._traced:
            raise Violation(f"{self._traced} more programs for steps and prompts of the same sizes")

    def _budget(self) -> None:
        if self._full is None:
            raise _Skip("it takes no budget in tokens")
        if self.policy.evicts:
            raise _Skip("it drops tokens, which more than a budget may decide")
        result = Trial(self._params, self._full, owned=self._owned).run(self._prompts, self._forced)
        exact = Trial(self._params, dense()).run(self._prompts, self._forced)
        check_close("with a budget for all", result.logits, exact.logits, "dense attention")

    def _mass(self) -> str:
        if self.policy.evicts:
            raise _Skip("it drops tokens, so that dense attention over the rest is no yardstick")
        if not self._base.chosen:
            raise _Skip("short rows are dense under this policy")
        trial = Trial(with_recency(self._params), self.policy, owned=self._owned)
        measured = check_mass(trial.run(self._prompts, self._forced).chosen)
        if not measured:
            raise _Skip("heads attend to all of these few tokens, or to the newest alone")
        return measured

    @property
    def leaves_out(self) -> bool | None:
        """Whether some step left out a token of the cache; None if no run shows it."""
        result: TrialResult | None = self.__dict__.get("_base")
        if result is None or not result.chosen or self.policy.evicts:
            return None
        return any(map(leaves_out, result.chosen))


def _on_device(policy: Policy) -> Policy:
    return policy._replace(offload=None) if on_host(policy) else policy
