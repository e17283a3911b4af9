"""What a GGUF file's metadata say of texts, as the folder that tokenizers are read from."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi2.weights.gguf_weights import GgufWeights


class FileTexts:
    """What a file's metadata say of texts, as a folder that the model's tokenizer is read from."""

    def __init__(self, weights: GgufWeights, cleanup: ExitStack) -> None:
        self.identity = repr(weights.identity).encode()
        """Bytes that differ where another file has taken this one's place."""
        self.path = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pi2-")))
        checkpoint = weights.checkpoint
        contents = {
            "tokenizer.json": checkpoint.read_tokenizer(),
            "tokenizer_config.json": checkpoint.read_file("tokenizer_config.json"),
            "chat_template.jinja": checkpoint.read_file("chat_template.jinja"),
        }
        for name, content in contents.items():
            if content is not None:
                (self.path / name).write_bytes(content)
