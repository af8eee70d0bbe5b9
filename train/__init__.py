"""Trains gates that separate retrieval heads from the others (LycheeDecode, DuoAttention)."""
