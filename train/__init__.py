"""What trains methods: gates that tell retrieval heads from the others (LycheeDecode,
DuoAttention).
"""
