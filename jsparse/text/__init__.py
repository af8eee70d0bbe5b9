"""Converts text to token ids and back, and shortens the names of policies.

`prompts` checks prompts, renders chats and encodes both. `stream` decodes ids into pieces of text
as they arrive, cut at stop strings. `short_names` shortens policies' names. The first two may use
models; none uses caches.
"""
