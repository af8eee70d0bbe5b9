"""Serves many requests at once: they join and leave one running batch, under any policy."""
