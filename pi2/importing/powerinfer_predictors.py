"""Predictors as PowerInfer trains them: a folder of ``model_0.pt``, ``model_1.pt``, ...

Each holds ``fc1.weight`` [rank, hidden] and ``fc2.weight`` [ffn, rank] of a layer, and reads what
the FFN's norm reads (as far as PowerInfer's converter and its Llama graph show), where those of a
store read what the norm gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import check_weights
from pi2.importing.rows import fill_name
from pi2.importing.safetensors_file import SourceTensor
from pi2.importing.torch_file import list_torch_file
from pi2.plan.documents.model import Model

_NAME = re.compile(r"model_(\d+)\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedTensor(SourceTensor):
    """A matrix whose columns are multiplied by something; ``offset`` means nothing here."""

    source: SourceTensor
    factors: F32
    """Factors of the columns, float32 [columns]."""

    def read(self, start: int = 0, stop: int | None = None) -> F32:
        """Rows ``start`` to ``stop`` in float32."""
        return self.source.read(start, stop) * self.factors


def list_predictor_files(place: Path) -> list[Path]:
    """The files of predictors that a user named: one, or those of PowerInfer in a folder, by layer.

    `UserError` P533 if there are none in it.
    """
    if not place.is_dir():
        return [place]
    found = [(int(match[1]), file) for file in place.iterdir() if (match := _match(file))]
    if not found:
        raise UserError.of(
            "P533",
            f"{place} has no predictors, such as 'model_0.pt'",
            help="give a folder of PowerInfer's predictors, or a safetensors file",
        )
    files = [file for _, file in sorted(found)]
    for file in files:
        check_weights(place, file)
    return files


def list_powerinfer_predictors(
    folder: Path, model: Model, tensors: Mapping[str, SourceTensor]
) -> dict[str, SourceTensor]:
    """Predictors in ``folder`` by the names that ``model`` has for them; ``tensors`` are those of
    the checkpoint.

    Raises `UserError`: P542 for a model whose norm cannot be taken out of them or a mixture, as
    `list_torch_file` for the files.
    """
    if model.moe is not None or model.norm.kind != "rmsnorm" or model.residual == "parallel":
        raise UserError.of(
            "P542",
            f"PowerInfer's predictors are not for models such as {model.id!r}: only for those with "
            "RMS norms, one FFN in a layer, and attention before it",
            help='train predictors with `pi2 predictor train`, or use decode.predictor = "gate"',
        )
    names = model.tensors
    found: dict[str, SourceTensor] = {}
    for file in list_predictor_files(folder):
        match = _match(file)
        assert match is not None
        layer = int(match[1])
        parts = list_torch_file(file)
        if "fc1.weight" in parts:
            norm = tensors.get(fill_name(names.ffn_norm, layer))
            inner = parts["fc1.weight"]
            found[fill_name(names.predictor_in, layer)] = _fold_norm(inner, norm, model)
        if "fc2.weight" in parts:
            found[fill_name(names.predictor_out, layer)] = parts["fc2.weight"]
    return found


def _fold_norm(inner: SourceTensor, norm: SourceTensor | None, model: Model) -> SourceTensor:
    """Let ``inner`` read what the FFN reads.

    It reads h, the FFN u = h / |h| * w with the norm's weights w; fc2 relu(fc1 h) has the sign of
    fc2 relu(fc1 (u / w)).
    """
    if norm is None or len(inner.shape) != 2 or norm.shape != inner.shape[1:]:
        return inner  # said later, with all that is missing or wrong
    weights = norm.read() + np.float32(model.norm.weight_offset)
    factors = np.divide(1, weights, out=np.zeros_like(weights), where=weights != 0)
    return FoldedTensor(
        file=inner.file,
        name=inner.name,
        dtype=inner.dtype,
        shape=inner.shape,
        offset=0,
        size_bytes=inner.size_bytes,
        source=inner,
        factors=factors,
    )


def _match(file: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(file.name)
