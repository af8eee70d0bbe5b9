"""Holds what methods share that cluster the keys of chunks of text."""
