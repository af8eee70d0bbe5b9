"""Code shared by the scripts: cases, clocks, contenders, and the record of a run."""
