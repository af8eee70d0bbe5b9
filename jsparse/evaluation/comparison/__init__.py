"""Compares policies on a text at equal bytes read per decode step, with a table and a plot."""
