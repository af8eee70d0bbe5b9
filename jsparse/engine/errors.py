"""Defines the errors of an engine: EngineError and EngineFull."""


class EngineError(RuntimeError):
    """A failure of the engine, whose unfinished work is lost."""


class EngineFull(RuntimeError):
    """A refused request: too many requests are waiting; the engine continues."""
