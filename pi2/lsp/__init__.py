"""The language server: what editors ask about documents while they are written.

`pi2.lsp.server` speaks the protocol; the other modules are plain functions over a text, and know
nothing of it.
"""
