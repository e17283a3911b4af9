"""Processes of their own for what strangers have written: chat templates and tokenizers.

Both are programs, more or less: they can run for ever, ask for all memory, or end the process that
they are in.  Here they can do so to a process that has nothing to lose.
"""
