"""Tensors of a checkpoint that its own configuration denies: a model without them would run, and
talk nonsense."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from pi2.diagnostics import Diagnostic
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.requirements import list_requirements
from pi2.importing.rows import fill_name
from pi2.plan.documents.model import Model

_NAMED = 8
"""Tensors that a message names."""
_COMPARED_ROWS = 64
"""Rows by which a head is known to be the embedding: trained ones differ in every row."""


def find_leftovers(checkpoint: Checkpoint, model: Model, says: str) -> Iterator[Diagnostic]:
    """P537 for what ``model``, made from the configuration, leaves out of the tensors.

    ``says`` names the configuration.  Raises `UserError` P532 or P535 as `SourceTensor.read`.
    """
    left = _list_unused(checkpoint, model)
    layers = model.shape.layers
    later = [name for name in left if _find_layer(name, model) >= layers]
    if later:
        norm = fill_name(model.tensors.attention_norm, layers)
        named = [norm] if norm in later else later
        yield _deny(checkpoint, named[:1], f"{says} that the model has {layers} layers")
    left = [name for name in left if _find_layer(name, model) < layers]
    if left:
        source = says.removesuffix(" says")
        yield _deny(checkpoint, left, f"no operator of the model that {source} describes reads it")
    head = model.tensors.head
    if model.tied_head and head in checkpoint.tensors and not _is_embedding(checkpoint, model):
        yield _deny(
            checkpoint, [head], f"{says} that the head is the embedding, which has other weights"
        )


_OTHER_PARTS = {
    "read pictures": re.compile(
        r"(^|\.)(visual|vision_\w+|high_res_vision_\w+|embed_vision|(image|video)_tower"
        r"|image_newline|multi_modal_projector|mm_\w+|connector|aligner)(\.|$)"
    ),
    "draw pictures": re.compile(r"(^|\.)(generation_\w+|vqmodel)\."),
    "read sound": re.compile(r"(^|\.)(audio_\w+|embed_audio|(acoustic|semantic)_tokenizer\w*)\."),
    "read pictures or sound": re.compile(r"^(model\.)?(encoder|projector)\."),
    "choose keys in long contexts": re.compile(r"\.self_attn\.index(er\.|_)"),
    "draft tokens": re.compile(r"(^|\.)(mtp|nextn)\."),
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


_HARMLESS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|position_ids|masked_bias|(attn|attention)\.bias"
    r"|[kvq]_scale|kv_scale|input_scale|input_global_scale|activation_scale"
    r"|num_batches_tracked)$"
)
"""Tensors that change nothing: what follows from the configuration, masks, and scales of numbers
that pi2 does not round."""


def _list_unused(checkpoint: Checkpoint, model: Model) -> list[str]:
    """Names of tensors that the model has no place for, and that are neither known to change
    nothing nor a part that is left out with a word."""
    used = {need.name for need in list_requirements(model)}
    used |= {model.tensors.head, *_list_unread(model)}
    patterns = [*_OTHER_PARTS.values(), _HARMLESS, *_match_predictors(model)]
    first, drafting = model.shape.layers, _count_drafting(checkpoint)
    return [
        name
        for name in sorted(checkpoint.tensors)
        if name not in used
        and not first <= _find_layer(name, model) < first + drafting
        and not any(pattern.search(name) for pattern in patterns)
    ]


def _match_predictors(model: Model) -> Iterator[re.Pattern[str]]:
    """Names of the tensors of predictors, which are read apart."""
    names = model.tensors
    for pattern in (names.predictor_in, names.predictor_out, names.predictor_bias):
        yield re.compile(re.sub(r"\\{\w+\\}", r"\\d+", f"^{re.escape(pattern)}$"))


def _list_unread(model: Model) -> Iterator[str]:
    """Names that some checkpoints have and no code reads: keys and values of layers that take them
    from another one, and a factor that is not applied."""
    layers = model.shape.layers
    if model.altup is not None and not model.altup.scaled:
        yield from (fill_name(model.tensors.altup_scale, layer) for layer in range(layers))
    for layer in range(layers - min(layers, model.attention.kv_shared_layers), layers):
        for pattern in (model.tensors.key, model.tensors.value, model.tensors.key_norm):
            yield fill_name(pattern, layer)


def _find_layer(name: str, model: Model) -> int:
    """The layer that a tensor belongs to; -1 for one of none."""
    start = model.tensors.attention_norm.partition("{layer}")[0]
    found = re.match(r"(\d{1,9})\.", name[len(start) :]) if name.startswith(start) else None
    return -1 if found is None else int(found[1])


def _deny(checkpoint: Checkpoint, names: Sequence[str], statement: str) -> Diagnostic:
    kinds = {re.sub(r"\.\d+(?=\.)", ".N", name): name for name in reversed(names)}
    tensors = [checkpoint.tensors[name] for name in sorted(kinds.values())]
    listed = ", ".join(repr(tensor.name) for tensor in tensors[:_NAMED])
    others = len(names) - len(tensors[:_NAMED])
    return Diagnostic(
        code="P537",
        message=(
            f"{tensors[0].file} has the tensor{'s' * (len(tensors) > 1)} {listed}"
            f"{f' and {others} more' if others else ''}, but {statement}"
        ),
        help="correct the configuration, or write the model document by hand and give --model",
    )


def _is_embedding(checkpoint: Checkpoint, model: Model) -> bool:
    """Whether a tied head that is there too repeats the embedding, as some files have it."""
    embedding = checkpoint.tensors[model.tensors.embedding]
    head = checkpoint.tensors[model.tensors.head]
    if embedding.shape != head.shape:
        return False
    rows = min(_COMPARED_ROWS, head.shape[0])
    return np.array_equal(embedding.read(0, rows), head.read(0, rows))
