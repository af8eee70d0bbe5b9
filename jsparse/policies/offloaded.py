"""Keeps K and V in host memory, and the newest tokens on the device.

For contexts past the device's memory. What the policy selects crosses the bus at every step, so
that decoding is slower than dense attention wherever K and V fit on the device. The setting is that
of LFPS (Yao and Wang, arXiv:2506.15704), whose tables choose without reading K; here the GPU reads
host memory itself, and any policy whose index is small beside K and V will do.
"""

from typing import Literal, get_args

from jsparse.policy import Offload, Policy, builder, require_policy, whole_number

Reads = Literal["in_place", "gather"]


@builder
def offloaded(
    policy: Policy, tail: int = 4096, reads: Reads | None = None, prefetch: bool = False
) -> Policy:
    """Attend to what `policy` selects, with K and V in host memory.

    Each prompt chunk leaves the device once it has been read. KV heads that attend to everything
    in every step, as `retrieval_heads` and `dense_layers` make them, stay on the device, and so
    does the policy's own state.

    Args:
        policy: what is attended to. It must choose without reading all of K.
        tail: the number of newest tokens that stay on the device, at the least.
        reads: "in_place" lets attention read host memory, "gather" fetches what is selected to the
            device first. None reads tokens in place and fetches pages.
        prefetch: whether a layer's rows are fetched before the layer above attends, for a policy
            that knows them without a query.
    """
    require_policy("policy", policy)
    whole_number("tail", tail, 1)
    if reads not in (None, *get_args(Reads)):
        raise ValueError(f"reads={reads!r}: must be None or one of {list(get_args(Reads))}")
    if not isinstance(prefetch, bool):
        raise ValueError(f"prefetch={prefetch!r}: must be True or False")
    if prefetch and reads == "in_place":
        raise ValueError("reads='in_place': must be None or 'gather' where prefetch=True")
    if prefetch and not policy.foresees:
        raise ValueError(
            f"prefetch=True: {policy} must know what it selects without a query, as lfps does "
            "with exact=False and bypass=False"
        )
    if policy.offload is not None:
        raise ValueError(f"policy={policy}: must not be offloaded already")
    require_offloadable("policy", policy)
    return policy._replace(offload=Offload(tail, reads, prefetch), dense_at=None)


def require_offloadable(name: str, policy: Policy) -> None:
    """Raise ValueError if a policy cannot decode with K and V in host memory."""
    reasons = {
        "evicts tokens, which moves others": policy.evicts,
        "reworks the cache after the prompt": policy.after_prompt is not None,
        "reads K or V of all tokens": policy.needs_device,
        "computes K and V of tokens again": policy.correct_every > 0,
        "needs other fields of the cache": bool(policy.fields),
        "falls back to dense attention": policy.fallback is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"{name}={policy}: must decode without K and V on the device, but {reason}"
            )
