"""Measure the size of the house, and hold it to limits that only fall.

python tools/measure_house.py            print figures and limits
python tools/measure_house.py --lower    write figures below their limits as new limits
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tests" / "house.toml"
PRODUCT = ("pi2", "backends")
MANY_PARAMETERS = 8
"""A function with as many parameters, ``self`` not counted, is counted."""


def measure_house(root: Path = ROOT) -> dict[str, int]:
    """Figures of the house by the names that `LIMITS` has."""
    product = read_modules(root, PRODUCT)
    tests = read_modules(root, ("tests",))
    return {
        "product_lines": sum(text.count("\n") for text in product.values()),
        "product_files": len(product),
        "test_lines": sum(text.count("\n") for text in tests.values()),
        "long_parameter_lists": sum(count_long_lists(text) for text in product.values()),
    }


def read_modules(root: Path, rooms: Iterable[str]) -> dict[str, str]:
    """Texts of the modules of ``rooms`` by their dotted names; links are not followed."""
    found: dict[str, str] = {}
    for room in rooms:
        for path in sorted(list_files(root / room)):
            parts = path.relative_to(root).with_suffix("").parts
            parts = ("pi2", *parts) if parts[0] == "backends" else parts
            found[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def list_files(folder: Path) -> Iterator[Path]:
    """Python files below ``folder``, those behind symbolic links left out."""
    for path in folder.iterdir():
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from list_files(path)
        elif path.suffix == ".py":
            yield path


def count_long_lists(text: str) -> int:
    """Functions in ``text`` with `MANY_PARAMETERS` parameters or more."""
    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return sum(count_parameters(node.args) >= MANY_PARAMETERS for node in functions)


def count_parameters(arguments: ast.arguments) -> int:
    """Parameters without ``self`` and ``cls``; ``*args`` is one, ``**kwargs`` none."""
    plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [argument.arg for argument in plain if argument.arg not in ("self", "cls")]
    return len(names) + (arguments.vararg is not None)


def find_circle(modules: Mapping[str, str]) -> list[str] | None:
    """Modules that import each other in a circle when they are imported; None without one."""
    graph = {name: set(list_imports(name, text, modules)) for name, text in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def list_imports(name: str, text: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Modules of ``modules`` that ``text`` imports outside of functions and type checking."""
    for node in list_top_nodes(ast.parse(text).body):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [long if long in modules else node.module for long in whole]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (found for found in names if found in modules and found != name)


def list_top_nodes(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.If | ast.Try):
            yield from list_top_nodes(node.body)
        else:
            yield node


def read_limits(path: Path = LIMITS) -> dict[str, int]:
    """The most that each figure may be."""
    return {str(key): int(value) for key, value in tomllib.loads(path.read_text()).items()}


def write_limits(limits: Mapping[str, int], path: Path = LIMITS) -> None:
    """Write limits in their order, after the remarks that the file begins with."""
    remarks = [line for line in path.read_text().splitlines() if line.startswith("#")]
    rows = [f"{name} = {value}" for name, value in limits.items()]
    path.write_text("\n".join([*remarks, *rows]) + "\n")


def main() -> int:
    """Print figures and limits; 1 if a figure is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower the limits to the figures")
    options = parser.parse_args()
    figures, limits = measure_house(), read_limits()
    for name, figure in figures.items():
        print(f"{name:22} {figure:>8}  limit {limits[name]}")
    if options.lower:
        write_limits({name: min(figures[name], limits[name]) for name in limits})
    return int(any(figures[name] > limits[name] for name in figures))


if __name__ == "__main__":
    sys.exit(main())
