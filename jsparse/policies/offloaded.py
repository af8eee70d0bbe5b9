"""Keeps K and V in host memory, and the newest tokens on the device.

For contexts past the device's memory. What the policy selects crosses the bus at every step, so
that decoding is slower than dense attention wherever K and V fit on the device. The setting is that
of LFPS (Yao and Wang, arXiv:2506.15704), whose tables choose without reading K; here the GPU reads
host memory itself, and any policy whose index is small beside K and V works.
"""

from typing import Literal, get_args

from jsparse.builder import builder, require_offloadable, require_policy
from jsparse.hyper_parameters import one_of, whole_number
from jsparse.policy import Offload, Policy

Reads = Literal["in_place", "gather"]


@builder
def offloaded(policy: Policy, tail: int = 4096, reads: Reads | None = None) -> Policy:
    """Attends to what `policy` selects, with K and V in host memory.

    Each prompt chunk leaves the device once it has been read. KV heads that attend to everything
    in every step, as `retrieval_heads` and `dense_layers` make them, stay on the device, and so
    does the policy's own state.

    Args:
        policy: what is attended to. It must choose without reading all of K.
        tail: the number of newest tokens that stay on the device, at the least.
        reads: "in_place" lets attention read host memory, "gather" fetches what is selected to the
            device first. None reads tokens in place and fetches pages.
    """
    require_policy("policy", policy)
    whole_number("tail", tail, 1)
    one_of("reads", reads, (None, *get_args(Reads)))
    if policy.offload is not None:
        raise ValueError(f"policy={policy}: must not be offloaded already")
    require_offloadable("policy", policy)
    return policy._replace(offload=Offload(tail, reads))
