"""Finds the activation predictors of a checkpoint and brings them to a rank that can be packed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import I32
from pi2.diagnostics import Diagnostic, UserError
from pi2.importing.checkpoint import Checkpoint, check_weights
from pi2.importing.decoded_tensor import unfold_norm
from pi2.importing.requirements import describe_shape_problem, raise_findings
from pi2.importing.rows import make_same, pick_rows
from pi2.importing.safetensors_file import SourceTensor, list_safetensors, list_torch_file
from pi2.model.tensor import fill_name
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Predictor
from pi2.plan.weights.layout import GROUP, round_up

_NAME = re.compile(r"model_(\d+)\.pt")


def list_predictor_files(place: Path) -> list[Path]:
    """Predictor files by layer: the given one, or PowerInfer's in a folder; `UserError` P533."""
    if not place.is_dir():
        return [place]
    named = ((_NAME.fullmatch(file.name), file) for file in place.iterdir())
    found = [(int(match[1]), file) for match, file in named if match is not None]
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
    """Predictors in ``folder`` by the model's names; `UserError` P542 for an MoE model or a norm
    that cannot be removed."""
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
        match = _NAME.fullmatch(file.name)
        assert match is not None
        layer = int(match[1])
        parts = list_torch_file(file)
        if "fc1.weight" in parts:
            norm = tensors.get(fill_name(names.ffn_norm, layer))
            inner = parts["fc1.weight"]
            found[fill_name(names.predictor_in, layer)] = unfold_norm(
                inner, norm, model.norm.weight_offset
            )
        if "fc2.weight" in parts:
            found[fill_name(names.predictor_out, layer)] = parts["fc2.weight"]
    return found


_HELP = "give their file with --predictors, or remove [predictor] from the model document"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePredictor:
    """The predictor of one FFN: fc2 relu(fc1 u) + bias."""

    inner: SourceTensor
    """The matrix fc1 [rank, hidden]."""
    outer: SourceTensor
    """The matrix fc2 [ffn, rank]."""
    bias: SourceTensor | None
    """Biases [ffn]; None stands for zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPredictor:
    experts: tuple[SourcePredictor, ...]

    @property
    def rank(self) -> int:
        return max(round_up(own.inner.shape[0], GROUP) for own in self.experts)

    def list_rows(self, kind: str, order: I32, ffn: int) -> list[SourceTensor]:
        """Rows of the dense tensor ``kind``, expert by expert, each with ``ffn`` neurons.  Neurons
        come in their ``order`` [neurons of the layer], and zeros fill the rank."""
        owners, neurons = np.divmod(order.astype(np.int64), ffn)
        found = []
        for expert, own in enumerate(self.experts):
            if kind == "predictor_in":
                rank = own.inner.shape[0]
                found.append(pick_rows(own.inner, np.arange(rank), missing=self.rank - rank))
            elif kind == "predictor_bias" and own.bias is None:
                found.append(make_same(ffn, number=0.0))
            else:
                stored = own.outer if kind == "predictor_out" else own.bias
                assert stored is not None
                found.append(pick_rows(stored, neurons[owners == expert]))
        return found


def find_predictors(
    checkpoint: Checkpoint, model: Model, file: Path | None
) -> list[LayerPredictor] | None:
    """Predictors of every layer in ``file`` or the checkpoint, or None. P533, P534, P542."""
    if model.predictor is None:
        if file is not None:
            raise UserError.of(
                "P542",
                "predictors are given, but the model document has none",
                help="add a [predictor] table with their rank to the model document",
            )
        return None
    layers = model.shape.layers
    tensors = checkpoint.tensors if file is None else _list_tensors(file, model, checkpoint)
    place = checkpoint.folder if file is None else file
    if not any(fill_name(model.tensors.predictor_in, n) in tensors for n in range(layers)):
        raise UserError.of(
            "P533",
            f"{place} has no predictors, such as {fill_name(model.tensors.predictor_in, 0)!r}",
            help=_HELP,
        )
    findings: list[Diagnostic] = []
    found = []
    for layer in range(layers):
        experts = [
            _find_expert(tensors, model, layer, expert, place, findings)
            for expert in range(model.expert_count)
        ]
        found.append(LayerPredictor(experts=tuple(item for item in experts if item is not None)))
    raise_findings(findings)
    largest = max(predictor.rank for predictor in found)
    if largest != model.predictor.rank:
        raise UserError.of(
            "P534",
            f"the largest predictor in {place} has the rank {largest} (a multiple of {GROUP}), "
            f"the model document says {model.predictor.rank}",
            help=f"set predictor.rank = {largest} in the model document",
        )
    return found


def announce_predictors(model: Model, checkpoint: Checkpoint, file: Path) -> Model:
    """The model with a ``[predictor]`` table for those in ``file``; raises as `find_predictors`."""
    tensors = _list_tensors(file, model, checkpoint)
    names = {
        fill_name(model.tensors.predictor_in, layer, expert)
        for layer in range(model.shape.layers)
        for expert in range(model.expert_count)
    }
    ranks = [tensors[name].shape[0] for name in names if name in tensors and tensors[name].shape]
    predictor = Predictor(rank=round_up(max(1, *ranks, 1), GROUP))
    return model.model_copy(update={"predictor": predictor})


def _list_tensors(file: Path, model: Model, checkpoint: Checkpoint) -> Mapping[str, SourceTensor]:
    if file.is_dir():
        return list_powerinfer_predictors(file, model, checkpoint.tensors)
    return list_safetensors(file)


def _find_expert(
    tensors: Mapping[str, SourceTensor],
    model: Model,
    layer: int,
    expert: int,
    place: Path,
    findings: list[Diagnostic],
) -> SourcePredictor | None:
    shape, names = model.shape, model.tensors
    patterns = names.predictor_in, names.predictor_out, names.predictor_bias
    own = [fill_name(pattern, layer, expert) for pattern in patterns]
    inner, outer, bias = map(tensors.get, own)
    for name in own[:2]:
        if name not in tensors:
            problem = f"{place} has no tensor {name!r}"
            findings.append(Diagnostic(code="P533", message=problem, help=_HELP))
    if inner is None or outer is None:
        return None
    rank = inner.shape[0] if inner.shape else 0
    sizes = (max(rank, 1), model.neuron_width), (shape.ffn, rank), (shape.ffn,)
    wrong = [
        describe_shape_problem(tensor, size)
        for tensor, size in zip((inner, outer, bias), sizes, strict=True)
        if tensor is not None and tensor.shape != size
    ]
    findings += wrong
    return None if wrong else SourcePredictor(inner=inner, outer=outer, bias=bias)
