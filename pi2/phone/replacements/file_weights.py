"""Weights of a bundle's GGUF file: the build of the bundle has found the places of its matrices."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.engine.loading import read_tokenizer
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress
from pi2.tokens.table_tokenizer import Coder
from pi2.weights.file_tensor import FileTensor, TensorFiles

Key = tuple[str, int, int]
"""Key of ``model.tensors``, layer and mixer."""
_ORDERS = ("order", "columns")


class GgufWeights(TensorFiles):
    """What `pi2.weights.gguf_weights.GgufWeights` gives, of a table and a file of vectors."""

    def __init__(self, folder: Path, table: Mapping[str, Any], model: Model) -> None:
        super().__init__([folder / name for name in table["files"]], model)
        self.folder = folder
        self._keys = frozenset[str](table["keys_of_vectors"])
        self._tensors: dict[Key, FileTensor] = {
            (key, layer, mixer): _read_tensor(values)
            for key, layer, mixer, values in table["tensors"]
        }
        self._vectors: dict[Key, slice] = {
            (key, layer, mixer): slice(first, last)
            for key, layer, mixer, first, last in table["vectors"]
        }
        self._numbers: F32 = np.fromfile(folder / table["numbers"], "<f4")

    @property
    def vectors(self) -> frozenset[str]:
        return self._keys

    def find(self, key: str, layer: int = 0, mixer: int = 0) -> FileTensor | None:
        return self._tensors.get((key, layer, mixer))

    def read_vector(self, key: str, layer: int = 0, mixer: int = 0) -> F32 | None:
        found = self._vectors.get((key, layer, mixer))
        return None if found is None else self._numbers[found]

    def check_once(self, progress: Progress = ignore_progress) -> None:
        """The numbers were checked where the bundle was built."""

    def list_matrices(self) -> Iterator[tuple[str, int, FileTensor]]:
        names = set[str]()
        for (key, layer, _), tensor in self._tensors.items():
            if tensor.all_rows > 1 and tensor.name not in names:
                names.add(tensor.name)
                yield key, layer, tensor


def _read_tensor(values: Mapping[str, Any]) -> FileTensor:
    orders = {name: np.array(values[name]) for name in _ORDERS if values[name] is not None}
    return FileTensor(**{**values, "scales": tuple(values["scales"]), **orders})


class FileTexts:
    """The folder of the bundle that has the tokenizer."""

    is_synthetic = False

    def __init__(self, weights: GgufWeights, cleanup: ExitStack) -> None:
        del cleanup
        self.path = weights.folder
        stats = [(file.name, file.stat().st_size) for file in weights.files]
        self.identity = repr(stats).encode()

    def open_tokenizer(self) -> Coder:
        return read_tokenizer(self.path / "tokenizer.json")
