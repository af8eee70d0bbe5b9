"""Holds what methods that evict tokens share: `engine` compresses, the others measure and merge."""
