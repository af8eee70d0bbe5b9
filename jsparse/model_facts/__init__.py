"""Holds facts about a model beside its weights.

`key_constants` and `boundary_classes` say what these facts are; they are part of the vocabulary,
which kernels and policies use. `constants` makes the facts that a policy needs, once, and keeps
them; it may use models and the runtime. `channel_calibration` and `info` read a model for its user
and may use all but the engine, the evaluation and the floors above them.
"""
