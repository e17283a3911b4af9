"""Processes for strangers' programs (chat templates, tokenizers), which may hang."""
