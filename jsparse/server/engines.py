"""Loads the engine that a server runs, and describes it."""

from typing import Any

from jsparse.engine.async_engine import AsyncEngine
from jsparse.policies.own_code import resolve
from jsparse.policy import is_dense
from jsparse.server import log
from jsparse.text.short_names import short_name


def load_engine(model: str, policy: str, **options: Any) -> AsyncEngine:
    """Returns an engine for a model and a policy, named as on the command line."""
    log.logger.info("loading %s", model)
    return AsyncEngine(model, resolve(policy), **options)


def describe(engine: AsyncEngine) -> tuple[str, str]:
    """Returns the name of an engine's policy, and a sentence about its sparsity."""
    policy, settable = engine.engine.policy, engine.engine.per_request
    knobs = f"; requests may set {', '.join(settable)}" if settable else ""
    drafts = max(engine.engine.sizes.drafts, default=0)
    everything, method = "all tokens", policy.prefill_method
    read = everything if method is None else f"the blocks that {method} chooses"
    dense = is_dense(policy, engine.engine.spec)
    if dense and method is None:
        sentence = f"Nothing is sparse: every step attends to all tokens{knobs}."
    elif drafts:
        sentence = f"The policy drafts up to {drafts} tokens, dense attention verifies them{knobs}."
    else:
        chosen = everything if dense else "the policy's selection"
        sentence = f"Decoding attends to {chosen}, prefill to {read}{knobs}."
    return short_name(policy), sentence
