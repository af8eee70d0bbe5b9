"""Checks that a policy keeps the contract, on a small random model.

Each rule is what some part of jsparse relies on, whatever the method. A policy that breaks one may
give right answers alone and wrong ones in a batch, in an engine or after a longer prompt.
"""

import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jsparse
from jsparse.builder import dense
from jsparse.cache import StepView, spec_of
from jsparse.evaluation.policy_trial import (
    LENGTHS,
    PAGE,
    PIECE,
    STEPS,
    VOCAB,
    LayerSelection,
    Trial,
    TrialResult,
    TrialRows,
    random_model,
    random_prompts,
    traces,
)
from jsparse.models.checkpoint import Params
from jsparse.policy import AnyPolicy, Policy, resolved
from jsparse.runtime.admission import admit
from jsparse.runtime.owners import owners

CLOSE = 1e-4  # differences over the largest logit that rounding may make


class ContractRule(NamedTuple):
    """Is one rule of the contract.

    Attributes:
        name: what the command calls it.
        promise: what holds where it is kept.
        contract: what docs/contract.md asks for.
        fix: what usually mends it.
    """

    name: str
    promise: str
    contract: str
    fix: str


class Finding(NamedTuple):
    """Says whether a policy keeps a rule; `kept` is None where that was not asked.

    `told` is what was seen, or why it was not asked.
    """

    rule: ContractRule
    kept: bool | None
    told: str = ""


RULES = (
    ContractRule(
        "types",
        "the state keeps its shapes and types",
        "The state is a tree of arrays of fixed shapes and dtypes, which every hook returns.",
        "Give the arrays of init a dtype, and cast what a hook writes: new.astype(old.dtype).",
    ),
    ContractRule(
        "runs",
        "hooks can be traced and return what they must",
        "select returns (Selection, Summary or None, state) and the other hooks the state, and "
        "none branches on values.",
        "Branch on layers and shapes alone, and choose between values with jnp.where.",
    ),
    ContractRule(
        "owners",
        "every array of the state belongs to rows or to pages",
        "Every array of the state has an axis of spec.batch or one of spec.pages, not both.",
        "Give it an axis of spec.batch, or of spec.pages where it lies beside K; never compute the "
        "number of pages from the batch.",
    ),
    ContractRule(
        "selections",
        "selections list what heads hold, in order",
        "The first `count` ids are distinct, ascend and are of slots that hold a token, and the "
        "rest are 0.",
        "Make the list with threshold_select, from_page_mask or from_token_mask.",
    ),
    ContractRule(
        "finite",
        "results are finite",
        "What a policy computes is finite, also where a row or a page holds nothing.",
        "Mask with jnp.where before you divide or take a logarithm, and mask slots behind lengths.",
    ),
    ContractRule(
        "rows",
        "rows do not depend on each other",
        "Rows are treated apart: what becomes of one does not depend on the others.",
        "Reduce over heads, pages and tokens of one row, never over the axis of the batch.",
    ),
    ContractRule(
        "alone",
        "a row alone gives what it gives in a batch",
        "Nothing depends on how many rows the batch has.",
        "Take no budget, size or threshold from the batch's size.",
    ),
    ContractRule(
        "pieces",
        "a prompt gives the same however it is read",
        "The state after the prompt does not depend on how chunks cut it, nor on what lies behind "
        "`valid`.",
        "Take in the first view.valid tokens at their positions, and build what needs the whole "
        "prompt where view.last is true, from nothing.",
    ),
    ContractRule(
        "pool",
        "a shared pool of used pages gives the same",
        "In a shared pool pages lie anywhere and come back with what their last owner wrote.",
        "Find pages by the block table, as read_pages does, and let a page's first token replace "
        "what is there.",
    ),
    ContractRule(
        "inactive",
        "a row that sits out a step changes nothing",
        "A policy that writes page arrays skips inactive rows itself.",
        "Take in taking_part(view, tokens) tokens of each row, or build the state with sidecar.",
    ),
    ContractRule(
        "retrace",
        "nothing is traced again from step to step",
        "A decode step is compiled once, for all prompts of a size.",
        "Give the arrays of init a dtype, such as jnp.zeros(shape, jnp.float32), and decide no "
        "shape by what a step has seen.",
    ),
    ContractRule(
        "budget",
        "with a budget for all tokens it is dense",
        "With a budget of all tokens a method equals dense attention.",
        "Cap the budget at what is held, and list every page that holds a token, the newest too.",
    ),
)
NAMES = tuple(rule.name for rule in RULES)


class CheckResult(NamedTuple):
    """Holds what was found of each rule.

    `leaves_out` is whether the policy left out any token: a rule that dense attention keeps says
    little of one that did not. None is that it does not run, drops tokens or has dense rows.
    """

    findings: list[Finding]
    leaves_out: bool | None

    @property
    def broken(self) -> list[str]:
        """The names of the rules that are broken."""
        return [finding.rule.name for finding in self.findings if finding.kept is False]


class _Violation(Exception):
    """Says what was seen that a rule forbids."""


class _Skip(Exception):
    """Says why a rule was not checked."""


def check(
    policy: AnyPolicy,
    full: AnyPolicy | None = None,
    *,
    params: Params | None = None,
    rules: Sequence[str] = NAMES,
) -> CheckResult:
    """Checks that a policy keeps the rules of these names.

    Args:
        policy: the policy, with so small a budget that it leaves out some of 30 tokens.
        full: the same with a budget for all tokens; None is that it has no budget in tokens.
        params: the model; None is a random one of 2 layers.
        rules: the names of the rules to check, among NAMES.

    Raises:
        ValueError: the model lacks what the policy needs.
    """
    checks = _Checks(params or random_model(), policy, full)
    findings = [checks.finding(rule) for rule in RULES if rule.name in rules]
    return CheckResult(findings, checks.leaves_out)


class _Checks:
    """Holds the runs that several rules are about; each is made when the first asks for it."""

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
        look: Callable[[], None] = getattr(self, f"_{rule.name}")
        try:
            if rule.name not in ("types", "runs", "owners") and self._failure:
                raise _Skip("the policy does not run")
            look()
        except _Violation as broken:
            return Finding(rule, False, str(broken))
        except _Skip as reason:
            return Finding(rule, None, str(reason))
        except Exception as error:  # whatever the policy's code raises
            return Finding(rule, False, _told(error))
        return Finding(rule, True)

    @cached_property
    def _failure(self) -> Exception | None:
        """What keeps the policy from running, if anything does."""
        try:
            if isinstance(self._changes, Exception):
                return self._changes
            assert self._base
        except Exception as error:  # whatever the policy's code raises
            return error
        return None

    @cached_property
    def _owned(self) -> bool:
        try:
            owners(self.policy, self._spec)
        except Exception:  # whatever `init` raises
            return False
        return True

    @cached_property
    def _trial(self) -> Trial:
        return Trial(self._params, self.policy, owned=self._owned)

    @cached_property
    def _changes(self) -> str | Exception | None:
        """What a hook does to the state's types, or what else it raises when it is traced."""
        try:
            self._trace_watched()
        except _Violation as broken:
            return str(broken)
        except Exception as error:  # whatever the policy's code raises
            return error
        return None

    @cached_property
    def _base(self) -> TrialResult:
        """Two rows, read at once; notes how many programs its last steps traced."""
        every = max((n for n in self.policy.services.every.values() if n < STEPS), default=0)
        trial, first = self._trial, every + 1
        made = trial.run(self._prompts, self._forced[:, :first])
        before = traces()
        whole = trial.run(self._prompts, self._forced)
        self._traced = traces() - before
        assert len(made.logits) == first
        return whole

    @cached_property
    def _others(self) -> TrialResult:
        """The second row in the first's place, beside another one."""
        (other,) = random_prompts([LENGTHS[0] - 3], seed=3)
        before = traces()
        made = self._trial.run([self._prompts[1], other], self._forced[::-1])
        self._traced += traces() - before
        return made

    def _types(self) -> None:
        if isinstance(self._changes, Exception):
            raise _Skip("the policy does not run")
        if self._changes:
            raise _Violation(self._changes)

    def _trace_watched(self) -> None:
        """Traces a prompt of two chunks, a step and the services, and look at each hook's types."""
        watched = Trial(self._params, _watched(self.policy), owned=False)

        def run() -> Any:
            carry = watched.begin(self._spec)
            carry = watched.read(carry, [ids[:PAGE] for ids in self._prompts], PAGE // 2)
            # what evicts after the prompt runs outside of jit: the step takes the cache as it is
            _, _, held = watched.step(TrialRows(carry.cache, carry.state), self._forced[:, 0])
            view = StepView(held.cache, watched.beside.constants)
            return watched.policy.services.maintain(held.state, view)

        jax.eval_shape(run)

    def _runs(self) -> None:
        if isinstance(self._changes, str):
            raise _Skip("the state changes its types")
        if self._failure:
            raise self._failure

    def _owners(self) -> None:
        try:
            owners(self.policy, self._spec)
        except ValueError as error:
            raise _Violation(str(error).partition(": ")[2]) from None

    def _selections(self) -> None:
        if not self._base.chosen:
            raise _Skip("short rows are dense under this policy")
        for nth, (selection, lengths) in enumerate(self._base.chosen):
            self._look_at(nth, selection, np.asarray(lengths))

    def _look_at(self, nth: int, selection: Any, lengths: np.ndarray) -> None:
        ids, count = np.asarray(selection.ids), np.asarray(selection.count)
        unit = PAGE if selection.granularity == "page" else 1
        layers = self._params.config.num_layers
        where = f"in step {nth // layers + 1}, layer {nth % layers}"
        if count.shape != lengths.shape or (count < 0).any() or (count > ids.shape[-1]).any():
            raise _Violation(f"count is {count.tolist()} for ids{list(ids.shape)} {where}")
        for at in np.ndindex(count.shape):
            listed, used = ids[at][: count[at]], -(-int(lengths[at]) // unit)
            rising = (np.diff(listed) > 0).all()
            if not rising or not ((listed >= 0) & (listed < used)).all():
                raise _Violation(
                    f"row {at[0]}, head {at[1]} lists {listed.tolist()} of {used} "
                    f"{selection.granularity}s {where}"
                )
            if ids[at][count[at] :].any():
                raise _Violation(
                    f"ids behind count are {ids[at].tolist()}, {count[at]} valid {where}"
                )

    def _finite(self) -> None:
        bad = ~np.isfinite(self._base.logits).all(axis=-1)
        if bad.any():
            step, row = np.argwhere(bad)[0]
            raise _Violation(f"logits of row {row} are not finite in step {step + 1}")

    def _rows(self) -> None:
        self._same("beside another row", self._others.logits[:, 0], self._base.logits[:, 1])

    def _alone(self) -> None:
        made = self._trial.run(self._prompts[1:], self._forced[1:])
        self._same("alone", made.logits[:, 0], self._base.logits[:, 1])

    def _pieces(self) -> None:
        made = self._trial.run(self._prompts, self._forced, PIECE)
        self._same(f"read {PIECE} tokens at a time", made.logits, self._base.logits)

    def _pool(self) -> None:
        if not self._owned:
            raise _Skip("the state's arrays have no owners")
        made = self._trial.run_in_a_used_pool(self._prompts, self._forced)
        self._same("in a shared pool", made.logits, self._base.logits)

    def _inactive(self) -> None:
        if not self._owned:
            raise _Skip("the state's arrays have no owners")
        held, tokens = self._base.held, self._forced[:, 0]
        logits, _, after = self._trial.step(held, tokens, [True, False])
        together, *_ = self._trial.step(held, tokens)
        for (name, was), (_, now) in zip(
            self._of_row(held, 1), self._of_row(after, 1), strict=True
        ):
            if not np.array_equal(was, now, equal_nan=True):
                raise _Violation(f"{name} of the inactive row changed")
        self._same("beside an inactive row", logits[:1], together[:1])

    def _of_row(self, held: TrialRows, row: int) -> list[tuple[str, np.ndarray]]:
        """Names and returns the arrays of a row, with its pages if each row has its own."""
        cache, state = held
        spec = spec_of(cache, self._params.config.num_heads)

        def part(array: Any, axis: int) -> np.ndarray:
            array = np.asarray(array)
            own = array.shape[axis] // spec.batch
            return np.take(array, range(row * own, (row + 1) * own), axis=axis)

        found = []
        leaves = jax.tree_util.tree_leaves_with_path(state)
        for (path, leaf), owner in zip(leaves, owners(self.policy, spec), strict=True):
            found.append((f"state{jax.tree_util.keystr(path)}", part(leaf, owner.axis)))
        for nth, layer in enumerate(cache.layers):
            pools = {"k": layer.k, "v": layer.v, "lengths": layer.lengths}
            found += [(f"layers[{nth}].{name}", part(pool, 0)) for name, pool in pools.items()]
        return found

    def _retrace(self) -> None:
        state = jax.eval_shape(lambda: self.policy.init(self._spec))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            if getattr(leaf, "weak_type", False):
                name = jax.tree_util.keystr(path)
                raise _Violation(f"init gives state{name} no dtype of its own, which hooks then do")
        assert self._others
        if self._traced:
            raise _Violation(
                f"{self._traced} more programs for steps and prompts of the same sizes"
            )

    def _budget(self) -> None:
        if self._full is None:
            raise _Skip("it takes no budget in tokens")
        if self.policy.evicts:
            raise _Skip("it drops tokens, which more than a budget may decide")
        made = Trial(self._params, self._full, owned=self._owned).run(self._prompts, self._forced)
        exact = Trial(self._params, dense()).run(self._prompts, self._forced)
        self._same("with a budget for all", made.logits, exact.logits, "dense attention")

    def _same(self, how: str, made: Any, known: Any, than: str = "before") -> None:
        made, known = np.asarray(made, np.float64), np.asarray(known, np.float64)
        off = np.abs(made - known).max() / np.abs(known).max()
        if not off <= CLOSE:
            raise _Violation(f"logits {how} differ from {than} by {off:.1g} of the largest")

    @property
    def leaves_out(self) -> bool | None:
        """Whether some step left out a token that is held; None where nothing tells."""
        made: TrialResult | None = self.__dict__.get("_base")
        if made is None or not made.chosen or self.policy.evicts:
            return None
        return any(map(_leaves_out, made.chosen))


def _leaves_out(chosen: LayerSelection) -> bool:
    """Returns whether some head attends to less than it holds."""
    selection, lengths = chosen
    unit = PAGE if selection.granularity == "page" else 1
    part = np.asarray(selection.count) * unit < np.asarray(lengths)
    part |= selection.bits is not None
    return bool((part if selection.dense is None else part & ~np.asarray(selection.dense)).any())


def _on_device(policy: Policy) -> Policy:
    return policy if policy.offload is None else policy._replace(offload=None)


def _watched(policy: Policy) -> Policy:
    """Returns the policy with hooks that raise _Broken where one changes the state's types."""

    def watch(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(state: Any, *args: Any) -> Any:
            made = hook(state, *args)
            part = made
            if name in ("select", "maintain") and isinstance(made, tuple):
                part = made[2 if name == "select" else 0] if len(made) > 1 else made
            was, now = _types_of(state), _types_of(part)
            if was != now:
                raise _Violation(f"{name} turns {_difference(was, now)}")
            return made

        return watched

    hooks = {
        name: watch(name, getattr(policy, name))
        for name in ("prefill", "append", "select", "update")
    }
    services = policy.services._replace(maintain=watch("maintain", policy.services.maintain))
    return policy._replace(**hooks, services=services)


def _types_of(state: Any) -> dict[str, str]:
    """Returns shape and dtype of each array, or the type of what is none, by its place."""
    return {
        f"state{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape)}"
        if hasattr(leaf, "dtype")
        else type(leaf).__name__
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _difference(was: dict[str, str], now: dict[str, str]) -> str:
    """Names the first array that is not what it was."""
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            return f"{name} from {was.get(name, 'nothing')} into {now.get(name, 'nothing')}"
    return ""


def _told(error: Exception) -> str:
    """Tells an error in one line, with the place in the policy's own code that it comes from."""
    ours = str(Path(jsparse.__file__).parent), sysconfig.get_path("stdlib"), "<"
    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text[:300]}{'…' if len(text) > 300 else ''}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(ours) and "site-packages" not in frame.filename:
            return f"{reason} ({frame.filename}:{frame.lineno})"
    return reason
