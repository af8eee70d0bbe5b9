"""Turns the result of a run into statistics, tables and plots."""
