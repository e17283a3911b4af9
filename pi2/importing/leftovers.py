"""Tensors of a checkpoint that its own configuration denies: a model without them would run, and
talk nonsense."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from pi2.diagnostics import Diagnostic
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.rows import fill_name
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.model import Model

_COMPARED_ROWS = 64
"""Rows by which a head is known to be the embedding: trained ones differ in every row."""


def find_leftovers(checkpoint: Checkpoint, model: Model, says: str) -> Iterator[Diagnostic]:
    """A P537 for what ``model``, made from the configuration, leaves out of the tensors.

    ``says`` names the configuration.  Raises `UserError` P532 or P535 as `SourceTensor.read`.
    """
    tensor = _find_later_layer(checkpoint, model)
    if tensor is not None:
        yield _deny(tensor, f"{says} that the model has {model.shape.layers} layers")
    denied = list(_list_denied(checkpoint, model))
    if denied:
        # One key of a configuration often denies several.
        absent = ", ".join(key.replace("_", " ") for key, _ in denied)
        yield _deny(denied[0][1], f"{says} that there is no {absent}")
    head = checkpoint.tensors.get(model.tensors.head)
    if model.tied_head and head is not None and not _is_embedding(checkpoint, model, head):
        yield _deny(head, f"{says} that the head is the embedding, which has other weights")


_OTHER_PARTS = {
    "read pictures": re.compile(
        r"(^|\.)(visual|vision_\w+|high_res_vision_\w+|embed_vision|(image|video)_tower"
        r"|image_newline|multi_modal_projector|mm_\w+|connector|aligner)(\.|$)"
    ),
    "draw pictures": re.compile(r"(^|\.)(generation_\w+|vqmodel)\."),
    "read sound": re.compile(r"(^|\.)(audio_\w+|embed_audio|(acoustic|semantic)_tokenizer\w*)\."),
    "read pictures or sound": re.compile(r"^(model\.)?(encoder|projector)\."),
    "choose keys in long contexts": re.compile(r"\.self_attn\.index(er\.|_)"),
    "draft tokens": re.compile(r"(^|\.)mtp\."),
}
"""Parts of checkpoints that no model document states, by what they do."""


def describe_other_parts(checkpoint: Checkpoint) -> list[str]:
    """What of a checkpoint is left out because a model document has no word for it, a line each."""
    found = []
    for does, pattern in _OTHER_PARTS.items():
        count = sum(pattern.search(name) is not None for name in checkpoint.tensors)
        if count:
            found.append(f"left out: {count} tensor{'s' if count > 1 else ''} to {does}")
    drafting, layers = _count_drafting(checkpoint), checkpoint.config.get("num_hidden_layers")
    if drafting and type(layers) is int:
        later = re.compile(r"\.layers\.(\d{1,9})\.")
        numbers = (later.search(name) for name in checkpoint.tensors)
        count = sum(match is not None and int(match[1]) >= layers for match in numbers)
        if count:
            found.append(
                f"left out: {count} tensor{'s' if count > 1 else ''} of layers to draft tokens"
            )
    return found


def _count_drafting(checkpoint: Checkpoint) -> int:
    """Layers after the model's own that predict further tokens, as DeepSeek V3 has them."""
    stated = checkpoint.config.get("num_nextn_predict_layers")
    return stated if type(stated) is int and 0 < stated <= 16 else 0


def _list_denied(checkpoint: Checkpoint, model: Model) -> Iterator[tuple[str, SourceTensor]]:
    """Keys and first tensors of what the model has no use for, and the checkpoint has."""
    for key in _list_absent(model):
        pattern = getattr(model.tensors, key)
        found = None if pattern is None else checkpoint.tensors.get(fill_name(pattern, 0))
        if found is not None:
            yield key, found


def _deny(tensor: SourceTensor, statement: str) -> Diagnostic:
    return Diagnostic(
        code="P537",
        message=f"{statement}, but {tensor.file} has the tensor {tensor.name!r}",
        help="correct the configuration, or write the model document by hand and give --model",
    )


def _find_later_layer(checkpoint: Checkpoint, model: Model) -> SourceTensor | None:
    """A tensor of a layer that the model does not have."""
    before, found, after = model.tensors.attention_norm.partition("{layer}")
    if not found:
        return None
    name = re.compile(re.escape(before) + "([0-9]{1,9})" + re.escape(after))
    first_unknown = model.shape.layers + _count_drafting(checkpoint)
    matches = (name.fullmatch(candidate) for candidate in sorted(checkpoint.tensors))
    later = (match[0] for match in matches if match and int(match[1]) >= first_unknown)
    return next((checkpoint.tensors[name] for name in later), None)


def _list_absent(model: Model) -> Iterator[str]:
    """Keys of ``model.tensors`` that the model has no use for."""
    if not model.attention.qkv_bias:
        yield from ("query_bias", "key_bias", "value_bias", "fused_qkv_bias")
    if not model.attention.output_bias:
        yield "output_bias"
    if not model.attention.head_norm:
        yield from ("query_norm", "key_norm")
    if not model.attention.sub_norm:
        yield "attention_sub_norm"
    if not model.ffn.sub_norm:
        yield "ffn_sub_norm"
    if not model.norm.outputs:
        yield "ffn_output_norm"
    if not model.head_bias:
        yield "head_bias"
    if model.layer_embedding is None:
        yield from ("layer_embedding", "layer_projection", "layer_input_gate")
    if model.altup is None:
        yield from ("stream_in", "altup_router", "laurel_in")
    if model.moe is not None and not model.moe.shared_experts:
        yield "shared_up"
    if not model.ffn.bias:
        yield from ("gate_bias", "up_bias", "down_bias")
    if not model.norm.weights:
        yield from ("attention_norm", "ffn_norm", "final_norm")
    if not model.norm.bias:
        yield from ("attention_norm_bias", "ffn_norm_bias", "final_norm_bias")


def _is_embedding(checkpoint: Checkpoint, model: Model, head: SourceTensor) -> bool:
    """Whether a tied head that is there too repeats the embedding, as some files have it."""
    embedding = checkpoint.tensors[model.tensors.embedding]
    if embedding.shape != head.shape:
        return False
    rows = min(_COMPARED_ROWS, head.shape[0])
    return np.array_equal(embedding.read(0, rows), head.read(0, rows))
