"""The house only shrinks, and no import goes in a circle."""

import pytest

from tools.measure_house import (
    ROOT,
    count_long_lists,
    find_circle,
    measure_house,
    read_limits,
    read_modules,
)


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    return measure_house(ROOT)


@pytest.mark.parametrize("name", sorted(read_limits()))
def test_figure_is_within_its_limit(figures: dict[str, int], name: str) -> None:
    """Pay an addition with a simplification; then `tools/measure_house.py --lower`."""
    assert figures[name] <= read_limits()[name]


def test_no_module_imports_itself_in_a_circle() -> None:
    assert find_circle(read_modules(ROOT, ("pi2", "backends"))) is None


def test_a_circle_is_found() -> None:
    modules = {"a": "import b", "b": "from c import x", "c": "import a", "d": "import a"}
    circle = find_circle(modules)
    assert circle is not None and set(circle) == {"a", "b", "c"}


def test_imports_for_types_and_inside_functions_make_no_circle() -> None:
    late = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\ndef f():\n    import b"
    )
    assert find_circle({"a": late, "b": "import a"}) is None


def test_long_parameter_lists_are_counted_without_self() -> None:
    eight = "def f(a, b, c, d, e, *, g, h, i): ..."
    seven = "class C:\n    def f(self, a, b, c, d, e, f, g, **rest): ..."
    assert count_long_lists(eight) == 1
    assert count_long_lists(seven) == 0
