"""Joins a method of sparse prefill to a policy, which decodes over the K and V that it gives."""

import functools
from collections.abc import Callable

from jsparse.builder import builder, require_policy
from jsparse.cache import CacheSpec
from jsparse.policies import expressions
from jsparse.policies.prefill_methods import as_method, is_registered
from jsparse.policy import AnyPolicy, Policy, PrefillMethod, StandIn


@builder
def sparse_prefill(policy: Policy, method: str = "xattention(threshold=0.9)") -> Policy:
    """Prefills prompts by a method, and decodes by `policy`.

    `prefill=` joins a method to `policy=` in the same way. Layers with a sliding window attend to
    it densely; so do corrections, and `kvzip`'s second pass over the prompt.

    Args:
        policy: the policy that decodes.
        method: "auto", "xattention(threshold, stride)", "streaming(sink, recent)" or
            "vertical_slash(sink, recent, vertical, slash)"; "dense" for none.
    """
    require_policy("policy", policy)
    return _with(policy, as_method(method))


def with_prefill(policy: AnyPolicy | str, prefill: PrefillMethod | str = "dense") -> AnyPolicy:
    """Returns a policy, or that of an expression, whose prompts a method prefills.

    Raises:
        ValueError: one of the two is refused, or the policy has another method already.
    """
    policy, method = expressions.as_policy(policy), as_method(prefill)
    return policy if method is None else _joined(policy, method)


@functools.cache
def _joined(policy: AnyPolicy, method: PrefillMethod) -> AnyPolicy:
    """Returns one policy for equal arguments, so that nothing is traced twice."""
    registered = is_registered(method)
    if isinstance(policy, StandIn):
        resolve = functools.partial(functools.partial, _resolved, method)
        joined = StandIn(resolve(policy.for_spec), policy.to_draft and resolve(policy.to_draft))
    elif registered and not expressions.is_own(policy.name):
        return sparse_prefill(policy, method.name)
    else:
        joined = _with(policy, method)
    name = f"sparse_prefill({policy}, {str(method)!r})"
    # another method may have the name of a user's own
    return expressions.remember(name, joined) if registered else joined._replace(name=name)


def _resolved(
    method: PrefillMethod, of_base: Callable[[CacheSpec], Policy], spec: CacheSpec
) -> Policy:
    joined = _joined(of_base(spec), method)
    assert isinstance(joined, Policy)
    return joined


def _with(policy: Policy, method: PrefillMethod | None) -> Policy:
    if policy.prefill_method is not None and method is not None:
        raise ValueError(f"policy={policy}: must have no prefill method yet, besides {method}")
    return policy._replace(prefill_method=method or policy.prefill_method)
