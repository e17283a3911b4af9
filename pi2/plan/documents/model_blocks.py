"""The entries of ``[[blocks]]``: what layers of a model differ in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Count, Document, Table
from pi2.plan.documents.model_mixing import LayerKind, Rope

_PART = r"(-?\d{1,4}|\d{1,4}-\d{1,4}|(-?\d{1,4})?:(-?\d{1,4})?(:0*[1-9]\d{0,3})?)"
LAYER_CHOICE = rf"^\s*{_PART}(\s*,\s*{_PART})*\s*$"

Size = Annotated[int, Field(ge=1, le=2**14, examples=[4])]


class BlockMixer(Table):
    """What mixes the tokens of some layers.  Keys other than ``op`` belong to attention.  What all
    layers share stands in the tables ``attention``, ``rope``, ``recurrence``, ``convolution``."""

    op: LayerKind
    """The operator: ``attention``, ``delta``, ``mamba`` (Mamba-2), ``mamba1``, ``convolution``,
    ``none``, or several with ``+`` between them, one after the other."""
    heads: Size | None = None
    """Query heads; default: ``shape.heads``."""
    kv_heads: Size | None = None
    """Key and value heads; default: ``shape.kv_heads``."""
    head_dim: Size | None = None
    """Width of one head; default: ``shape.head_dim``."""
    keys_are_values: bool = False
    """Whether values are what the key projection gives."""
    rope: Rope | None = None
    """Rotary positions; default: the table ``rope``."""
    sliding_window: Count | None = None
    """Tokens that a query looks back, its own included; absent means the whole context."""
    head_norm: bool = False
    """Whether queries and keys have a norm."""
    sinks: bool = False
    """Whether every head has a score of its own."""
    growth: Annotated[float, Field(ge=0.0, examples=[0.1])] = 0.0
    """Growth of queries, as ``attention.growth``."""


class BlockFfn(Table):
    """The feed-forward network of some layers; the tables ``ffn`` and ``moe`` have its options."""

    op: Literal["dense", "experts", "none"]
    """``experts`` needs the table ``moe``; ``none``: the layer has no FFN."""
    width: Count | None = None
    """Neurons of a dense FFN in a model that has experts in other layers."""
    gate_sparsity: Annotated[float, Field(ge=0.0, lt=1.0, examples=[0.95])] = 0.0
    """Share of the gates that a cutoff closes, as ``ffn.gate_sparsity``."""


class BlockEntry(Table):
    """What some layers are.  Later entries replace what they state, operator by operator."""

    layers: Annotated[str, Field(pattern=LAYER_CHOICE, max_length=4000)] = Field(
        default=":", examples=["3::4"]
    )
    """The layers: numbers, ranges (``0-7``) and slices (``3::4``, ``-20:``) with commas between
    them; negative numbers count from the end. Absent means all."""
    mix: BlockMixer | None = None
    """What mixes their tokens; default: attention."""
    ffn: BlockFfn | None = None
    """Their FFN; default: experts with the table ``moe``, else dense."""


class BlockEntries(Document):
    """A document that has nothing but blocks."""

    blocks: tuple[BlockEntry, ...]
    """The entries."""
