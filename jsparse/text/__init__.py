"""Turns text into token ids and back, and reads the names of policies.

`prompts` checks prompts, renders chats and encodes both. `stream` turns ids into pieces of text as
they arrive, cut at stop strings. `signatures` reads names and arguments of policies from their
source. The first two may use models; none knows caches, or imports a policy.
"""
