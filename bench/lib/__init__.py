"""Holds what the scripts share: cases, clocks, contenders, and the record of a run."""
