"""The common parts of methods that evict tokens; `engine` has the hooks."""
