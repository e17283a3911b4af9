"""Plans with what backends say of them: rules, sizes, budgets; here the backends by their names,
imported when they are asked, which loads nothing heavy."""

from __future__ import annotations

import importlib
from importlib.resources import files
from typing import TYPE_CHECKING, cast

from pi2.plan.documents.common import list_backend_names

if TYPE_CHECKING:
    from pi2.backends.protocol import (
        Backend,
        ExecutorBackend,
        GraphBackend,
        Preparer,
        ProgramBackend,
        TextBackend,
        UnitBackend,
        WholeBackend,
    )
    from pi2.plan.documents.device import UnitKind

_PACKAGE = "pi2.backends"


def find_backend(name: str) -> Backend:
    """Import the module of a backend, which imports nothing heavy itself."""
    return cast("Backend", importlib.import_module(f"{_PACKAGE}.{name}.backend"))


def read_fixed(name: str) -> dict[str, tuple[object, ...]]:
    """Keys of a plan that change nothing in a model that a backend computes, with the values that
    they may have, the computed one first; None stands for an absent key."""
    import tomli  # bundles for phones have none

    file = files(f"{_PACKAGE}.{name}") / "backend.toml"
    stated = tomli.loads(file.read_text("utf-8"))["fixed"] if file.is_file() else {}
    return {key: tuple(map(_read_value, values)) for key, values in stated.items()}


def _read_value(value: object) -> object:
    """A value of a plan as documents have it."""
    if value == "<absent>":
        return None
    return tuple(value) if isinstance(value, list) else value


def find_executor_backend(name: str) -> ExecutorBackend | None:
    """Import the module of a backend that computes whole models; None if it does not."""
    backend = find_backend(name)
    return cast("ExecutorBackend", backend) if hasattr(backend, "build") else None


def find_program_backend(name: str) -> ProgramBackend:
    """Import the module of a backend that runs a file's program."""
    return cast("ProgramBackend", find_backend(name))


def find_preparer(name: str) -> Preparer | None:
    """Import the module of a backend that prepares before memory is filled; None if it does not."""
    backend = find_backend(name)
    return cast("Preparer", backend) if hasattr(backend, "prepare") else None


def list_usual_backends() -> dict[UnitKind, str]:
    """The backend that serves each kind of unit unless a plan says otherwise, by the kind."""
    return {kind: name for name in list_backend_names() for kind in find_backend(name).KINDS}


def find_unit_backend(name: str) -> UnitBackend | None:
    """Import the module of a backend that serves units next to an executor; None if it does not."""
    backend = find_backend(name)
    return cast("UnitBackend", backend) if hasattr(backend, "build_unit") else None


def find_graph_backend(name: str) -> GraphBackend | None:
    """Import the module of a backend whose programs have fixed shapes; None if they have not."""
    backend = find_backend(name)
    return cast("GraphBackend", backend) if hasattr(backend, "list_graphs") else None


def find_whole_backend(name: str) -> WholeBackend | None:
    """Import the module of a backend whose units have whole models in their memory, or None."""
    backend = find_backend(name)
    return cast("WholeBackend", backend) if hasattr(backend, "build_whole") else None


def find_text_backend(name: str) -> TextBackend | None:
    """Import the module of a backend that drives a program which gives text, or None."""
    backend = find_backend(name)
    return cast("TextBackend", backend) if hasattr(backend, "WEIGHTS") else None


def find_alone_backend(name: str) -> WholeBackend | TextBackend | None:
    """Import the module of a backend whose units have whole models, with any kind of output."""
    return find_whole_backend(name) or find_text_backend(name)
