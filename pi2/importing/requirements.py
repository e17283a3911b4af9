"""What a model document demands of its checkpoint, and whether the checkpoint has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from pi2.diagnostics import Diagnostic, UserError
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.dense_rows import is_stacked, name_ffn_source
from pi2.importing.rows import fill_name
from pi2.importing.safetensors_file import SourceTensor
from pi2.importing.state_rows import list_state_shapes
from pi2.plan.documents.model import Model

_COUNTED = 1000
"""Most findings that are looked for: nonsensical sizes could contradict millions of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A tensor that must be there; ``key`` is where the model document names it."""

    key: str
    name: str
    shape: tuple[int, ...]


def list_requirements(model: Model) -> Iterator[Requirement]:
    """Every tensor but the predictors, with its shape in the checkpoint."""
    hidden = model.shape.hidden
    norms: dict[str, tuple[int, ...]] = {"final_norm": (hidden,)} if model.norm.weights else {}
    if model.norm.bias:
        norms["final_norm_bias"] = (hidden,)
    yield _require(model, "embedding", (model.shape.vocab, hidden))
    if model.positions is not None:
        yield _require(model, "positions", (model.shape.context + model.positions.offset, hidden))
    states = {} if model.state_kind is None else list_state_shapes(model)
    norms_of_layers = _list_norms(model)
    for layer in range(model.shape.layers):
        # Parallel residuals may share a norm, and experts share all but their own: asked for once.
        asked = set()
        needed, mixers = norms_of_layers.copy(), model.list_mixers(layer)
        if layer in model.ffn.absent_layers:
            needed.pop("ffn_norm", None)
        else:
            needed |= _list_ffn(model, layer)
        if "attention" in mixers:
            needed |= _list_attention(model, layer)
        if not mixers:
            needed.pop("attention_norm", None)
        for number, mixer in enumerate(mixers):
            own = states if mixer != "attention" else {}
            for key, size in (own | ({"inner_norm": (hidden,)} if number else {})).items():
                yield _require(model, key, size, layer, mixer=number)
        for key, size in needed.items():
            for expert in range(_count_named(model, key)):
                need = _require(model, key, size, layer, expert)
                if need.name not in asked:
                    asked.add(need.name)
                    yield need
    for key, size in (norms | _list_layer_embedding(model)).items():
        yield _require(model, key, size)
    if model.altup is not None:
        for key, stream in product(("stream_in", "stream_out"), range(model.altup.streams - 1)):
            yield _require(model, key, (hidden, hidden), stream=stream)
    if not model.tied_head:
        yield _require(model, "head", (model.shape.vocab, hidden))
    if model.head_bias:
        yield _require(model, "head_bias", (model.shape.vocab,))


def _require(
    model: Model,
    key: str,
    shape: tuple[int, ...],
    layer: int = 0,
    expert: int = 0,
    stream: int = 0,
    mixer: int = 0,
) -> Requirement:
    name = fill_name(getattr(model.tensors, key), layer, expert, stream, mixer)
    return Requirement(key=key, name=name, shape=shape)


def _count_named(model: Model, key: str) -> int:
    pattern = getattr(model.tensors, key)
    return model.moe.experts if model.moe is not None and "{expert}" in pattern else 1


def _list_attention(model: Model, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's attention by key of ``model.tensors``."""
    has_values, model = not model.shares_key_rows(layer), model.view_layer(layer)
    shape, attention = model.shape, model.attention
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    width = attention.value_width or shape.head_dim
    needs = _list_latent(model) if attention.latent is not None else _list_projections(model)
    if not model.has_keys:
        del needs["key"]
    if not has_values or not model.has_keys:
        del needs["value"]
    if attention.qkv_bias and model.tensors.fused_qkv_bias is not None:
        needs["fused_qkv_bias"] = (queries + 2 * keys,)
    elif attention.qkv_bias:
        needs["query_bias"] = (queries * (1 + _has_gate_rows(model)),)
        values = shape.kv_heads * width
        needs |= {"key_bias": (keys,), "value_bias": (values,)} if model.has_keys else {}
    if attention.head_norm and attention.head_norm_weights:
        of_queries, of_keys = model.head_norm_widths
        needs["query_norm"] = (of_queries,)
        needs |= {"key_norm": (of_keys,)} if model.has_keys else {}
    if attention.sub_norm:
        needs["attention_sub_norm"] = (queries,)
    if attention.has_sinks(layer):
        needs["sinks"] = (shape.heads,)
    needs["output"] = (shape.hidden, shape.heads * width)
    if attention.output_bias:
        needs["output_bias"] = (shape.hidden,)
    return needs


def _list_projections(model: Model) -> dict[str, tuple[int, ...]]:
    shape = model.shape
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if model.tensors.fused_qkv is not None:
        return {"fused_qkv": (queries + 2 * keys, shape.hidden)}
    values = shape.kv_heads * (model.attention.value_width or shape.head_dim)
    sizes = {"query": queries * (1 + _has_gate_rows(model)), "key": keys, "value": values}
    if model.attention.output_gate and model.tensors.query_gate is not None:
        is_whole = model.attention.output_gate_of == "element"
        sizes["query_gate"] = queries if is_whole else shape.heads
    return {key: (size, shape.hidden) for key, size in sizes.items()}


def _has_gate_rows(model: Model) -> bool:
    return model.attention.output_gate and model.tensors.query_gate is None


def _list_latent(model: Model) -> dict[str, tuple[int, ...]]:
    shape, latent = model.shape, model.attention.latent
    assert latent is not None
    hidden, heads, rank = shape.hidden, shape.heads, latent.query_rank
    needs: dict[str, tuple[int, ...]] = {
        "latent": (latent.kept, hidden),
        "latent_norm": (latent.rank,),
        "latent_out": (heads * (latent.plain + shape.head_dim), latent.rank),
    }
    if rank is None:
        needs["query"] = (heads * latent.key, hidden)
    else:
        needs |= {
            "latent_query": (rank, hidden),
            "latent_query_norm": (rank,),
            "latent_query_out": (heads * latent.key, rank),
        }
    if model.attention.output_gate:
        needs["query_gate"] = (heads, hidden)
    if latent.bias:
        needs["latent_bias"] = (latent.kept,)
        needs |= {} if rank is None else {"latent_query_bias": (rank,)}
    return needs


def _list_norms(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's norms of the residual stream's width, of its scale, and of what its own
    embedding needs."""
    keys: list[str] = []
    if model.norm.inputs and model.norm.weights:
        keys += ["attention_norm", "ffn_norm"]
    if model.norm.inputs and model.norm.bias:
        keys += ["attention_norm_bias", "ffn_norm_bias"]
    if model.norm.outputs:
        keys += ["attention_output_norm", "ffn_output_norm"]
    hidden, own = model.shape.hidden, model.layer_embedding
    others: dict[str, tuple[int, ...]] = {"layer_scale": (1,)} if model.layer_scale else {}
    if own is not None:
        keys.append("layer_input_norm")
        others["layer_input_gate"] = (own.width, hidden)
        others["layer_input_output"] = (hidden, own.width)
    return dict.fromkeys(keys, (hidden,)) | others | _list_altup(model)


def _list_altup(model: Model) -> dict[str, tuple[int, ...]]:
    altup, hidden = model.altup, model.shape.hidden
    if altup is None:
        return {}
    streams, rank = altup.streams, altup.laurel_rank
    needs: dict[str, tuple[int, ...]] = {
        "altup_router": (streams, hidden),
        "altup_router_norm": (hidden,),
        "altup_predict": (streams * streams, streams),
        "altup_correct": (streams, streams),
        "laurel_in": (rank, hidden),
        "laurel_out": (hidden, rank),
        "laurel_norm": (hidden,),
    }
    return needs | ({"altup_scale": (hidden,)} if altup.scaled else {})


def _list_layer_embedding(model: Model) -> dict[str, tuple[int, ...]]:
    own, shape = model.layer_embedding, model.shape
    if own is None:
        return {}
    return {
        "layer_embedding": (own.vocab or shape.vocab, shape.layers * own.width),
        "layer_projection": (shape.layers * own.width, shape.hidden),
        "layer_projection_norm": (own.width,),
    }


def _list_ffn(model: Model, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's FFN by key of ``model.tensors``."""
    moe, hidden = model.moe, model.shape.hidden
    if moe is None:
        return _list_experts(model)
    needs: dict[str, tuple[int, ...]] = {}
    if not model.has_router(layer):
        width = moe.find_dense_width(layer, model.shape.ffn)
        if model.tensors.fused_dense is not None:
            return {"fused_dense": (2 * width, hidden), "dense_down": (hidden, width)}
        needs |= {"dense_gate": (width, hidden)} if model.ffn.gated else {}
        return needs | {"dense_up": (width, hidden), "dense_down": (hidden, width)}
    needs["router"] = (moe.experts, hidden)
    for key in ("router_bias", "choice_bias"):
        if getattr(moe, key):
            needs[key] = (moe.experts,)
    if moe.router_input == "stream":
        needs["router_norm"] = (hidden,)
    if moe.expert_scale:
        needs["expert_scale"] = (moe.experts,)
    if moe.latent is not None:
        needs |= {"experts_in": (moe.latent, hidden), "experts_out": (hidden, moe.latent)}
    if model.side_ffn is not None:
        width = model.side_ffn.width
        needs |= {"side_gate": (width, hidden)} if model.ffn.gated else {}
        needs |= {"side_up": (width, hidden), "side_down": (hidden, width)}
        norms = ("side_norm", "side_output_norm", "experts_output_norm")
        needs |= dict.fromkeys(norms if model.side_ffn.norms else (), (hidden,))
    shared = moe.shared_ffn or moe.shared_experts * model.shape.ffn
    if shared and model.tensors.fused_shared is not None:
        needs |= {"fused_shared": (2 * shared, hidden), "shared_down": (hidden, shared)}
    elif shared:
        needs |= {"shared_up": (shared, hidden), "shared_down": (hidden, shared)}
        needs |= {"shared_gate": (shared, hidden)} if model.ffn.gated else {}
    if moe.shared_gate:
        needs["shared_router"] = (1, hidden)
    return needs | _list_experts(model)


def _list_experts(model: Model) -> dict[str, tuple[int, ...]]:
    hidden, ffn = model.neuron_width, model.shape.ffn
    sizes: dict[str, tuple[int, ...]] = {}
    for part in ("gate", "up") if model.ffn.gated else ("up",):
        source = name_ffn_source(model, part)
        sizes[source] = (ffn if source == part else 2 * ffn, hidden)
    sizes["down"] = (hidden, ffn)
    if model.ffn.sub_norm:
        sizes["ffn_sub_norm"] = (ffn,)
    if model.ffn.bias:
        for part in ("gate_bias", "up_bias") if model.ffn.gated else ("up_bias",):
            source = name_ffn_source(model, part)
            sizes[source] = (ffn if source == part else 2 * ffn,)
        sizes["down_bias"] = (hidden,)
    return {key: _stack(model, key, size) for key, size in sizes.items()}


def _stack(model: Model, key: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part of an expert, or of all experts, as the checkpoint has it."""
    if model.moe is None:
        return size
    turned = size[::-1] if model.tensors.experts_turned else size
    return (
        (model.moe.experts, *turned) if is_stacked(model, getattr(model.tensors, key)) else turned
    )


_DOCUMENT = "the model document says"


def check_checkpoint(checkpoint: Checkpoint, model: Model, says: str = _DOCUMENT) -> None:
    """`UserError` with all findings: P533 missing, P534 wrong shape, P537 contradiction to
    ``config.json``.  ``says`` names where shapes come from.
    """
    findings = [*_compare_config(checkpoint, model)]
    for need in list_requirements(model):
        finding = find_tensor_problem(checkpoint, need, says)
        if finding is not None:
            findings.append(finding)
        if len(findings) > _COUNTED:
            break
    raise_findings(findings)


def raise_findings(findings: list[Diagnostic]) -> None:
    """Raise the findings as one `UserError`, if there are any: of those about tensors the first,
    with the number of the others, since one wrong number contradicts those of all layers."""
    missing = [finding for finding in findings if finding.code == "P533"]
    wrong = [finding for finding in findings if finding.code == "P534"]
    kept = [finding for finding in findings if finding.code not in ("P533", "P534")]
    first, others = (wrong or missing)[:1], len((wrong or missing)[1:])
    if first:
        message = first[0].message
        if others:
            message += f"; {others} other tensors are" if others > 1 else "; another is"
            message += " like it"
        if wrong and missing:
            message += f"; {len(missing)} are missing"
        kept = [replace(first[0], message=message), *kept]
    if kept:
        raise UserError(kept, exit_code=2)


def find_tensor_problem(
    checkpoint: Checkpoint, need: Requirement, says: str = _DOCUMENT
) -> Diagnostic | None:
    """Say that a tensor is missing or of the wrong shape."""
    tensor = checkpoint.tensors.get(need.name)
    if tensor is None:
        place = checkpoint.files[0] if len(checkpoint.files) == 1 else checkpoint.folder
        return Diagnostic(
            code="P533",
            message=f"{place} has no tensor {checkpoint.describe_name(need.name)!r}",
            help=f"check tensors.{need.key} and the shape in the model document",
        )
    if drop_ones(tensor.shape) != drop_ones(need.shape):
        return describe_shape_problem(tensor, need, says)
    return None


def drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of 1 at its ends, by which vectors are written in several ways."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def describe_shape_problem(
    tensor: SourceTensor, need: Requirement, says: str = _DOCUMENT
) -> Diagnostic:
    """A P534 that names file, tensor and both shapes."""
    return Diagnostic(
        code="P534",
        message=(
            f"tensor {tensor.name!r} in {tensor.file} has the shape {list(tensor.shape)}, "
            f"{says} {list(need.shape)}"
        ),
        help="correct the shape there, or give another checkpoint",
    )


def _name_ffn_size(checkpoint: Checkpoint, model: Model) -> str:
    """Key of the configuration that states the neurons of an FFN; none where it takes a formula."""
    config = checkpoint.config
    if "block_auto_adjust_ff_dim" in config:
        return ""
    if len(model.ffn.absent_layers) == model.shape.layers:
        # Without FFNs it is the width of something else.
        return ""
    own = "moe_intermediate_size" if model.moe is not None else "shared_intermediate_size"
    if own not in config and isinstance(config.get("intermediate_size"), list):
        # The width of every layer: a family has found them equal.
        return ""
    return own if own in config else "intermediate_size"


def _compare_config(checkpoint: Checkpoint, model: Model) -> Iterator[Diagnostic]:
    """Compare ``config.json`` with the document where it states a value."""
    shape = model.shape
    stated = dict(checkpoint.config)
    for table in ("rope_scaling", "rope_parameters"):  # as it was written before transformers 5
        rope = checkpoint.config.get(table)
        stated |= rope if isinstance(rope, Mapping) else {}
    document: dict[str, tuple[str, Any]] = {
        "num_hidden_layers": ("shape.layers", shape.layers),
        "hidden_size": ("shape.hidden", shape.hidden),
        _name_ffn_size(checkpoint, model): ("shape.ffn", shape.ffn),
        "num_attention_heads": ("shape.heads", shape.heads),
        "num_key_value_heads": ("shape.kv_heads", shape.kv_heads),
        "head_dim": ("shape.head_dim", shape.head_dim),
        "vocab_size": ("shape.vocab", shape.vocab),
        "rms_norm_eps": ("norm.epsilon", model.norm.epsilon),
        "rope_theta": ("rope.theta", model.rope.theta),
        "tie_word_embeddings": ("tied_head", model.tied_head),
    }
    if model.attention.latent is not None:
        # There the configuration means the heads that keys and values would have.
        del document["num_key_value_heads"], document["head_dim"]
    if stated.get("num_attention_heads_per_layer") is not None:
        # It is what counts, and a family has read it.
        del document["num_attention_heads"]
    if "alpha" in stated or "layer_rope_theta" in stated:
        # They change the base.
        del document["rope_theta"]
    for key, (path, value) in document.items():
        if stated.get(key) is not None and stated[key] != value:
            yield Diagnostic(
                code="P537",
                message=(
                    f"{key} is {stated[key]!r} in {checkpoint.config_file}, "
                    f"but {path} is {value!r} in the model document"
                ),
                help=f"correct {path}, or give another checkpoint",
                path=path,
            )


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
