"""Runs models: prompts in, steps on the device, tokens out. It names no policy."""
