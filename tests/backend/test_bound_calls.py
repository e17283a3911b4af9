"""Arrays are bound to compiled functions by name, once; a call gives what is left."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.backends.compiler.runtime import Library
from tests.helpers.kernels import allocate

NUMBERS = np.arange(12, dtype=np.float32)


class Program:
    """Two functions: their parameters are declared in another order than they are called in."""

    @property
    def target(self) -> Any:
        from pi2.backends.compiler.compile import make_target

        return make_target()

    def list_functions(self) -> dict[str, Any]:
        from tvm.tirx.script import builder as T

        from pi2.backends.compiler import vectors as v

        def scale(take: Any) -> None:
            count = take.take_number("count")
            source = take.take_given_array("source", "float32")
            target = take.take_array("target", "float32", "rows", 4)
            factor = take.take_number("factor", "float32")
            offsets = take.take_array("offsets", "float32", 1)
            with T.serial(count) as place:
                v.store(target, place, source[place] * factor + offsets[0], 1)

        return {"scale": scale, "again": scale}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pi2.backends.compiler.compile import compile_library

    output = tmp_path_factory.mktemp("library") / "bound.so"
    compile_library(Program(), output, lambda _label, _share: None)
    return output


@pytest.fixture
def library(path: Path) -> Library:
    return Library(path, {"rows": 3})


def make_arrays(library: Library, **changes: Any) -> dict[str, Any]:
    arrays = {"target": allocate("float32", 3, 4), "offsets": allocate("float32", 1), **changes}
    kept.append(arrays)
    return {name: library.wrap(array) for name, array in arrays.items()}


kept: list[dict[str, Any]] = []
"""Views do not keep arrays."""


def test_a_call_gives_scalars_and_arrays_that_change(library: Library) -> None:
    call = library.bind("scale", "count source factor", make_arrays(library))
    target, source = kept[-1]["target"], allocate("float32", 12)
    kept[-1]["offsets"][0] = 5.0
    source[:] = NUMBERS
    call(7, source, 2.0)
    assert target.reshape(-1).tolist() == [*(NUMBERS[:7] * 2 + 5).tolist(), *[0.0] * 5]


def test_the_first_mapping_with_a_name_counts(library: Library) -> None:
    others = make_arrays(library)
    own = {"target": make_arrays(library)["target"]}
    target = kept[-1]["target"]
    library.bind("scale", "count source factor", own, others)(3, NUMBERS, 1.0)
    assert target[0].tolist() == [0.0, 1.0, 2.0, 0.0]
    assert not kept[-2]["target"].any()


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ("count factor source", {}, "is given"),
        ("count source", {}, "is given"),
        ("count source factor", {"target": None}, "scale needs an array target"),
        (
            "count source factor",
            {"target": allocate("int32", 12)},
            "target of scale: int32 instead of float32",
        ),
        ("count source factor", {"target": allocate("float32", 8)}, "8 elements where"),
        ("count source factor", {"offsets": allocate("float32", 2)}, "2 elements where"),
    ],
)
def test_mistakes_are_found_when_arrays_are_bound(
    library: Library, given: str, changes: dict[str, Any], message: str
) -> None:
    absent = [name for name, array in changes.items() if array is None]
    arrays = make_arrays(library, **{k: v for k, v in changes.items() if v is not None})
    for name in absent:
        del arrays[name]
    with pytest.raises(AssertionError, match=message):
        library.bind("scale", given, arrays)


def test_names_are_declared_once() -> None:
    from pi2.backends.compiler.vectors import make_bindable_function

    def declare_twice(take: Any) -> None:
        take.take_number("count")
        take.take_array("count", "float32")

    with pytest.raises(AssertionError, match="declared twice"):
        make_bindable_function("twice", declare_twice)
