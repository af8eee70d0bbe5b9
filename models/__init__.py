"""Defines the decoder, its configurations, and how weights and tokenizers are loaded."""
