"""Lays tensors of a checkpoint out as the program of files reads them: a matrix has a row for each
output, experts are apart, all queries come first, gates come before ups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F16, F32, I64, U8, Raw
from pi2.importing.dense_rows import find_ffn_rows
from pi2.importing.rows import Rows
from pi2.importing.safetensors_file import SourceTensor
from pi2.model.attention import Attention, list_fused_heads
from pi2.model.tensor import Source
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import Precision

PARTS = ("gate", "up", "down", "gate_bias", "up_bias")
"""Keys of the parts of neurons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A tensor of a new file."""

    name: str
    shape: tuple[int, ...]
    tensors: tuple[SourceTensor, ...]
    """Its parts, one after the other."""
    matrix: str
    """What importance matrices call it."""
    key: str
    """Name in the checkpoint, by which its format is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Tensors and keys of a new file."""

    laid: Sequence[Laid]
    keys: Mapping[str, bytes]
    models: Sequence[Model]
    """The model, and its MTP head if the file has it, with the names of `Laid.key`."""
    vectors: Mapping[str, F32]
    """Tensors that no checkpoint has."""


def make_plain(model: Model) -> Model:
    """The same model in that layout; names of all other tensors stay."""
    names = model.tensors
    changes: dict[str, object] = {}
    if names.fused_qkv is not None and names.fused_order != "stacked":
        changes["fused_order"] = "stacked"
    is_mixed = names.fused_gate_up is not None and names.gate_up_order != "stacked"
    if is_mixed or (model.moe is not None and names.experts_turned):
        start = names.ffn_norm.partition("{layer}")[0] + "{layer}.pi2."
        start += "" if model.moe is None else "experts.{expert}."
        changes |= {key: start + key for key in PARTS}
        changes |= {"fused_gate_up": None, "fused_gate_up_bias": None}
        changes |= {"gate_up_order": "stacked", "experts_turned": False}
    return model.model_copy(update={"tensors": names.model_copy(update=changes)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedTensor(SourceTensor):
    """Rows of another tensor; ``offset`` means nothing here."""

    rows: Rows

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return self.rows.read_raw(start, stop)

    def widen(self, raw: Raw) -> F32:
        return self.rows.tensor.widen(raw)

    def read_turned(self) -> Raw:
        return self.rows.read_turned()

    @property
    def is_stored(self) -> bool:
        return self.rows.tensor.is_stored

    @property
    def is_mxfp4(self) -> bool:
        return self.rows.tensor.is_mxfp4

    def take_codes(self, raw: Raw, precision: Precision) -> tuple[U8, F16 | None] | None:
        return self.rows.tensor.take_codes(raw, precision)


def pick_rows(rows: Rows) -> SourceTensor:
    if rows.index is None:
        return rows.tensor
    shape, size = (rows.count, *rows.tensor.shape[1:]), rows.size_bytes
    return PickedTensor.made_of(rows.tensor, shape=shape, size_bytes=size, rows=rows)


def find_plain(
    tensors: Mapping[str, SourceTensor], model: Model, source: Source
) -> SourceTensor | None:
    """What `make_plain` of ``model`` calls ``source``, out of the tensors of its checkpoint; None
    if the checkpoint has it not."""
    names, key = model.tensors, source.key
    if key in PARTS and model.blocks[source.layer].ffn.kind != "none":
        return pick_rows(find_ffn_rows(tensors, model, key, source.layer, source.expert))
    tensor = tensors.get(source.name(names))
    if tensor is None or not key.startswith("fused_qkv") or names.fused_order == "stacked":
        return tensor
    own = next(own for own in model.blocks[source.layer].mixers if isinstance(own, Attention))
    parts = (list_fused_heads(own, part, "grouped") for part in ("query", "key", "value"))
    heads: I64 = np.concatenate([np.array(part, np.int64) for part in parts])
    index = heads[:, None] * own.head_dim + np.arange(own.head_dim)
    return pick_rows(Rows(tensor=tensor, index=index.reshape(-1)))
