"""Serves several engines, one process each, behind one address."""
