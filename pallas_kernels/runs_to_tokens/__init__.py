"""Lists the slots of runs of tokens: see `api.runs_to_tokens`."""

from jsparse.pallas_kernels.runs_to_tokens.api import runs_to_tokens

__all__ = ["runs_to_tokens"]
