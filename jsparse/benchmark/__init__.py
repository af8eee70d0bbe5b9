"""Measures the engine as its users see it: tokens per second, and how long they wait for them."""
