"""Adds a step's attention to two tables: see `api.table_update`."""

from jsparse.pallas_kernels.table_update.api import table_update

__all__ = ["table_update"]
