"""The common parts of methods that rank chunks of text."""
