"""What the scripts of bench share: cases, clocks, contenders, and the record of a run."""
