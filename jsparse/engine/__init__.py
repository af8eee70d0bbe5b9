"""Serves many requests with continuous batching, under any policy."""
