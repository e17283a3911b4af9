"""Lays a checkpoint out as llama.cpp's converter does: names, rows and numbers of its files.

The reverse of `pi2.importing.gguf_checkpoint`, by the same documents of families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose, prod
from pathlib import Path

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.formats import find_format
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import compute_alike
from pi2.importing.families import describe_family
from pi2.importing.gguf_architectures import choose_names, list_suited, name_in_file
from pi2.importing.gguf_checkpoint import open_gguf
from pi2.importing.gguf_keys import describe_keys, describe_vocabulary, list_divisors
from pi2.importing.gguf_tensors import DeltaHeads
from pi2.importing.gguf_writer import NewTensor, make_vector, write_gguf, write_key
from pi2.importing.new_model import describe_metadata
from pi2.importing.rows import (
    PARTS,
    Arrangement,
    Laid,
    find_plain,
    make_plain,
    pick_rows,
    take_heads,
)
from pi2.importing.safetensors_file import SourceTensor
from pi2.model.states import describe_state
from pi2.model.tensor import Source
from pi2.model.tensors import list_sources
from pi2.plan.documents.family import Architecture
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Tensors

PIECES = {"attn_k_b": False, "attn_v_b": True}
"""Parts of the KV matrix of latent attention that files have apart."""


class Unsuited(Exception):
    """The architecture has no place for a tensor or a fact, which the text names."""


def find_names(source: Checkpoint, model: Model, own: Architecture) -> Model:
    """The model with the names of tensors that a file of the architecture stands for."""
    config = Config(source.config_file, {**source.config, **own.settings})
    tables = describe_family(config)["tensors"]
    names = Tensors.model_validate(tables)
    if names.state_order == "grouped" and "_states" in own.read:
        apart = {
            "state_order": "separate",
            "state_in": Tensors().state_in,
            "state_beta": Tensors().state_beta,
        }
        names = names.model_copy(update=apart)
    return make_plain(model.model_copy(update={"tensors": names}))


def lay_out_file(source: Checkpoint, model: Model, own: Architecture) -> tuple[list[Laid], Model]:
    """All tensors, and the model with the names of their keys; raises `Unsuited`."""
    named = find_names(source, model, own)
    has_two = any(".ln_attn." in name for name in source.tensors)
    names = dict(choose_names(own, has_two=has_two))
    norm, later = (f"blk.{{layer}}.{key}.weight" for key in ("ffn_norm", "post_attention_norm"))
    if names.get(norm) == names.get(later):
        names.pop(norm, None)
    found: dict[str, list[tuple[str, SourceTensor]]] = {}
    seen = set[tuple[str, int]]()
    for each in list_sources(named):
        original = each.name(named.tensors)
        place = original, each.expert if each.key in PARTS else 0
        if place in seen:
            continue
        seen.add(place)
        name = name_in_file(names, original)
        if name == original:
            raise Unsuited(original)
        tensor = _find(source, model, each)
        if tensor is None:
            raise Unsuited(original)
        for part, changed in _change(name, original, tensor, model, own):
            found.setdefault(part, []).append((original, changed))
    laid = []
    for name, parts in found.items():
        tensors = tuple(tensor for _, tensor in parts)
        shape = _shape(name, tensors, model)
        laid.append(Laid(name=name, shape=shape, tensors=tensors, matrix=name, key=parts[0][0]))
    return laid, named


def _find(source: Checkpoint, model: Model, own: Source) -> SourceTensor | None:
    """What the layout calls ``own``, of the checkpoint's tensors."""
    names, moe, key = model.tensors, model.moe, own.key
    kind, _, part = key.partition("_")
    fused = getattr(names, f"fused_{kind}", None) if kind in ("shared", "dense") else None
    if fused is not None and moe is not None and part in ("gate", "up"):
        whole = source.tensors.get(replace(own, key=f"fused_{kind}").name(names))
        if whole is None:
            return None
        half = whole.shape[0] // 2
        index = np.arange(half) + half * (part == "up")
        return pick_rows(whole, index)
    if names.state_order == "grouped" and key in _GROUPED and model.recurrence is not None:
        stored, part_name = _GROUPED[key]
        whole = source.tensors.get(replace(own, key=stored).name(names))
        if whole is None:
            return None
        divided = _read_heads(model, is_tiled=False).divide(_end(whole.name))
        return pick_rows(whole, divided[f"in_proj_{part_name}.weight"])
    return find_plain(source.tensors, model, own)


_GROUPED = {
    "state_in": ("state_in", "qkv"),
    "state_gate": ("state_in", "z"),
    "state_beta": ("state_beta", "b"),
    "state_alpha": ("state_beta", "a"),
}
"""Tensors of groups that projections of Qwen3-Next are parts of, and which part they are."""


def _end(name: str) -> str:
    return name.partition(".linear_attn.")[2]


def _read_heads(model: Model, *, is_tiled: bool) -> DeltaHeads:
    shape = describe_state(model)
    assert shape is not None
    return DeltaHeads(shape, is_tiled)


def _change(
    name: str, original: str, tensor: SourceTensor, model: Model, own: Architecture
) -> Iterator[tuple[str, SourceTensor]]:
    """A tensor as files have it, perhaps in parts, each with its name."""
    kind = name.split(".", 2)[-1] if name.startswith("blk.") else name
    part = kind.partition(".")[0]
    shape = model.shape
    if own.permutes and part in ("attn_q", "attn_k"):
        heads = shape.heads if part == "attn_q" else shape.kv_heads
        rows = tensor.shape[0]
        order = np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
        tensor = pick_rows(tensor, order)
    elif part == "attn_kv_b":
        latent = model.attention.latent
        assert latent is not None
        sizes = latent.plain, tensor.shape[0] // shape.heads - latent.plain
        block = name.removesuffix("attn_kv_b.weight")
        for piece, is_value in PIECES.items():
            taken = take_heads(tensor, shape.heads, sizes, is_value=is_value)
            yield f"{block}{piece}.weight", taken
        return
    elif kind == "ssm_a":
        tensor = _compute(tensor, lambda rates: -np.exp(rates))
    elif kind.endswith("norm.weight") and kind != "ssm_norm.weight" and own.norm_offset:
        offset = np.float32(own.norm_offset)
        tensor = _compute(tensor, lambda weights: weights + offset)
    if own.tiles_values and model.recurrence is not None:
        # Value heads of a key head go apart.
        moved = _read_heads(model, is_tiled=True).find_order(_end(original))
        stored = None if moved is None else np.asarray(np.argsort(moved), np.int64)
        if stored is not None and part == "ssm_out":
            tensor = _compute(tensor, lambda rows: np.ascontiguousarray(rows[:, stored]))
        elif stored is not None:
            tensor = pick_rows(tensor, stored)
    yield name, tensor


def _compute(tensor: SourceTensor, compute: Callable[[F32], F32]) -> SourceTensor:
    return compute_alike(
        tensor, tensor.shape, lambda start, stop: compute(tensor.read(start, stop))
    )


def _shape(name: str, tensors: tuple[SourceTensor, ...], model: Model) -> tuple[int, ...]:
    """Sizes in the file."""
    own = tensors[0].shape or (1,)
    kind = name.split(".", 2)[-1] if name.startswith("blk.") else name
    heads, latent = model.shape.heads, model.attention.latent
    if kind.startswith("ssm_conv1d_"):  # of queries, keys or values
        return (1, own[0], 1, own[-1])
    if kind == "ssm_a" and model.recurrence is not None and model.recurrence.decay_of == "key":
        return (1, 1, prod(own), 1)
    if kind in ("ssm_a", "ssm_d", "ssm_norm.weight") and model.recurrence is not None:
        if model.layers is not None and any("mamba" in kind for kind in model.layers.kinds):
            count = model.recurrence.norm_groups if kind.startswith("ssm_norm") else prod(own)
            return (count, prod(own) // count)
        return (prod(own),)
    if "conv" in kind and len(own) == 3:
        return (own[0], own[2])
    if kind == "ffn_gate_inp_shexp.weight":
        return (prod(own),)
    if kind.partition(".")[0] in PIECES and latent is not None:
        return (heads, own[0] // heads, own[1])
    if "_exps." in kind and (len(tensors) > 1 or kind.endswith(".weight")):
        return (len(tensors), *own)
    return own


def arrange_for_llama(source: Checkpoint, model: Model, output: Path) -> Arrangement | None:
    """What llama.cpp's converter would write; None for a model that no architecture states as pi2
    understands its files.  An outline of the file, next to ``output``, is read to know that."""
    if source.document is not None or source.has_blocks:
        return None
    for name, own in list_suited(source.config.get("model_type")):
        try:
            laid, named = lay_out_file(source, model, own)
            keys = describe_keys(model, name, own, source.config)
            written = {key: write_key(key, value) for key, value in keys.items()}
            vectors = list_divisors(model)
            found = _read_outline(output, written, laid, vectors)
        except (Unsuited, UserError):
            continue
        if find_differences(model, found):
            continue
        texts = describe_vocabulary(source, model)
        written |= {key: write_key(key, value) for key, value in texts.items()}
        return Arrangement(laid=laid, keys=written, models=[named], vectors=vectors)
    return None


_SAID_ELSEWHERE = frozenset(
    ("id", "name", "description", "licence", "tokenizer", "quantization", "tensors", "sampling")
)


def find_differences(model: Model, other: Model) -> list[str]:
    """Keys of the documents that differ, but for names, texts and precisions."""
    one, two = (own.model_dump(mode="json") for own in (model, other))
    return [key for key in one if key not in _SAID_ELSEWHERE and not _is_near(one[key], two[key])]


def _is_near(one: object, other: object) -> bool:
    """Whether values are equal, but for what 32 bits leave of a number."""
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=1e-6)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_is_near(one.get(key), other.get(key)) for key in one.keys() | other.keys())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_near, one, other))
    return one == other


def _read_outline(
    output: Path, keys: Mapping[str, bytes], laid: Sequence[Laid], vectors: Mapping[str, F32]
) -> Model:
    plain = find_format("f32")
    holes = [NewTensor(name=own.name, shape=own.shape, format=plain, parts=()) for own in laid]
    file = output.with_name(f".{output.name}.outline.part")
    try:
        write_gguf(file, keys, [*(make_vector(*each) for each in vectors.items()), *holes])
        return describe_metadata(open_gguf(file))
    finally:
        file.unlink(missing_ok=True)
