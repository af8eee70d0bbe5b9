"""Keeps K and V in host memory, and attends to them from there.

`pool` stands for a layer's K or V in the cache and may use kernels alone. `store` says to a session
where its K and V lie, there or on the device, and moves them; `attention` merges attention on both
sides. These two may use policies, and the runtime uses them.
"""
