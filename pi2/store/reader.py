"""Opens a neuron store: checks its manifest, maps its files privately, reads no weights."""

import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from pi2.arrays import I32, I64, U8, U32
from pi2.caches import open_stream
from pi2.diagnostics import UserError
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Tokenizer
from pi2.plan.weights.bundles import join_scales
from pi2.plan.weights.layout import BundleLayout, Tensor
from pi2.store.identity import check_files, check_model, report_size
from pi2.store.manifest import (
    DENSE_FILE,
    MANIFEST,
    Manifest,
    StoredFile,
    StoredTensor,
    name_layer_file,
    name_scales_file,
    read_manifest,
)

Number = TypeVar("Number", np.int32, np.uint32)


class StoredLayer:
    """The neurons of a layer: its file for direct reads, and mapped arrays."""

    def __init__(
        self,
        folder: Path,
        entry: StoredFile,
        layout: BundleLayout,
        scales: StoredFile | None = None,
    ) -> None:
        """``scales``: the file of the scales, if bundles have none."""
        assert entry.rows is not None and entry.bundles_offset is not None
        self.path: Path = folder / entry.path
        self.bundles_offset: int = entry.bundles_offset
        """Byte of bundle 0 in the file, a multiple of 4096."""
        self.neurons: int = entry.rows
        self.layout = layout
        self.stride = layout.stride
        self.bytes: int = entry.bytes
        """Size of the file."""
        self._entry = entry
        self.scales_entry = scales
        """The file of the layer's scales; None if bundles have them."""
        self._folder = folder

    @property
    def bundles(self) -> U8:
        """uint8 [neurons, stride], mapped."""
        size = self.neurons * self.stride
        flat = np.frombuffer(self._map, np.uint8, size, self.bundles_offset)
        return flat.reshape(self.neurons, self.stride)

    @property
    def scales(self) -> U8 | None:
        """uint8 [neurons, scales stride], mapped; None if bundles have the scales."""
        if self.scales_entry is None:
            return None
        assert self.scales_entry.scales_offset is not None
        size = self.neurons * self.layout.scales_stride
        flat = np.frombuffer(self._scales_map, np.uint8, size, self.scales_entry.scales_offset)
        return flat.reshape(self.neurons, -1)

    def read_inline(self, rows: slice | I64) -> U8:
        """Bundles [n, .] of some neurons with their scales in them, as ``layout.inline`` says, or
        ``layout`` where they are there anyway."""
        bundles, scales = self.bundles[rows], self.scales
        return bundles if scales is None else join_scales(bundles, scales, self.layout, rows)

    @property
    def original(self) -> I32:
        """int32 [neurons], read anew: index in the checkpoint of the neuron at every stored place;
        `UserError` P508."""
        return self._read(np.int32, self._entry.neurons_offset)

    @property
    def checks(self) -> U32:
        """uint32 [neurons], read anew: CRC-32 (`zlib.crc32`) of all ``stride`` bytes of every
        bundle; `UserError` P508."""
        return self._read(np.uint32, self._entry.checks_offset)

    def _read(self, dtype: type[Number], offset: int | None) -> npt.NDArray[Number]:
        assert offset is not None
        try:
            with open_stream(self.path) as file:
                return np.fromfile(file, dtype, self.neurons, offset=offset)
        except OSError as error:
            raise UserError.of("P508", f"cannot read {self.path}: {error.strerror}") from None

    def forget(self) -> None:
        """Let go of the mapping; it ends when the last array does."""
        self.__dict__.pop("_map", None)
        self.__dict__.pop("_scales_map", None)

    @cached_property
    def _map(self) -> mmap.mmap:
        # Mapped when first asked for: a run with direct reads never needs it.
        return _map_file(self.path, self._entry)

    @cached_property
    def _scales_map(self) -> mmap.mmap:
        assert self.scales_entry is not None
        return _map_file(self._folder / self.scales_entry.path, self.scales_entry)


class NeuronStore:
    """An open store.  Arrays stay valid as long as they are referenced."""

    def __init__(self, path: Path, manifest: Manifest, tokenizer_file: str) -> None:
        """Use `NeuronStore.open`."""
        self.path = path
        self.manifest = manifest
        self.tokenizer_path = path / tokenizer_file
        """File of the tokenizer; a synthetic store may have none."""
        self.bundle: BundleLayout = manifest.bundle.layout
        self.layers: tuple[StoredLayer, ...] = tuple(
            StoredLayer(
                path,
                _find(manifest, name_layer_file(layer)),
                self.bundle,
                manifest.find_file(name_scales_file(layer))
                if self.bundle.scales == "resident"
                else None,
            )
            for layer in range(manifest.layers)
        )

    @classmethod
    def open(cls, path: str | Path, *, model: Model | None = None) -> Self:
        """Open the store at ``path``, of ``model`` if given; `UserError` P501 to P506, P508."""
        folder = Path(path)
        manifest = read_manifest(folder)
        if model is not None:
            check_model(folder, manifest, model)
        check_files(folder, manifest)
        tokenizer = model.tokenizer if model is not None else Tokenizer()
        return cls(folder, manifest, tokenizer.file)

    @property
    def is_synthetic(self) -> bool:
        return self.manifest.synthetic

    @property
    def identity(self) -> bytes:
        """Bytes that change if another store has replaced this one."""
        return (self.path / MANIFEST).read_bytes()

    def check_unchanged(self) -> None:
        """UserError P509 if the folder has another manifest by now; for when all files are open."""
        try:
            unchanged = read_manifest(self.path) == self.manifest
        except UserError:
            unchanged = False
        if not unchanged:
            raise UserError.of(
                "P509",
                f"the neuron store {self.path} was replaced while it was being opened",
                help="run again when the other program has written it",
            )

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Dense tensors by name (`pi2.model.tensors`), mapped."""
        entry = _find(self.manifest, DENSE_FILE)
        content = np.frombuffer(_map_file(self.path / DENSE_FILE, entry), np.uint8)
        found = {}
        for tensor in self.manifest.tensors:
            parts = (content[first : first + size] for first, size in tensor.ranges)
            found[tensor.name] = view_tensor(tensor, *parts)
        return MappingProxyType(found)

    def close(self) -> None:
        """Let go of the mappings; they end when the last array does."""
        self.__dict__.pop("tensors", None)
        for layer in self.layers:
            layer.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _find(manifest: Manifest, path: str) -> StoredFile:
    entry = manifest.find_file(path)
    assert entry is not None, path  # the manifest was validated
    return entry


def view_tensor(tensor: StoredTensor, weights: U8, scales: U8) -> Tensor:
    """The tensor whose bytes are ``weights`` and ``scales``, uint8."""
    rows, packing = tensor.rows, tensor.dense.packing
    own = partial(Tensor, name=tensor.name, rows=rows, length=tensor.length)
    if packing.is_float32:
        return own(precision=None, weights=weights.view(np.float32).reshape(rows, -1))
    found = packing.view_scales(scales, rows) if len(scales) else None
    return own(precision=tensor.precision, weights=weights.reshape(rows, -1), scales=found)


def name_blocks(tensor: StoredTensor, raw: U8) -> Tensor:
    """Return a tensor the blocks of which are, or will be, ``raw``, and then scales of its vectors,
    if they have one each."""
    packing, size = tensor.dense.packing, tensor.dense.count_bytes()[0]
    apart = size if packing.scaled == "vectors" else len(raw)
    return replace(view_tensor(tensor, raw[:apart], raw[apart:]), format=packing.joined)


def _map_file(path: Path, entry: StoredFile) -> mmap.mmap:
    try:
        with open_stream(path) as file:
            if os.fstat(file.fileno()).st_size != entry.bytes:
                raise report_size(path, entry, os.fstat(file.fileno()).st_size)
            return mmap.mmap(file.fileno(), entry.bytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise UserError.of("P508", f"cannot read {path}: {error.strerror}") from None
