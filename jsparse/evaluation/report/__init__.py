"""Converts the result of a run to statistics, tables and plots."""
