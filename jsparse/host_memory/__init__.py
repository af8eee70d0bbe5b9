"""Keeps K and V in host memory, and attends to them from there.

`pool` stands for a layer's K or V in the cache; `tails` has the part of it on the device, and
`pages` the part in host memory. These three may use kernels alone. `store` says to a session where
its K and V lie, and `host_store` moves them to host memory; `attention` merges attention on both
sides. These may use policies, and the runtime uses them.
"""
