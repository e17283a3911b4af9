"""Code of a bundle: the modules that a run imports, and replacements of others."""

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from pkgutil import iter_modules
from typing import Literal, cast, get_args

import pi2
import pi2.formats
from pi2.diagnostics import UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import IsaFeature

ROOTS = ("pi2.phone.runtime.command", "pi2.orchestrator", "pi2.sandbox.template")
"""Modules that a run starts with or imports by name; backends and formats are added."""

SPARSE_BACKENDS = frozenset({"cpu", "blocks"})
"""Backends whose executors bundles can have."""
DENSE_BACKENDS = frozenset({"hexagon"})
"""Backends of units next to the executor that they can have."""

REPLACEMENTS: Mapping[str, str] = {
    "pi2.backends.compiler.cache": "pi2.phone.replacements.libraries",
    "pi2.backends.compiler.functions": "pi2.phone.replacements.functions",
    "pi2.backends.hexagon.linkers": "pi2.phone.replacements.libraries",
    "pi2.sandbox.tokenizer": "pi2.phone.runtime.tokenizer",
    "pi2.weights.gguf_weights": "pi2.phone.replacements.file_weights",
}
"""Modules of pi2 and their replacements in a bundle."""

STAND_INS = ("pydantic", "pydantic_core")
"""Packages that small modules of `pi2.phone.stand_ins` stand for."""

LEFT_OUT = frozenset(
    {
        "pi2.authoring.writing",
        "pi2.fitting.check",
        "pi2.plan.reading.references",
        "pi2.plan.reading.schema_check",
        "pi2.plan.toml.source",
        "pi2.measuring.read_kernel",  # compiled by TVM: numpy does it, too
        "pi2.probing.gpus",
        "pi2.refit",
    }
)
"""What only a plan that is read from its text needs, or needs TVM."""

PACKAGES = "pi2_phone/packages"
"""Place of the code in a bundle."""


def list_code(backends: Collection[str]) -> dict[PurePosixPath, Path]:
    root = Path(pi2.__file__).parent
    home = PurePosixPath(PACKAGES)
    files: dict[PurePosixPath, Path] = {}
    for module, path in sorted(find_modules(backends).items()):
        place = PurePosixPath(*module.split("."))
        is_package = path.name == "__init__.py"
        name = place / "__init__.py" if is_package else place.with_suffix(".py")
        files[home / name] = path
        if (data := path.with_suffix(".toml")).is_file():
            files[home / name.with_suffix(".toml")] = data
    for package in STAND_INS:
        folder = root / "phone" / "stand_ins" / package
        for path in sorted(folder.glob("*.py")):
            files[home / package / path.name] = path
    for path in sorted((root / "phone" / "launcher").glob("*.py")):
        files[PurePosixPath("pi2_phone") / path.name] = path
    return files


def find_modules(backends: Collection[str]) -> dict[str, Path]:
    """Files of pi2's modules that a run with some backends may import, by name."""
    waiting = [*ROOTS, *(f"pi2.backends.{name}.backend" for name in sorted(backends))]
    waiting += [f"pi2.formats.{own.name}" for own in iter_modules(pi2.formats.__path__)]
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
    """Return the file of a module of pi2; None if it is none."""
    base = Path(pi2.__file__).parent.joinpath(*module.split(".")[1:])
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def list_imports(source: str) -> Iterator[str]:
    """Modules of pi2 that a source imports, each followed by names that may be modules."""
    for node in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("pi2"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pi2"):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _walk(other)
            continue
        yield child
        yield from _walk(child)


Triple = Literal["x86_64-linux-gnu", "aarch64-linux-gnu", "aarch64-linux-android"]
"""A machine by LLVM's name."""
Architecture = Literal["x86-64", "aarch64"]

ARCHITECTURES: Mapping[Triple, Architecture] = {
    "x86_64-linux-gnu": "x86-64",
    "aarch64-linux-gnu": "aarch64",
    "aarch64-linux-android": "aarch64",
}
USUAL_FEATURES: Mapping[Architecture, tuple[IsaFeature, ...]] = {
    "x86-64": ("avx2", "f16c", "fma"),
    "aarch64": ("dotprod", "fp16", "neon"),
}
"""Features used if device and user state none: Haswell (2013) and Cortex-A76 (2018)."""
USUAL_THREADS = 4
"""The big cores of most phones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a bundle is to run on."""

    triple: Triple
    features: tuple[IsaFeature, ...] | None = None
    """Features that kernels may use; None: the plan's device's, else the usual ones."""
    threads: int | None = None
    """Compute threads; None: the plan's, else the cores of its device, else four."""
    probe: bool = True
    """Whether the bundle has the kernels that its probe times."""


def aim_plan(resolved: ResolvedPlan, wish: Wish) -> ResolvedPlan:
    """The plan with everything stated that a run asks the machine for; UserError P673 for other
    architectures, unsupported units or draft models."""
    architecture = ARCHITECTURES[wish.triple]
    unit = resolved.device.units[resolved.sparse_unit]
    _check_units(resolved)
    speculation = resolved.plan.decode.speculation
    if speculation is not None and ("decode", "speculation", "drafts") in resolved.derived:
        other = speculation.model_copy(update={"drafts": "prompt"})
        decode = resolved.plan.decode.model_copy(update={"speculation": other})
        plan = resolved.plan.model_copy(update={"decode": decode})
        resolved = replace(resolved, plan=plan, draft=None)
    if resolved.draft is not None:
        raise UserError.of(
            "P673",
            "bundles have one model, and this plan drafts with another one",
            help='write decode.speculation.drafts = "prompt" or "resident" without a plan',
        )
    if unit.architecture not in (None, architecture):
        raise UserError.of(
            "P673",
            f"the plan's device {resolved.device.id!r} has an {unit.architecture} processor, the"
            f" target {wish.triple} is {architecture}",
            help="choose the other target, or a plan for such a device",
        )
    features = wish.features or unit.features or USUAL_FEATURES[architecture]
    cores = sum(cluster.cores for cluster in unit.clusters)
    threads = wish.threads or resolved.plan.threads.compute or cores or USUAL_THREADS
    aimed = unit.model_copy(
        update={"architecture": architecture, "features": tuple(sorted(features))}
    )
    units = {**resolved.device.units, resolved.sparse_unit: aimed}
    settings = resolved.plan.threads.model_copy(update={"compute": threads})
    return replace(
        resolved,
        plan=resolved.plan.model_copy(update={"threads": settings, "weights": "store"}),
        device=resolved.device.model_copy(update={"units": units}),
    )


def _check_units(resolved: ResolvedPlan) -> None:
    allowed = {resolved.sparse_unit: SPARSE_BACKENDS}
    allowed |= dict.fromkeys(resolved.dense_units, DENSE_BACKENDS)
    backends = {name: resolved.name_backend(name) for name in allowed}
    wrong = {name: backend for name, backend in backends.items() if backend not in allowed[name]}
    if wrong:
        listed = ", ".join(f"{name} ({backend})" for name, backend in wrong.items())
        raise UserError.of(
            "P673",
            f"bundles run on a processor and a Hexagon NPU, the plan gives work to {listed}",
            help="build a plan whose split names only these; `pi2 plan` finds one",
        )


def parse_features(text: str | None, triple: Triple) -> tuple[IsaFeature, ...] | None:
    """Features of a list such as ``neon,dotprod``; UserError P673 for unknown ones."""
    if text is None:
        return None
    names, known = {item.strip() for item in text.split(",")}, get_args(IsaFeature)
    if unknown := sorted(names - set(known)):
        raise UserError.of(
            "P673",
            f"no kernels know a feature {unknown[0]!r} of {triple}",
            help=f"known are {', '.join(known)}",
        )
    return cast("tuple[IsaFeature, ...]", tuple(sorted(names)))
