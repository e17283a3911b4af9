"""Turns a checkpoint into a neuron store, tensor by tensor."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from pi2.arrays import F32, I32, U8, Raw, Scales
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.checkpoint import Checkpoint, open_checkpoint, use_tokenizer
from pi2.importing.conversion_job import (
    Task,
    choose_order,
    describe_file,
    describe_files,
    describe_job,
    keep_old_notes,
    name_order,
    read_extra_files,
    run_tasks,
)
from pi2.importing.predictors import LayerPredictor, find_predictors, list_predictor_files
from pi2.importing.quantizers import Quantizer
from pi2.importing.requirements import check_checkpoint
from pi2.importing.rows import (
    Kept,
    find_dense_rows,
    find_ffn_rows,
    is_by_expert,
    read_factors,
    read_state_vector,
)
from pi2.importing.safetensors_file import SourceTensor, list_files
from pi2.model.ffn import find_factors
from pi2.model.tensor import DenseTensor, Place, StoredPrecision, split_name
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import assemble_bundles
from pi2.plan.weights.layout import GROUP, BundleLayout, ScalesPlace, round_up
from pi2.progress import ByteProgress, Progress, ignore_progress
from pi2.store.manifest import Manifest, name_layer_file
from pi2.store.writer import StoreWriter, TensorPieces

Packed = tuple[Raw, Scales | None]
Item = TypeVar("Item")
Result = TypeVar("Result")

_PIECE_WEIGHTS = 2**20
"""Weights that are quantised and written together."""

_AHEAD_BYTES = 2**29
"""Matrices of a layer; memory has room for the next layer's as well."""


def convert_checkpoint(
    checkpoint: Path | Checkpoint,
    model: Model,
    output: Path,
    *,
    tokenizer: Path | None = None,
    predictors: Path | None = None,
    activations: Path | None = None,
    extras: Mapping[str, Path] | None = None,
    notes: Mapping[str, bytes] | None = None,
    stride: int | None = None,
    scales: ScalesPlace = "inline",
    quantizer: Quantizer | None = None,
    replace: bool = False,
    progress: Progress = ignore_progress,
) -> Manifest:
    """Make the neuron store ``output`` from ``checkpoint``: a Hugging Face folder, or a GGUF
    file; or from an open one, whose files may arrive meanwhile.

    ``tokenizer``: another one instead of the checkpoint's, as in `use_tokenizer`. ``predictors``:
    safetensors file of the predictors, or a folder of PowerInfer's, if they are not in the
    checkpoint. ``activations``: Parquet file of counts; neurons are then stored most active first
    (by expert in an MoE model without predictors), and the store keeps the file. ``extras``:
    further files to keep, by their path in the store; ``notes``: contents of files that people may
    change later, such as a plan, by their path; a replaced store's version is kept with the ending
    ``.old``. ``stride`` and ``scales``: layout of bundles (`pi2.plan.weights.layout`).
    ``quantizer`` rounds weights; by default to nearest. ``progress`` is called with a label and the
    share of bytes read.

    Raises `UserError` (P521-P523 output, P530-P543 checkpoint) and leaves nothing behind. A job
    that was killed or interrupted resumes when called again, and so does any whose files arrive
    meanwhile: fetching them again would take longest."""
    source = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    source = use_tokenizer(source, tokenizer)
    check_checkpoint(source, model)
    found = find_predictors(source, model, predictors)
    order = choose_order(model, activations)
    files = read_extra_files(source, model, activations, extras or {})
    own = [] if predictors is None else list_predictor_files(predictors)
    inputs = [*describe_files(source), *map(describe_file, own)]
    chosen = quantizer or Quantizer()
    job = describe_job(model, order, inputs, stride, scales, chosen)
    with StoreWriter(
        output,
        model,
        ranks=None if found is None else [predictor.rank for predictor in found],
        order=name_order(model, activations),
        stride=stride,
        scales=scales,
        replace=replace,
        job=job,
        keep_failed=source.shards is not None,
    ) as writer:
        with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
            total = sum(tensor.size_bytes for tensor in source.tensors.values())
            report = ByteProgress(progress, "converting", total)
            report(0)
            conversion = _Conversion(source, model, found, order, chosen, writer, pool, report)
            tasks = list(conversion.list_tasks())
            run_tasks(tasks, source.files, source.shards, writer.settle)
            writer.write_dense(conversion.read_dense)
        for path, content in files.items():
            writer.add_file(path, content)
        for path, content in keep_old_notes(output, notes or {}).items():
            writer.add_note(path, content)
        manifest = writer.finish()
    progress("converting", 1.0)
    return manifest


@dataclass(slots=True)
class _Conversion:
    _source: Checkpoint
    _model: Model
    _predictors: list[LayerPredictor] | None
    _order: I32
    _quantizer: Quantizer
    _writer: StoreWriter
    _pool: ThreadPoolExecutor
    _progress: ByteProgress
    _left: Sequence[int] = ()
    """Layers whose neurons are not there."""
    _reading: tuple[int, Future[list[list[Raw]]]] | None = None
    """A layer that is read ahead."""

    def list_tasks(self) -> Iterator[Task]:
        """The neurons of every layer that is not there, then every dense tensor."""
        # A job that goes on has some of them already.
        layers = range(self._model.shape.layers)
        is_there = self._writer.has_file
        self._left = [layer for layer in layers if not is_there(name_layer_file(layer))]
        for layer in self._left:
            yield Task(partial(self._list_layer_files, layer), partial(self._write_layer, layer))
        for number, tensor in enumerate(self._writer.tensors):
            if not self._writer.has_tensor(number):
                write = partial(self._write_dense, number, tensor)
                yield Task(partial(self._list_dense_files, tensor), write)

    def _list_layer_files(self, layer: int) -> set[Path]:
        bundle = self._writer.bundle
        biases = [f"{bias.name}_bias" for bias in bundle.biases]
        rows = self._find_matrices(layer, [*(part.name for part in bundle.parts), *biases])
        factors = [] if bundle.factor_offset is None else [self._find_factors(layer)]
        return list_files([rows, factors])

    def _list_dense_files(self, tensor: DenseTensor) -> set[Path]:
        return list_files(self._find_dense(tensor))

    def _find_dense(self, tensor: DenseTensor) -> list[SourceTensor]:
        layer, kind = split_name(tensor.name)
        if layer is None or self._predictors is None or not kind.startswith("predictor_"):
            return find_dense_rows(self._source.tensors, self._model, tensor)
        return self._predictors[layer].list_rows(kind, self._order[layer], self._model.shape.ffn)

    def _write_layer(self, layer: int) -> None:
        names = [part.name for part in self._writer.bundle.parts]
        matrices, order = self._find_matrices(layer, names), self._order[layer]
        raw: list[list[Raw]] | Kept[int, list[Raw]]
        if self._model.moe is not None and is_by_expert(order, self._model.shape.ffn):
            # Experts are read one after the other: all of them may be larger than memory.
            raw = Kept(lambda expert: self._read_matrices(matrices[expert]))
        else:
            reading, self._reading = self._reading, None
            is_read = reading is not None and reading[0] == layer
            raw = reading[1].result() if reading and is_read else self._read_layer(matrices)
            following = self._left[self._left.index(layer) + 1 :][:1]
            # The next layer is read while this one is packed, if there is room for both.
            if following and _count_bytes(matrices) <= _AHEAD_BYTES:
                later = self._find_matrices(following[0], names)
                if self._source.shards is None or all(map(Path.exists, list_files(later))):
                    self._reading = following[0], self._pool.submit(self._read_layer, later)
        self._writer.write_layer(layer, order, self._pack_layer(layer, matrices, raw))

    def _write_dense(self, number: int, tensor: DenseTensor) -> None:
        self._writer.write_tensor(number, self.read_dense(tensor))

    def read_dense(self, tensor: DenseTensor) -> TensorPieces:
        if tensor.transform == "state":
            values, source = read_state_vector(self._source.tensors, self._model, tensor)
            return [(pad_columns(_check_floats(values, source), tensor.length), None)]
        return self._quantize_rows(tensor, self._find_dense(tensor))

    def _find_matrices(self, layer: int, names: Sequence[str]) -> list[list[SourceTensor]]:
        experts = range(self._model.expert_count)
        return [[self._find(name, layer, expert) for name in names] for expert in experts]

    def _pack_layer(
        self,
        layer: int,
        sources: list[list[SourceTensor]],
        raw: list[list[Raw]] | Kept[int, list[Raw]],
    ) -> Iterator[U8]:
        """Bundles uint8 [n, stride] of a layer in stored order; ``raw`` are its ``sources``."""
        order, bundle = self._order[layer], self._writer.bundle
        biases = self._read_biases(layer, bundle)
        factors = self._read_factors(layer, bundle)
        neurons_of_expert = self._model.shape.ffn
        step = round_up(max(1, _PIECE_WEIGHTS // bundle.hidden), GROUP)

        def pack(start: int) -> U8:
            neurons = order[start : start + step]
            owners = neurons // neurons_of_expert
            runs = _find_runs(owners)

            def pack_part(place: int) -> tuple[Raw, Raw | None]:
                part = bundle.parts[place]
                weights, scales = [], []
                for first, last in runs:
                    owner = owners[first]
                    rows = raw[owner][place][neurons[first:last] - owner * neurons_of_expert]
                    tensor = sources[owner][place]
                    # The rows of gate and up meet the FFN's input; those of down do not.
                    own = None if part.name == "down" else layer
                    packed, some = self._pack_rows(
                        rows, part.precision, tensor, bundle.hidden, own, spread=part.spread
                    )
                    weights.append(packed)
                    scales += [] if some is None else [some]
                if len(weights) == 1:
                    return weights[0], scales[0] if scales else None
                return np.concatenate(weights), np.concatenate(scales) if scales else None

            return assemble_bundles(
                [pack_part(place) for place in range(len(bundle.parts))],
                bundle,
                None if biases is None else biases[neurons],
                None if bundle.expert_offset is None else owners,
                None if factors is None else factors[neurons],
            )

        yield from map_in_order(self._pool, pack, range(0, len(order), step))

    def _read_layer(self, sources: list[list[SourceTensor]]) -> list[list[Raw]]:
        return [self._read_matrices(group) for group in sources]

    def _read_matrices(self, group: list[SourceTensor]) -> list[Raw]:
        found = []
        for source in group:
            # Columns become rows once, in a narrow type: gathering columns would be far slower.
            found.append(source.read_turned() if source is group[-1] else source.read_raw())
            self._progress.add(source.size_bytes)
        return found

    def _read_biases(self, layer: int, bundle: BundleLayout) -> F32 | None:
        """Biases of a layer's neurons float32 [ffn, n]; None where they have none."""
        if not bundle.biases:
            return None
        experts = range(self._model.expert_count)
        columns = []
        for bias in bundle.biases:
            sources = [self._find(f"{bias.name}_bias", layer, expert) for expert in experts]
            parts = [_check_floats(item.read(), item) for item in sources]
            columns.append(np.concatenate(parts))
        return np.stack(columns, axis=1).astype(np.float32)

    def _read_factors(self, layer: int, bundle: BundleLayout) -> F32 | None:
        """Factors of a layer's activations float32 [ffn]; None where they have none."""
        if bundle.factor_offset is None:
            return None
        factors = read_factors(self._source.tensors, self._model, layer)
        return _check_floats(factors, self._find_factors(layer))

    def _quantize_rows(self, tensor: DenseTensor, sources: list[SourceTensor]) -> TensorPieces:
        self._progress.add(sum(source.size_bytes for source in sources))
        if len(sources[0].shape) == 1:
            offset = self._model.norm.weight_offset if tensor.name.endswith("_norm") else 0.0
            parts = [_check_floats(own.read()[None] + np.float32(offset), own) for own in sources]
            yield pad_columns(np.concatenate(parts, axis=1), tensor.length), None
            return
        step = max(1, _PIECE_WEIGHTS // tensor.length)
        pieces = [
            (source, start, min(start + step, source.shape[0]))
            for source in sources
            for start in range(0, source.shape[0], step)
        ]

        def pack(piece: tuple[SourceTensor, int, int]) -> Packed:
            source, start, stop = piece
            raw = source.read_raw(start, stop)
            return self._pack_rows(raw, tensor.precision, source, tensor.length)

        yield from map_in_order(self._pool, pack, pieces)
        missing = tensor.rows - sum(source.shape[0] for source in sources)
        if missing > 0 and not tensor.packing.is_float32:
            # What is added to the residual stream is as long as its vectors are.
            yield tensor.packing.quantize(np.zeros((missing, tensor.length), np.float32))

    def _pack_rows(
        self,
        raw: Raw,
        precision: StoredPrecision,
        source: SourceTensor,
        length: int,
        ffn_layer: int | None = None,
        *,
        spread: bool = False,
    ) -> Packed:
        """Rows of ``source`` as it stores them, packed as vectors of ``length``: their own codes
        where they will do, which fill groups in any case.  `UserError` P539 if they hold what
        cannot be stored."""
        taken = source.take_codes(raw, precision)
        if taken is None:
            rows = pad_columns(source.widen(raw), length)
            try:
                return self._quantizer.quantize(
                    rows, precision, source.name, ffn_layer, spread=spread
                )
            except ValueError as error:
                raise explain_weight(source, error) from None
        if self._quantizer.errors is not None:
            rows = source.widen(raw)
            stored = find_packing(precision).dequantize(*taken, rows.shape[1])
            self._quantizer.errors.add(source.name, rows, stored, precision)
        return taken

    def _find_factors(self, layer: int) -> SourceTensor:
        return self._source.tensors[
            find_factors(Place(self._model, layer)).name(self._model.tensors)
        ]

    def _find(self, key: str, layer: int, expert: int) -> SourceTensor:
        return find_ffn_rows(self._source.tensors, self._model, key, layer, expert)


def _check_floats(values: F32, source: SourceTensor) -> F32:
    """Return values of ``source``; `UserError` P539 if they hold what cannot be stored."""
    if not np.isfinite(values).all():
        raise explain_weight(source, "a weight is not a finite number")
    return values


def explain_weight(source: SourceTensor, error: ValueError | str) -> UserError:
    return UserError.of(
        "P539", f"tensor {source.name!r} in {source.file} cannot be stored: {error}"
    )


def pad_columns(rows: F32, length: int) -> F32:
    """Rows float32 [n, width] as [n, length]: zeros follow."""
    missing = length - rows.shape[1]
    assert missing >= 0, (rows.shape, length)
    return np.pad(rows, ((0, 0), (0, missing))) if missing else rows


def map_in_order(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Results in order; only a few pieces are in memory, unlike with ``pool.map``."""
    running: deque[Future[Result]] = deque()
    for item in items:
        running.append(pool.submit(work, item))
        if len(running) > 2 * (os.cpu_count() or 1):
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _count_bytes(sources: list[list[SourceTensor]]) -> int:
    return sum(source.size_bytes for group in sources for source in group)


def _find_runs(owners: I32) -> list[tuple[int, int]]:
    starts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(owners)], strict=True))
