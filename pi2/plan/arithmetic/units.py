"""What a backend is asked about a unit of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.plan.documents.backends import find_graph_backend

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.arithmetic.rows import DividedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """What a backend is asked about: a plan's model, and what a unit has of it."""

    resolved: ResolvedPlan
    unit: str
    """The unit's name."""
    neurons: tuple[int, ...] | None
    """Neurons of each layer that it keeps beside an executor; None where it is the executor."""
    rows: DividedRows | None
    """Rows of projections and of the head that it has, if any."""
    streams: bool
    """Whether it is given neurons that come from flash, while a prompt is processed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """A program of fixed shape that a unit runs for a part of a layer."""

    tokens: int
    neurons: int
    own_bytes: int
    """Bytes that it keeps while it runs."""


def list_wanted(resolved: ResolvedPlan, name: str) -> tuple[int, ...]:
    """Numbers of neurons that a unit computes of some layer in steps, ascending."""
    shares = [layer.dense for layer in resolved.layers]
    own = [share for share in shares if share is not None and share.unit == name]
    return tuple(sorted({count for share in own for count in share.by_sequences}))


def describe_unit(resolved: ResolvedPlan, name: str) -> UnitFacts:
    """What a unit of the plan has to do."""
    kept, rows = None, resolved.divided_rows
    if name != resolved.sparse_unit:
        kept = tuple(
            0 if layer.dense is None or layer.dense.unit != name else layer.dense.kept
            for layer in resolved.layers
        )
    return UnitFacts(
        resolved=resolved,
        unit=name,
        neurons=kept,
        rows=rows if rows is not None and rows.unit == name else None,
        streams=resolved.plan.prefill.unit == name,
    )


def list_graph_tokens(resolved: ResolvedPlan, name: str) -> tuple[int, ...]:
    """Numbers of tokens that the graphs of a unit have, ascending; none where its backend computes
    any number."""
    backend = find_graph_backend(resolved.name_backend(name))
    return () if backend is None else backend.list_graph_tokens(describe_unit(resolved, name))


def pad_tokens(count: int, graphs: Sequence[int]) -> int:
    """Tokens that graphs of ascending numbers of tokens compute for a job of ``count``: as many of
    the largest as fit, then the smallest that holds the rest."""
    if not graphs:
        return count
    whole, rest = divmod(count, graphs[-1])
    return whole * graphs[-1] + next(tokens for tokens in (0, *graphs) if tokens >= rest)
