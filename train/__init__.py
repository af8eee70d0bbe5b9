"""Trains gates that tell retrieval heads from the others (LycheeDecode, DuoAttention)."""
