"""A model that answers one prompt with one text, token by token: its positions point at tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from pi2.arrays import F32
from pi2.cli.store import convert_command as command
from tests.helpers.answers import END, Kind, make_tokenizer
from tests.helpers.checkpoints import write_safetensors

_HIDDEN, _FFN, _POSITIONS = 128, 64, 512
_BEFORE = 2
"""Positions that OPT has before the first token's."""


def make_scripted_plan(
    folder: Path, template: str, prompt: str, answer: str, marks: Sequence[str] = (),
    kind: Kind = "special",
) -> Path:  # fmt: skip
    """The plan of an OPT whose attention and FFN give zero, so that each position names the token
    that follows: those of ``answer`` after ``prompt``; ``marks`` are tokens of a kind."""
    source = folder / "checkpoint"
    source.mkdir(parents=True)
    tokenizer = make_tokenizer(marks, kind)
    tokenizer.save(str(source / "tokenizer.json"))
    end, vocab = tokenizer.token_to_id(END), tokenizer.get_vocab_size()
    assert end is not None
    asked = tokenizer.encode(prompt, add_special_tokens=False).ids
    said = [*tokenizer.encode(answer, add_special_tokens=False).ids, end]
    table = np.random.default_rng(0).standard_normal((vocab, _HIDDEN)).astype(np.float32)
    table -= table.mean(axis=1, keepdims=True)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    places = np.zeros((_POSITIONS + _BEFORE, _HIDDEN), np.float32)
    start = _BEFORE + len(asked) - 1
    places[start : start + len(said)] = 50 * table[said]
    write_safetensors(source / "model.safetensors", _list_tensors(table, places))
    config = {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": _HIDDEN,
        "word_embed_proj_dim": _HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4,
        "ffn_dim": _FFN, "vocab_size": vocab, "max_position_embeddings": _POSITIONS,
        "activation_function": "relu", "do_layer_norm_before": True, "tie_word_embeddings": True,
        "eos_token_id": end, "bos_token_id": end, "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (source / "chat_template.jinja").write_text(template)
    store = folder / "store"
    options = [str(source), "-o", str(store), "--quantization", "fp16"]
    found = CliRunner().invoke(command, options)
    assert found.exit_code == 0, found.output
    return store / "default.plan.toml"


def _list_tensors(table: F32, places: F32) -> dict[str, F32]:
    start, layer = "model.decoder.", "model.decoder.layers.0."
    found = {start + "embed_tokens.weight": table, start + "embed_positions.weight": places}
    zeros = {
        **{f"self_attn.{name}_proj": (_HIDDEN, _HIDDEN) for name in ("q", "k", "v", "out")},
        "fc1": (_FFN, _HIDDEN),
        "fc2": (_HIDDEN, _FFN),
    }
    for name, (rows, columns) in zeros.items():
        found[f"{layer}{name}.weight"] = np.zeros((rows, columns), np.float32)
        found[f"{layer}{name}.bias"] = np.zeros(rows, np.float32)
    norms = (layer + "self_attn_layer_norm", layer + "final_layer_norm", start + "final_layer_norm")
    for norm in norms:
        found[norm + ".weight"] = np.ones(_HIDDEN, np.float32)
        found[norm + ".bias"] = np.zeros(_HIDDEN, np.float32)
    return found
