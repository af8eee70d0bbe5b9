"""What becomes of a run's result: statistics, tables, plots."""
