"""Texts of tokens: compact tables of them, and how pairs are merged."""

import re

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
"""With ``CHAT_TEMPLATE``, how conversations become prompts; a store may have neither."""
NAMED_TEMPLATE = re.compile(r"chat_template\.([A-Za-z0-9_-]+)\.jinja")
"""Files of further templates, by their names."""
