"""Export of a training checkpoint in the layout of Hugging Face LLaMA checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.corpus import EOT, SEPARATOR, Corpus, separator_id
from demo.model import DemoConfig, DemoModel


def load_model(path: Path) -> tuple[DemoModel, dict[str, Any]]:
    """The model of a training checkpoint, and the checkpoint itself."""
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    model = DemoModel(DemoConfig())
    model.load_state_dict(saved["model"])
    return model, saved


def write_text(path: Path, text: str) -> None:
    """Write a text file and only then put it in its place."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file and only then put it in its place."""
    temporary = path.with_name(path.name + ".tmp")
    contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
    save_file(contiguous, temporary, metadata=metadata)
    temporary.chmod(0o644)
    os.replace(temporary, path)


def export(corpus: Corpus, checkpoint: Path, target: Path) -> None:
    """Write config, weights, tokenizer, and the held-out and calibration texts."""
    model, _ = load_model(checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    token = separator_id(corpus.tokenizer)
    config = model.cfg.hf_config(token, token)
    write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(target / "tokenizer.json", corpus.tokenizer.to_str(pretty=True))
    special = {"bos_token": EOT, "eos_token": EOT, "pad_token": EOT}
    length = model.cfg.max_position_embeddings
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, **special}
    write_text(target / "tokenizer_config.json", json.dumps(names, indent=2) + "\n")
    write_tensors(target / "model.safetensors", model.state_dict(), {"format": "pt"})
    write_text(target / "heldout.txt", join_documents(corpus.heldout_texts))
    write_text(target / "calibration.txt", join_documents(corpus.calibration_texts))


def join_documents(texts: list[str]) -> str:
    """Documents joined by a line that holds only the separator token."""
    return SEPARATOR.join(text.removesuffix("\n") for text in texts) + "\n"
