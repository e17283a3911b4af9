"""Writes a neuron store: file by file, in streams, and all or nothing."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from pi2.arrays import I32, U8, Raw
from pi2.caches import replace_file
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.model.tensor import DenseTensor
from pi2.model.tensors import list_tensors
from pi2.plan.documents.common import hash_json
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import split_scales
from pi2.plan.weights.layout import GROUP, BundleLayout, ScalesPlace
from pi2.store.arrow_file import lay_out_dense_file, lay_out_layer_file, lay_out_scales_file
from pi2.store.files import FilePlan, PlacedFile, UnfinishedStore, hash_file, link_or_copy
from pi2.store.identity import describe_weights
from pi2.store.manifest import (
    DENSE_FILE,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    Order,
    StoredBundle,
    StoredFile,
    StoredModel,
    StoredPredictor,
    StoredTensor,
    name_layer_file,
    name_scales_file,
)


def keep_groups(model: Model, orders: I32) -> I32:
    """Stored orders [layers, neurons] in which neurons that share scales follow each other as in
    the checkpoint: groups of 32 in the order of their mean places."""
    if not find_packing(model.quantization.ffn).shares_down_scales:
        return orders
    places = np.argsort(orders, axis=1).reshape(len(orders), -1, GROUP)
    groups = np.argsort(places.mean(axis=2), axis=1, kind="stable")
    kept = groups[:, :, None] * GROUP + np.arange(GROUP)
    return kept.reshape(orders.shape).astype(np.int32)


def cut_groups(pieces: Iterable[U8]) -> Iterator[U8]:
    """The same neurons [n, stride] in pieces that are whole groups; so is their sum."""
    rest: U8 | None = None
    for piece in pieces:
        joined = piece if rest is None else np.concatenate([rest, piece])
        whole = len(joined) // GROUP * GROUP
        rest = joined[whole:] if whole < len(joined) else None
        if whole:
            yield joined[:whole]
    assert rest is None, len(rest)


TensorPieces = Iterable[tuple[Raw, Raw | None]]
"""Rows of a tensor in order: weights uint8 [n, weight bytes], or float32 vectors as they are, and
scales [n, .] or None."""


class StoreWriter:
    """A store in the making: a context manager that ``finish`` completes. Other ends remove it,
    except that a kill or Ctrl-C lets the same ``job`` resume; files may come in any order."""

    def __init__(
        self,
        path: Path,
        model: Model,
        *,
        ranks: Sequence[int] | None,
        order: Order,
        synthetic: bool = False,
        stride: int | None = None,
        scales: ScalesPlace = "inline",
        replace: bool = False,
        job: str = "",
        keep_failed: bool = False,
    ) -> None:
        """``ranks`` of predictors; ``stride``: by default the next multiple of 512;
        ``keep_failed``: failures can resume too. `UserError` P105, P521-P523."""
        if scales == "resident" and not find_packing(model.quantization.ffn).has_scales:
            raise UserError.of(
                "P105",
                f"the neurons of {model.id!r} are {model.quantization.ffn}: they have no scales "
                "that could be resident",
                help="leave scales inline, or quantise the neurons",
            )
        self.model = model
        self._stored: BundleLayout = model.lay_out_bundle(stride, scales)
        self.bundle: BundleLayout = self._stored
        """Layout of the given bundles: scales with files of their own are taken out here."""
        if self._stored.scales == "resident":
            self.bundle = self._stored.inline
        self.tensors: list[DenseTensor] = list_tensors(model, ranks)
        self._ranks = None if ranks is None else tuple(ranks)
        self._order = order
        self._synthetic = synthetic
        self._dense = lay_out_dense_file(self.tensors)
        self._store = UnfinishedStore(path, job=job, replace=replace, keeps_failed=keep_failed)

    def has_file(self, path: str) -> bool:
        """Whether the file at ``path`` inside the store is complete."""
        return path in self._store.finished

    def write_layer(self, layer: int, original: I32, bundles: Iterable[U8]) -> None:
        """Write the neurons of ``layer``: ``original`` int32 [ffn], and ``bundles`` uint8 [n,
        stride] in stored order; in mxfp4 32 neighbours share down scales."""
        neurons, stride = self.model.layer_neurons, self._stored.stride
        assert original.shape == (neurons,) and original.dtype == np.int32
        path = name_layer_file(layer)
        if self.has_file(path):
            return
        plan = lay_out_layer_file(neurons, stride)
        (places,) = plan.holes
        checks = np.empty(neurons, "<u4")
        scales: list[U8] = []
        with self._begin(path, plan) as file:
            done, place = 0, places[0]
            groups = self._stored.scales == "resident" and self._stored.parts[-1].spread
            for whole in cut_groups(bundles) if groups else bundles:
                assert whole.dtype == np.uint8 and whole.shape[1] == self.bundle.stride, whole.shape
                piece = whole
                if self._stored.scales == "resident":
                    piece, some = split_scales(whole, self._stored)
                    scales.append(some)
                checks[done : done + len(piece)] = [zlib.crc32(bundle) for bundle in piece]
                place = file.write(place, piece)
                done += len(piece)
            assert done == neurons, (done, neurons)
            file.write(places[1], original.astype("<i4", copy=False))
            file.write(places[2], checks)
            if scales:
                # Complete before the layer is: a job that goes on looks for the layer's file.
                self._write_scales(layer, scales)
            file.finish()
        names = ("bundles_offset", "neurons_offset", "checks_offset")
        self._record(path, rows=neurons, **dict(zip(names, places, strict=True)))

    def _write_scales(self, layer: int, scales: Sequence[U8]) -> None:
        """Write rows of scales, uint8 [n, scales stride] each, in stored order."""
        path, neurons = name_scales_file(layer), self.model.layer_neurons
        if self.has_file(path):
            return
        plan = lay_out_scales_file(neurons, self._stored.scales_stride)
        ((offset,),) = plan.holes
        with self._begin(path, plan) as file:
            place = offset
            for piece in scales:
                place = file.write(place, piece)
            file.finish()
        self._record(path, rows=neurons, scales_offset=offset)

    @cached_property
    def dense(self) -> PlacedFile:
        """``dense.arrow`` in the making, numbered as ``tensors``."""
        return self._begin(DENSE_FILE, self._dense, keeps=True)

    def has_tensor(self, number: int) -> bool:
        """Whether one of ``tensors`` is written."""
        return self.has_file(DENSE_FILE) or self.dense.has(number)

    def write_tensor(self, number: int, pieces: TensorPieces) -> None:
        """Write one of ``tensors``, of which ``pieces`` are the rows in order."""
        tensor, places = self.tensors[number], list(self._dense.holes[number])
        sizes = tensor.count_bytes()
        ends = [place + size for place, size in zip(places, sizes, strict=True)]
        for weights, scales in pieces:
            places[0] = self.dense.write(places[0], weights)
            if scales is not None:
                places[1] = self.dense.write(places[1], scales)
        assert places == ends, (tensor, places, ends)
        self.dense.mark(number)

    def settle(self) -> None:
        """Let another attempt go on from the tensors that are there."""
        if "dense" in self.__dict__:
            self.dense.settle()

    def write_dense(self, read: Callable[[DenseTensor], TensorPieces]) -> None:
        """Write ``dense.arrow``; ``read`` gives the rows of each of ``tensors``, in order, except
        the ones that are there."""
        if self.has_file(DENSE_FILE):
            return
        for number, tensor in enumerate(self.tensors):
            if not self.has_tensor(number):
                self.write_tensor(number, read(tensor))
        self.dense.finish()
        self._record(DENSE_FILE, rows=len(self.tensors))

    def add_file(self, path: str, content: bytes) -> None:
        """Write a small extra file, such as ``tokenizer.json``."""
        if self.has_file(path):
            return
        replace_file(self._store.folder / path, content)
        self._record(path)

    def add_note(self, path: str, content: bytes) -> None:
        """Write a file that people may change, such as a plan: the manifest does not list it."""
        replace_file(self._store.folder / path, content)

    def adopt_file(self, source: Path, entry: StoredFile) -> None:
        """Take over a whole file of another store, whose manifest has ``entry``: by a hard link,
        or as a copy where the file system has none."""
        if self.has_file(entry.path):
            return
        link_or_copy(source, self._store.folder / entry.path)
        self._store.record(entry)

    def finish(self) -> Manifest:
        """Write the manifest and make the store visible under its name."""
        manifest = self._describe()
        text = json.dumps(manifest.dump(), indent=1, ensure_ascii=False)
        replace_file(self._store.folder / MANIFEST, text.encode() + b"\n")
        self._store.publish()
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if "dense" in self.__dict__:
            self.dense.close()
        self._store.__exit__(kind, error, trace)

    def _begin(self, path: str, plan: FilePlan, *, keeps: bool = False) -> PlacedFile:
        return PlacedFile(self._store.folder / path, plan, keeps=keeps)

    def _record(self, path: str, **places: int) -> None:
        file, checks = self._store.folder / path, list[int]()
        facts = {"path": path, "bytes": file.stat().st_size}
        facts["sha256"] = hash_file(file, checks=checks)
        # Neurons have checks of their own.
        facts["checks"] = None if "bundles_offset" in places else tuple(checks)
        self._store.record(StoredFile.model_validate(facts | places))

    def _describe(self) -> Manifest:
        files = self._store.finished
        expected = [DENSE_FILE, *map(name_layer_file, range(self.model.shape.layers))]
        missing = [path for path in expected if path not in files]
        assert not missing, f"not written: {missing}"
        parts = describe_weights(self.model)
        places = zip(self.tensors, self._dense.holes, strict=True)
        return Manifest(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            created_by=f"pi2 {version('pi2')}",
            model=StoredModel(id=self.model.id, digest=hash_json(parts), parts=parts),
            synthetic=self._synthetic,
            order=self._order,
            bundle=StoredBundle.describe(self._stored),
            predictor=None if self._ranks is None else StoredPredictor(rank=self._ranks),
            files=tuple(files[path] for path in sorted(files)),
            tensors=tuple(
                StoredTensor(
                    name=tensor.name,
                    precision=tensor.precision,
                    rows=tensor.rows,
                    length=tensor.length,
                    weights_offset=weights_offset,
                    scales_offset=scales_offset,
                )
                for tensor, (weights_offset, scales_offset) in places
            ),
        )
