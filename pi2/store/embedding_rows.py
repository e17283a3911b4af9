"""Rows of an embedding that are read when their tokens come: that of the model, or those that its
layers have of their own.

A token needs one row of it, a few KiB of what may be hundreds of MiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from pi2.arrays import I32, U8
from pi2.backends.protocol import Tensor
from pi2.diagnostics import UserError
from pi2.plan.weights.tensor_names import EMBEDDING
from pi2.regular_file import open_regular
from pi2.store.dense_reader import count_bytes, read_bytes, view_tensor
from pi2.store.manifest import DENSE_FILE
from pi2.store.reader import NeuronStore


class EmbeddingRows:
    """Stands for an embedding of a store: ``tensor`` has room for some of its rows."""

    def __init__(
        self,
        store: NeuronStore,
        allocate: Callable[[int], U8],
        *,
        rows: int,
        name: str = EMBEDDING,
    ) -> None:
        """``allocate(size)`` gives uint8 [size]; ``rows``: most tokens of a ``load``; ``name``: the
        tensor's.  UserError P508 if the store's file cannot be opened."""
        stored = next(tensor for tensor in store.manifest.tensors if tensor.name == name)
        self._stored_rows = stored.rows
        some = stored.model_copy(update={"rows": rows})
        weights_bytes, scales_bytes = count_bytes(some)
        region = allocate(weights_bytes + scales_bytes)
        self._weights = region[:weights_bytes].reshape(rows, -1)
        self._scales = region[weights_bytes:].reshape(rows, -1)
        self._offsets = (stored.weights_offset, stored.scales_offset)
        self._path = store.path / DENSE_FILE
        self.tensor: Tensor = view_tensor(some, region[:weights_bytes], region[weights_bytes:])
        """The rows of the last ``load``, in the order of its tokens."""
        self._numbers = np.arange(rows, dtype=np.int32)
        try:
            self._fd = open_regular(self._path)
        except OSError as error:
            raise UserError.of("P508", f"cannot read {self._path}: {error.strerror}") from None
        if hasattr(os, "posix_fadvise"):
            # What lies beside a row is that of some other token.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def load(self, tokens: I32) -> I32:
        """Read the rows of ``tokens`` [n] and return where they are in ``tensor``, [n]; tokens that
        the table does not have are given its first row.

        Raises UserError P506 if the file is too short by now, P508 if it cannot be read.
        """
        known = np.where(tokens < self._stored_rows, tokens, 0)
        for place, token in enumerate(known.tolist()):
            for rows, offset in zip((self._weights, self._scales), self._offsets, strict=True):
                row = rows[place]
                read_bytes(self._fd, self._path, row, offset + token * len(row), forget=False)
        return self._numbers[: len(tokens)]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
