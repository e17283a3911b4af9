"""The order in which a checkpoint is converted whose files come one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pi2.store.tensors import DenseTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What can be converted when one more file is there."""

    file: Path | None
    """The file that comes; None for what lies in no file, such as zeros."""
    layers: tuple[int, ...]
    """Layers whose neurons lie in this file and in those before it."""
    tensors: tuple[DenseTensor, ...]
    done: tuple[Path, ...]
    """Files that no later step needs."""


def plan_steps(
    files: Sequence[Path],
    layers: Mapping[int, set[Path]],
    tensors: Sequence[tuple[DenseTensor, set[Path]]],
) -> list[Step]:
    """A step for each of the ``files``, in their order, that what is left to convert needs.

    ``layers`` and ``tensors``: what is left, with the files that each needs.
    """
    place = {file: number for number, file in enumerate(files)}

    def find_last(needed: set[Path]) -> int:
        return max((place[file] for file in needed if file in place), default=-1)

    last_use: dict[Path, int] = {}
    for needed in [*layers.values(), *(needed for _, needed in tensors)]:
        last = find_last(needed)
        for file in needed & place.keys():
            last_use[file] = max(last_use.get(file, 0), last)
    return [
        Step(
            file=file,
            layers=tuple(n for n, needed in layers.items() if find_last(needed) == number),
            tensors=tuple(item for item, needed in tensors if find_last(needed) == number),
            done=tuple(other for other, last in last_use.items() if last == number),
        )
        for number, file in enumerate([None, *files], -1)
        if file in last_use or file is None
    ]


def find_most_bytes(steps: Sequence[Step], sizes: Mapping[Path, int]) -> int:
    """Most bytes of files that are there at the same time."""
    held, most = 0, 0
    for step in steps:
        held += 0 if step.file is None else sizes[step.file]
        most = max(most, held)
        held -= sum(sizes[file] for file in step.done)
    return most
