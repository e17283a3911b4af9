"""Puts predictors into a new store, with the model document and the plan that go with it.

The neurons' files are shared with the old store by hard links, so that a large model is not
copied; where the file system has none, they are copied.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pi2.diagnostics import UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.authoring.writing import write_document
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_ffn import Predictor
from pi2.plan.weights.rounding import quantize
from pi2.predictors.layers import LayerFit
from pi2.store.manifest import DENSE_FILE
from pi2.store.reader import NeuronStore
from pi2.store.tensors import DenseTensor
from pi2.store.writer import StoreWriter, TensorPieces

_KIB = 1024


def publish_predictors(resolved: ResolvedPlan, fits: Sequence[LayerFit], output: Path) -> Path:
    """Write ``output``: ``store``, ``ID.model.toml``, ``default.plan.toml``; returns the plan."""
    model = describe_model(resolved.model, fits)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_predictors(resolved, model, fits, output / "store")
        _write(output / f"{model.id}.model.toml", write_document(model))
        plan = output / "default.plan.toml"
        device = resolved.plan.device
        if "/" in device or device.endswith(".toml"):
            device = "./machine.device.toml"
            _write(output / "machine.device.toml", write_document(resolved.device))
        _write(plan, write_plan_text(resolved, model, device))
    except OSError as error:
        raise UserError.of(
            "P523",
            f"cannot write {error.filename or output}: {error.strerror or error}",
            help="free disk space, or choose an output folder that can be written",
        ) from None
    return plan


def describe_model(model: Model, fits: Sequence[LayerFit]) -> Model:
    """The model document with its new predictors."""
    found = [fit for fit in fits if fit.active > 0] or list(fits)
    predictor = Predictor(
        rank=max(fit.rank for fit in fits),
        recall=round(float(np.mean([fit.recall for fit in found])), 4),
        active=round(float(np.mean([fit.predicted for fit in fits])), 4),
    )
    changes: dict[str, object] = {"predictor": predictor}
    if model.moe is not None and "{expert}" not in model.tensors.predictor_in:
        # The names of a document without predictors know nothing of experts.
        place = model.tensors.gate.rpartition("{expert}")[0] + "{expert}.predictor"
        names = {
            "predictor_in": f"{place}.fc1.weight",
            "predictor_out": f"{place}.fc2.weight",
            "predictor_bias": f"{place}.bias",
        }
        changes["tensors"] = model.tensors.model_copy(update=names)
    return model.model_copy(update=changes)


def write_predictors(
    resolved: ResolvedPlan, model: Model, fits: Sequence[LayerFit], target: Path
) -> None:
    """Write the store ``target``: that of ``resolved`` with other predictors."""
    with NeuronStore.open(resolved.store_path, model=resolved.model) as old:
        manifest = old.manifest
        with StoreWriter(
            target,
            model,
            ranks=[fit.rank for fit in fits],
            order=manifest.order,
            synthetic=manifest.synthetic,
            stride=manifest.bundle.stride,
            scales=manifest.bundle.scales,
        ) as writer:
            for entry in manifest.files:
                if entry.path != DENSE_FILE:
                    writer.adopt_file(old.path / entry.path, entry)
            writer.write_dense(lambda tensor: _read_tensor(old, fits, tensor))
            writer.finish()


def _read_tensor(old: NeuronStore, fits: Sequence[LayerFit], tensor: DenseTensor) -> TensorPieces:
    kind = tensor.name.rpartition(".")[2]
    if kind not in ("predictor_in", "predictor_out", "predictor_bias"):
        known = old.tensors[tensor.name]
        return [(known.weights, known.scales)]
    fit = fits[int(tensor.name.split(".")[1])]
    if kind == "predictor_bias":
        return [(fit.join_bias()[None].astype(np.float32), None)]
    matrix = fit.join_inner() if kind == "predictor_in" else fit.join_outer()
    assert tensor.precision != "fp32"
    return [quantize(np.ascontiguousarray(matrix), tensor.precision)]


def write_plan_text(resolved: ResolvedPlan, model: Model, device: str) -> str:
    """The plan with the new store and model; ``memory`` has room for the predictors."""
    old = resolved.plan
    decode = old.decode.model_copy(update={"predictor": "low-rank", "threshold": 0.0})
    plan = old.model_copy(update={"decode": decode})
    needs = replace(resolved, plan=plan, model=model, thresholds=None).needs
    # Predictors need room, and so do the neurons that they name.
    segments = plan.memory.segments
    sizes = {
        name: max(getattr(segments, name), -(-need.bytes // _KIB) * _KIB)
        for name, need in needs.items()
    }
    larger = segments.model_copy(update=sizes)
    total = sum(size for _, size in larger)
    memory = plan.memory.model_copy(
        update={"segments": larger, "budget": max(plan.memory.budget, total)}
    )
    return write_document(
        plan.model_copy(
            update={
                "memory": memory,
                "store": "store",
                "model": f"./{model.id}.model.toml",
                "device": device,
            }
        )
    )


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
