"""Lists the tokens that two tables of past attention predict: see `api.table_candidates`."""

from jsparse.pallas_kernels.table_candidates.api import table_candidates
from jsparse.pallas_kernels.table_candidates.rules import Best, Kurtosis

__all__ = ["Best", "Kurtosis", "table_candidates"]
