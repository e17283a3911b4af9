"""What ``config.json`` would say of a model, from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pi2.importing.gguf_architecture import Architecture
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.gguf_tokenizer import find_marks
from pi2.regular_file import show_path


def make_config(
    metadata: Metadata, architecture: Architecture, *, vocab: int, tied: bool, sparse: bool
) -> dict[str, Any]:
    """The configuration.  ``vocab``: rows of the embedding table; ``tied``: there is no head;
    ``sparse``: the file has predictors, so that its model computes ReLU."""
    read, count = metadata.read, metadata.read_count
    layers = count("{arch}.block_count")
    later = read("{arch}.nextn_predict_layers", int, 0)
    if 0 < later < layers:
        layers -= later  # they draft, and are no part of the model
    else:
        later = 0
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "_name_or_path": read("general.name", str, show_path(Path(metadata.file.stem))),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": later,
        "hidden_size": count("{arch}.embedding_length"),
        "num_attention_heads": count("{arch}.attention.head_count"),
        "vocab_size": vocab,
        "max_position_embeddings": count("{arch}.context_length"),
        "tie_word_embeddings": tied,
        **_read_tokens(metadata, vocab),
    }
    activation = "relu" if sparse else architecture.activation
    # A setting of the family says what its files do not.
    return config | architecture.read(metadata, config, activation) | architecture.settings


def _read_tokens(metadata: Metadata, vocab: int) -> dict[str, Any]:
    marks = find_marks(metadata.file, metadata.values, vocab)
    begin = {} if marks.begin is None else {"bos_token_id": marks.begin}
    return {"eos_token_id": list(marks.ends), **begin}
