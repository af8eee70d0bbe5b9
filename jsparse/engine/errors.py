"""Defines what an engine raises: EngineError and EngineFull."""


class EngineError(RuntimeError):
    """Says that the engine has failed, and that whatever it was working on is lost."""


class EngineFull(RuntimeError):
    """Says that too many requests wait; the engine goes on."""
