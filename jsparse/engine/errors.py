"""Defines the errors of an engine: EngineError and EngineFull."""


class EngineError(RuntimeError):
    """Says that the engine has failed and its unfinished work is lost."""


class EngineFull(RuntimeError):
    """Says that too many requests wait; the engine goes on."""
