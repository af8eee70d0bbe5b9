"""The kernels: one folder an op. `api` validates and dispatches, `reference` is the plain-jnp
oracle.
"""
