"""Holds a layer's K and V in host memory, as kernels see them there.

`pool` stands for a layer's K or V in the cache; `tails` has the part of it on the device, and
`pages` the part in host memory. `jsparse.runtime` moves K and V there (`host_store`) and attends to
them (`host_attention`).
"""
