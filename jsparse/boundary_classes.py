"""Defines the boundaries of a text behind its tokens, from the bytes of a vocabulary."""

STARTS_WITH_BLANK, IS_NEWLINES, ENDS_IN_NEWLINE = 1, 2, 4
