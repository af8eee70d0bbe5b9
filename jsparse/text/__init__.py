"""Turns text into token ids and back.

`prompts` checks prompts, renders chats and encodes both. `stream` turns ids into pieces of text as
they arrive, cut at stop strings. Both may use models, and know neither policies nor caches.
"""
