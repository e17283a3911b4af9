"""Rows of projections and of the head that a unit beside the sparse one computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.plan.weights.layout import Precision
from pi2.plan.weights.tensor_names import EMBEDDING, HEAD, name_layer_tensor

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model

ROW_STEP = 32
"""Rows are divided at a multiple of it, so that every part begins at a multiple of 64 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedRows:
    """The first rows of some matrices, which belong to a unit beside the sparse one."""

    unit: str
    """The unit's name."""
    qkv: int = 0
    """Rows of the projection to queries, keys and values, in every layer."""
    output: int = 0
    """Rows of the projection of what attention has mixed, in every layer."""
    head: int = 0
    """Rows of the head."""


def count_rows(share: float, rows: int) -> int:
    """Rows of a unit that has ``share`` of them: a multiple of `ROW_STEP`, and not the last one,
    which the sparse unit keeps."""
    return min(round(share * rows / ROW_STEP), (rows - 1) // ROW_STEP) * ROW_STEP


def count_qkv_rows(model: Model) -> int:
    """Rows of a layer's projection to queries, keys and values."""
    return model.qkv_rows


def name_head(model: Model) -> str:
    """Name of the tensor that the head multiplies with."""
    return EMBEDDING if model.tied_head else HEAD


def list_matrices(model: Model, rows: DividedRows) -> Mapping[str, tuple[int, int, Precision]]:
    """Rows, length and precision of what the unit has of each tensor, by the tensor's name."""
    shape, precision = model.shape, model.quantization
    found: dict[str, tuple[int, int, Precision]] = {}
    for layer in range(shape.layers):
        if rows.qkv:
            name = name_layer_tensor(layer, "qkv")
            found[name] = (rows.qkv, shape.stored_hidden, precision.attention)
        if rows.output:
            name = name_layer_tensor(layer, "output")
            found[name] = (rows.output, shape.stored_query, precision.attention)
    if rows.head:
        kind = precision.embedding if model.tied_head else precision.head
        found[name_head(model)] = (rows.head, shape.stored_hidden, kind)
    return found
