"""Creates the spec of an engine, and the rules of its scheduler."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from jsparse.cache import CacheSpec
from jsparse.engine import sizing
from jsparse.engine.host_rows import memory_kind
from jsparse.engine.options import EngineOptions
from jsparse.engine.row_memory import DeviceRows
from jsparse.engine.sizes import EngineSizes, Rules
from jsparse.models.checkpoint import Params
from jsparse.models.transformer import Decoder
from jsparse.policy import AnyPolicy, Policy, is_dense
from jsparse.runtime.admission import Deployment, admit
from jsparse.runtime.draft_length import most_drafts

# The default steps per program on a GPU, if they are short.
STEPS_GPU = 32


@dataclass(frozen=True)
class EngineSpec:
    """The engine that programs are compiled for.

    Attributes:
        deployment: the model, with the shapes of its weights in place of them, the policy that
            decodes, and the sizes of the rows and of the pool of pages that they share.
        sizes: the static sizes of programs and plans.
        knobs: the names of the hyper-parameters that requests may set.
        layer_stats: whether results hold the shares of each layer.
    """

    deployment: Deployment
    sizes: EngineSizes
    knobs: tuple[str, ...]
    layer_stats: bool

    def made_from(self) -> tuple[Any, ...]:
        """Returns everything that programs depend on besides their arguments."""
        others = self.policy, self.cache, self.sizes, self.knobs, self.layer_stats
        return self.decoder, *others

    @property
    def policy(self) -> Policy:
        """The policy that decodes."""
        return self.deployment.policy

    @property
    def cache(self) -> CacheSpec:
        """The sizes of the rows and of the pool of pages that they share."""
        return self.deployment.spec

    @property
    def decoder(self) -> Decoder:
        """The model without its weights."""
        return self.deployment.params.decoder

    @cached_property
    def memory(self) -> DeviceRows:
        """The memory of K, V and the policy's state: on the device, or partly in host memory."""
        return memory_kind(self.policy)(self.policy, self.cache, self.decoding)

    @property
    def decoding(self) -> CacheSpec:
        """The sizes of decoding rows; if the policy evicts, they differ from those in prefill."""
        pages = self.sizes.evicted_pages or self.cache.num_pages
        return self.cache._replace(num_pages=pages)


def engine_spec(params: Params, policy: AnyPolicy, options: EngineOptions) -> EngineSpec:
    """Returns the spec of an engine.

    Raises:
        ValueError: an option is out of its range, the policy cannot be served, or memory does not
            suffice.
    """
    memory = memory_kind(policy)
    rows = sizing.cache_spec(params, options, memory.MOST_ROWS)
    if options.batch_invariant:
        options = options.only(
            "batch_invariant is true",
            steps_per_program=1,
            decode_rows=[rows.batch],
            prefill_rows=[1],
            cascade_attention=False,
        )
    steps = options.steps_per_program
    if steps is None and sizing.on_gpu() and not memory.SINGLE_STEPS:
        steps = STEPS_GPU
    admitted = admit(
        params,
        policy,
        rows,
        rows_join=True,
        per_request=options.per_request,
        steps_per_program=steps,
        allocates=False,
        drafts=options.drafts,
    )
    if params.mesh is not None:
        options = options.only("the model is spread over several devices", kv_offloading_size=0)
    if admitted.drafts:
        options = options.only("exact is true", cascade_attention=False)
    options = options.only("K and V are in host memory", **memory.EXCLUDES)
    sizes = sizing.sizes_of(admitted.policy, params.config, rows, options, steps=admitted.max_steps)
    if admitted.drafts:
        most = partial(most_drafts, on_gpu=sizing.on_gpu())
        drafts = [most(rows) if options.drafts is None else options.drafts for rows in sizes.rows]
        sizes = sizes._replace(drafts=tuple(drafts), adapts=admitted.adapts)
    pool = rows._replace(pool_pages=sizes.num_groups * rows.num_kv_heads)
    return EngineSpec(
        admitted._replace(spec=pool, params=params.without_weights()),
        sizes=sizes,
        knobs=tuple(sorted(set(options.per_request))),
        layer_stats=bool(options.layer_stats),
    )


def rules(spec: EngineSpec, *, share: bool) -> Rules:
    """Returns the rules of the scheduler; if `share`, requests share prefixes."""
    policy, sizes = spec.policy, spec.sizes
    return Rules(
        root=policy.name if share and policy.shares is not None else None,
        window=policy.window,
        replays=policy.shares == "keys",
        periods=tuple(policy.services.every.values()),
        # verified tokens are dense attention's own; else decode programs sum in a different order
        # than prefill programs, and the newest tokens are still in the tail
        shares_generated=share
        and policy.prefill_method is None
        and (
            bool(sizes.drafts)
            or (
                is_dense(policy, spec.cache) and not sizes.batch_invariant and not sizes.tail_tokens
            )
        ),
        slots=sizing.bound(policy),
    )


def require_exact(policy: Policy, spec: CacheSpec, sizes: EngineSizes, exact: bool | None) -> None:
    """Raises ValueError if an engine cannot serve a request with this `exact`."""
    started = bool(sizes.drafts)
    if exact not in (None, started) and not is_dense(policy, spec):
        raise ValueError(
            f"exact={exact}: must be {started} or None: the engine was started with exact={started}"
        )
