"""Keeps a layer's K and V in host memory, where kernels can read them.

`pool` represents a layer's K or V in the cache; `tails` handles the part on the device, and `pages`
the part in host memory. `jsparse.runtime` copies K and V (`host_store`) and attends to them
(`host_attention`).
"""
