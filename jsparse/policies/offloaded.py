"""Keeps K and V in host memory, and the newest tokens on the device.

It is for contexts larger than the device's memory. The selected K and V cross the bus at every
step, so decoding is slower than dense attention if K and V fit on the device. The setting is that
of LFPS (Yao and Wang, arXiv:2506.15704), whose tables select without reading K; here the GPU reads
host memory directly, and any policy with an index much smaller than K works.
"""

from typing import Literal, get_args

from jsparse.builder import builder, require_offloadable, require_policy
from jsparse.hyper_parameters import one_of, whole_number
from jsparse.policy import Offload, Policy

Reads = Literal["in_place", "gather"]


@builder
def offloaded(policy: Policy, tail: int = 4096, reads: Reads | None = None) -> Policy:
    """Attends to the selection of `policy`, with K and V in host memory.

    Each prompt chunk is moved to the host after its prefill. KV heads that always attend to
    everything, such as those of `retrieval_heads` and `dense_layers`, stay on the device, as does
    the policy's own state.

    Args:
        policy: the policy that selects. It must select without reading all of K.
        tail: the minimum number of newest tokens that stay on the device.
        reads: "in_place" lets attention read host memory; "gather" fetches the selection to the
            device first; None: tokens in place, pages by gather.
    """
    require_policy("policy", policy)
    whole_number("tail", tail, 1)
    one_of("reads", reads, (None, *get_args(Reads)))
    if policy.offload is not None:
        raise ValueError(f"policy={policy}: must not be offloaded already")
    require_offloadable("policy", policy)
    return policy._replace(offload=Offload(tail, reads))
