"""What compiling writes: a library, and next to it the parameters of its functions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LIBRARY = ".so"
"""Suffix of libraries for processors; programs of other units have files with their own."""
NO_TOOL = 3
"""Exit status of a compiler that lacks another one, such as CUDA's."""
Kind = Literal["bound", "given", "number"]
"""Arrays that stay the same from call to call, arrays that are given with each, and scalars."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a function."""

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int | str, ...] = ()
    """Lengths of an array, and symbols of lengths that differ from model to model or from call to
    call, such as ``tokens``; empty where any size will do.  Arrays are passed flat."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a compiled function, in the order in which it takes them: bound arrays,
    then what a call gives."""

    bound: tuple[Parameter, ...]
    given: tuple[Parameter, ...]


def arrange(declared: Sequence[Parameter]) -> Signature:
    """Return the signature of a function whose parameters were ``declared`` in some order."""
    names = [parameter.name for parameter in declared]
    assert len(set(names)) == len(names), f"a parameter is declared twice: {names}"
    return Signature(
        bound=tuple(item for item in declared if item.kind == "bound"),
        given=tuple(item for item in declared if item.kind != "bound"),
    )


def find_signatures(library: Path) -> Path:
    return library.with_suffix(".signatures.json")


def write_signatures(signatures: Mapping[str, Signature]) -> str:
    """Return the JSON of a library's functions."""
    content = {
        name: [[p.name, p.kind, p.dtype, p.shape] for p in (*item.bound, *item.given)]
        for name, item in signatures.items()
    }
    return json.dumps(content, indent=1)


def read_signatures(text: str) -> dict[str, Signature]:
    """Read what `write_signatures` wrote."""
    return {
        name: arrange([Parameter(own, kind, dtype, tuple(shape)) for own, kind, dtype, shape in p])
        for name, p in json.loads(text).items()
    }
