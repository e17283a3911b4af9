"""Processes for strangers' programs, chat templates and tokenizers, which may hang or exhaust
memory."""
