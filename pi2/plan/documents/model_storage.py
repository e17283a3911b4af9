"""How the weights of a model are stored, and how its text becomes tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pi2.plan.documents.common import FilePath, Table

Precision = Literal["int4", "int8", "fp16"]
"""Storage type of weights.  int4 and int8 have one fp16 scale per group of 32."""

AttentionPrecision = Literal["ternary", "int4", "int8", "fp16"]
"""Storage type of projections.  ternary weights are -1, 0 or 1, with one scale for a row: BitNet's
are published so, and stores hold them exactly."""

FfnPrecision = Literal["ternary", "int4", "int8", "fp16", "mxfp4"]
"""Storage type of neurons.  mxfp4 is what gpt-oss is published in: 4-bit floats, of which 32 have a
power of two as their scale; stores hold the published weights exactly."""


class Tokenizer(Table):
    """How text becomes tokens."""

    file: FilePath = "tokenizer.json"
    """File of the `tokenizers` library, relative to the neuron store."""
    bos: int | None = Field(default=None, ge=0, examples=[1])
    """Id of the beginning-of-sequence token."""
    eos: tuple[int, ...] = Field(default=(), examples=[[2]])
    """Ids of end-of-sequence tokens."""
    add_bos: bool = False
    """Whether a prompt begins with ``bos``."""


class Quantization(Table):
    """Precision of the weights by class of tensor."""

    ffn: FfnPrecision = "int4"
    """Neuron bundles."""
    attention: AttentionPrecision = "int4"
    """Query, key, value and output projections."""
    embedding: Precision = "int8"
    """Embedding table, and the head where it is tied."""
    head: Precision = "int8"
    """Output head where it is not tied."""
    predictor: Precision = "int8"
    """Activation predictors."""
