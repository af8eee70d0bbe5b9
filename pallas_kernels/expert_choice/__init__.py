"""Chooses the experts of rows: see `api.expert_choice`."""

from jsparse.pallas_kernels.expert_choice.api import expert_choice

__all__ = ["expert_choice"]
