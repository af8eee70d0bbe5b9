"""The models jsparse decodes: one decoder, its configurations, and how weights and tokenizers are
loaded.
"""
