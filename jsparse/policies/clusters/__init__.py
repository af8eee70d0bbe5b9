"""Holds the common parts of methods that cluster the keys of chunks of text."""
