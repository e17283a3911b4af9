"""Which code a bundle has: the modules that a run imports, and what stands in for others."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

import pi2

ROOTS = (
    "pi2.phone.runtime.command",
    "pi2.orchestrator",
    "pi2.sandbox.template",
)
"""What a run begins with, or imports by its name; the module ``backend`` of each backend is one,
too."""

SPARSE_BACKENDS = frozenset({"cpu"})
"""Backends whose executors bundles can have."""
DENSE_BACKENDS = frozenset({"hexagon"})
"""Backends of units beside the executor that they can have."""

REPLACEMENTS: Mapping[str, str] = {
    "pi2.backends.compiler.cache": "pi2.phone.replacements.libraries",
    "pi2.backends.compiler.functions": "pi2.phone.replacements.functions",
    "pi2.backends.hexagon.linkers": "pi2.phone.replacements.linkers",
    "pi2.logging": "pi2.phone.replacements.logs",
    "pi2.sandbox.tokenizer": "pi2.phone.replacements.tokenizers",
}
"""Modules that a bundle has otherwise, and what it has in their place: kernels are found, not
compiled; ctypes calls them, not tvm_ffi; logs are plain lines; tokenizers are read in Python."""

STAND_INS = ("pydantic", "pydantic_core")
"""Packages that small modules of `pi2.phone.stand_ins` stand for."""

LEFT_OUT = frozenset(
    {
        "pi2.engine.file_loading",
        "pi2.plan.authoring.writing",
        "pi2.plan.resolve",
        "pi2.plan.reading.schema_check",
        "pi2.plan.toml.source",
        "pi2.benchmarks.read_kernel",  # compiled by TVM: numpy does it, too
        "pi2.probing.gpus",
        "pi2.refit",
        "pi2.sharing.resolver",
    }
)
"""What only a plan that is read from its text needs, or that runs a GGUF file, or needs TVM."""

PACKAGES = "pi2_phone/packages"
"""Where the code lies in a bundle."""


def list_code(backends: Collection[str]) -> dict[PurePosixPath, Path]:
    """Return the files of code of a bundle with some backends, by their places in it."""
    root = Path(pi2.__file__).parent
    home = PurePosixPath(PACKAGES)
    files: dict[PurePosixPath, Path] = {}
    for module, path in sorted(find_modules(backends).items()):
        place = PurePosixPath(*module.split("."))
        is_package = path.name == "__init__.py"
        name = place / "__init__.py" if is_package else place.with_suffix(".py")
        files[home / name] = path
    for package in STAND_INS:
        folder = root / "phone" / "stand_ins" / package
        for path in sorted(folder.glob("*.py")):
            files[home / package / path.name] = path
    for path in sorted((root / "phone" / "launcher").glob("*.py")):
        files[PurePosixPath("pi2_phone") / path.name] = path
    return files


def find_modules(backends: Collection[str]) -> dict[str, Path]:
    """Return the files of all of pi2's modules that a run with some backends may import, by
    name."""
    waiting = [*ROOTS, *(f"pi2.backends.{name}.backend" for name in sorted(backends))]
    found = dict[str, Path]()
    while waiting:
        name = waiting.pop()
        if name in found or name in LEFT_OUT:
            continue
        path = find_source(REPLACEMENTS.get(name, name))
        if path is None:  # not a module, but something in one
            continue
        found[name] = path
        package = name.rpartition(".")[0]
        waiting += [package] if package else []
        waiting += list_imports(path.read_text(encoding="utf-8"))
    return found


def find_source(module: str) -> Path | None:
    """Return the file of a module of pi2; None for what is none."""
    base = Path(pi2.__file__).parent.joinpath(*module.split(".")[1:])
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def list_imports(source: str) -> Iterator[str]:
    """Yield the modules of pi2 that a source imports, in functions, too; names that it takes from
    them, which may be modules, follow each."""
    for node in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pi2"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pi2"):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _walk(other)
            continue
        yield child
        yield from _walk(child)
