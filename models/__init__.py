"""The decoder, its configurations, and loading of weights and tokenizers."""
