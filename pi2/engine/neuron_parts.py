"""What a token computes in a layer of chosen experts, in parts of stored order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pi2.arrays import I32, Bits


class NeuronParts:
    """Stored indices [n] (ascending) in parts of ``size`` each but for the last one; those that
    have been computed are dropped."""

    def __init__(self, indices: I32, size: int) -> None:
        self.indices = indices
        """Of the parts that are left."""
        self.size = size
        self._bounds = [*range(0, len(indices), size), len(indices)]
        self.is_even = True
        """Whether none has been cut in two."""

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def take(self, number: int) -> I32:
        """The part ``number`` of those that are left."""
        return self.indices[self._bounds[number] : self._bounds[number + 1]]

    def join(self, numbers: Sequence[int]) -> I32:
        """The parts ``numbers`` (ascending, at least one), one after the other."""
        first, last = numbers[0], numbers[-1]
        if last - first == len(numbers) - 1:
            return self.indices[self._bounds[first] : self._bounds[last + 1]]
        return np.concatenate([self.take(number) for number in numbers])

    def count_before(self, some: I32) -> list[int]:
        """How many of ``some`` [m] (ascending) come before each part."""
        before: list[int] = some.searchsorted(self.indices.take(self._bounds[:-1])).tolist()
        return before

    def find_any(self, marks: Bits, count: int) -> list[bool]:
        """Whether any neuron of each of the first ``count`` parts is marked: ``marks``
        [neurons]."""
        end = self._bounds[count]
        own = marks.take(self.indices[:end])
        found: list[bool] = np.logical_or.reduceat(own, self._bounds[:count]).tolist()
        return found

    def cut(self) -> None:
        """Cut the first part in two, of more than one neuron."""
        half = self._bounds[1] // 2
        assert half, "a part of one neuron"
        self._bounds.insert(1, half)
        self.is_even = False

    def drop(self, count: int) -> None:
        """Drop the first ``count`` parts."""
        start = self._bounds[count]
        self.indices = self.indices[start:]
        self._bounds = [bound - start for bound in self._bounds[count:]]
