"""Reads ``tokenizer.json`` in plain Python: the `tokenizers` library has no build for Android.

What a file may use is listed in `tokenizer`; for anything else `Unsupported` is raised, and nothing
is guessed.  Tests compare the results with the library's, token by token.
"""
