"""Weights of a bundle's GGUF file: where matrices lie was found where the bundle was built."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from pi2.arrays import F32, U8
from pi2.engine.loading import read_tokenizer
from pi2.plan.documents.model import Model
from pi2.tokens.table_tokenizer import Coder
from pi2.weights.file_tensor import FileTensor

Key = tuple[str, int]
"""Key of ``model.tensors``, and layer."""


class GgufWeights:
    """What `pi2.weights.gguf_weights.GgufWeights` gives, of a table and a file of vectors."""

    def __init__(self, folder: Path, table: Mapping[str, Any], model: Model) -> None:
        self.model = model
        self.folder = folder
        self.files: Sequence[Path] = [folder / name for name in table["files"]]
        self._tensors: dict[Key, FileTensor] = {
            (entry.pop("key"), entry.pop("layer")): FileTensor(**entry)
            for entry in json.loads(json.dumps(table["tensors"]))
        }
        self._matrices: list[Key] = [(key, layer) for key, layer in table["matrices"]]
        self._vectors: dict[Key, slice] = {
            (key, layer): slice(first, last) for key, layer, first, last in table["vectors"]
        }
        self._numbers: F32 = np.fromfile(folder / table["numbers"], "<f4")
        self._maps: dict[int, U8] = {}
        self._descriptors: dict[int, int] = {}

    def find(self, key: str, layer: int = 0) -> FileTensor | None:
        return self._tensors.get((key, layer))

    def read_vector(self, key: str, layer: int = 0) -> F32 | None:
        found = self._vectors.get((key, layer))
        return None if found is None else self._numbers[found]

    def list_matrices(self) -> Iterator[tuple[str, int, FileTensor]]:
        return ((key, layer, self._tensors[key, layer]) for key, layer in self._matrices)

    def list_experts(self) -> dict[int, list[FileTensor]]:
        found: dict[int, list[FileTensor]] = {}
        for key in ("gate", "up", "down"):
            for layer in range(self.model.shape.layers):
                tensor = self.find(key, layer)
                if tensor is not None and tensor.experts > 1:
                    found.setdefault(layer, []).append(tensor)
        return found

    def map_rows(self, tensor: FileTensor) -> U8:
        if tensor.file not in self._maps:
            with self.files[tensor.file].open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[tensor.file] = np.frombuffer(mapped, np.uint8)
        flat = self._maps[tensor.file][tensor.offset : tensor.offset + tensor.size_bytes]
        return flat.reshape(tensor.rows, tensor.row_bytes)

    def read_rows(self, tensor: FileTensor, rows: Iterable[int]) -> U8:
        if tensor.file not in self._descriptors:
            self._descriptors[tensor.file] = os.open(self.files[tensor.file], os.O_RDONLY)
        descriptor, size = self._descriptors[tensor.file], tensor.row_bytes
        read = [os.pread(descriptor, size, tensor.offset + int(row) * size) for row in rows]
        return np.frombuffer(b"".join(read), np.uint8).reshape(-1, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._maps.clear()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class FileTexts:
    """The folder of the bundle that has the tokenizer."""

    def __init__(self, weights: GgufWeights, cleanup: ExitStack) -> None:
        del cleanup
        self.path = weights.folder
        stats = [(file.name, file.stat().st_size) for file in weights.files]
        self.identity = repr(stats).encode()

    def open_tokenizer(self) -> Coder:
        return read_tokenizer(self.path / "tokenizer.json")
