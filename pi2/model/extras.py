"""Operators at the end of layers that modules of this folder add, found by listing: ``OPERATORS``.

A model document has their options in ``operators.NAME``; backends that do not declare them refuse
the model.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import pi2.model
from pi2.model.tensor import DenseTensor, Place

if TYPE_CHECKING:
    from pi2.arrays import F32
    from pi2.plan.documents.model import Model

Options = Mapping[str, Any]


class Operator(Protocol):
    """What turns the residual stream after the FFN of every layer."""

    name: str

    def find_fault(self, options: Options) -> str | None:
        """What is wrong with the options of a document; None if nothing is."""

    def list_tensors(self, at: Place, options: Options) -> Iterator[DenseTensor]:
        """Its tensors of a layer: sizes, precision, and what checkpoints call them."""

    def compute(self, x: F32, options: Options, read: Callable[[str], F32]) -> F32:
        """x [T, hidden] after the operator; ``read`` gives a tensor of the layer by its kind,
        float32 [rows, length]."""


@cache
def list_operators() -> Mapping[str, Operator]:
    """All operators that modules of this folder add, by name."""
    names = sorted(item.name for item in pkgutil.iter_modules(pi2.model.__path__))
    modules = (importlib.import_module(f"pi2.model.{name}") for name in names)
    return {own.name: own for module in modules for own in getattr(module, "OPERATORS", ())}


def list_own(model: Model) -> list[tuple[Operator, Options]]:
    """Added operators of a model with their options, in the document's order."""
    return [(list_operators()[name], options) for name, options in model.operators.items()]


def check_operators(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Raise `ValueError` for the first operator that is unknown, or whose options are wrong."""
    for name, options in tables.items():
        if name not in list_operators():
            raise ValueError(f"operators.{name} is no operator: no module of pi2.model adds it")
        fault = list_operators()[name].find_fault(options)
        if fault is not None:
            raise ValueError(f"operators.{name}: {fault}")
    return tables
