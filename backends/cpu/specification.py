"""What of a request the kernels are compiled for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pi2.backends.kernels.spec import NO_ROWS, KernelSpec, describe_kernels
from pi2.backends.protocol import BuildRequest
from pi2.model.tensor import name_layer_tensor
from pi2.plan.documents.plan import ActivationType

PLANES: Mapping[ActivationType, int] = {"int8": 1, "int16": 2, "fp32": 4}
"""Bytes of an activation."""


def make_spec(request: BuildRequest) -> KernelSpec:
    """Return what the kernels for a request depend on."""
    model, tensors, several = request.model, request.tensors, request.step_tokens > 1
    predictors = (name_layer_tensor(n, "predictor_in") for n in range(model.shape.layers))
    found = {tensors[name].rows // model.expert_count for name in predictors if name in tensors}
    return describe_kernels(
        model,
        kv=request.kv_type,
        gates=request.gate_rows is not None,
        ranks=tuple(sorted(found)),
        stride=request.bundle.stride,
        scales=request.bundle.scales,
        threads=request.threads,
        planes=PLANES[request.token_type],
        chunk_planes=PLANES[request.chunk_type],
        upper_steps=several and (request.token_type, request.step_type) == ("int16", "int8"),
        rows=dataclasses.replace(request.rows or NO_ROWS, unit=""),
        sequences=several,
        looks_ahead=request.looks_ahead and len(found) > 0,
        # With gates that are known there is less to read in a row: measured in notes/kernels.md.
        passes=request.passes or (1 if request.gate_rows is None else 2),
        architecture=request.architecture,
        features=tuple(sorted(request.features)),
    )
