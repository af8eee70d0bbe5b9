"""Serves several engines at one address, each in its own process."""
