"""Plans with what backends say of them: rules, sizes, budgets; here the backends by their names,
imported when they are asked, which loads nothing heavy, and what units and executors need."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, cast

from pi2.plan.arithmetic.sizes import (
    STAGED_NEURONS,
    STAGING_BUFFERS,
    count_chunk_tokens,
    count_staged_neurons,
    count_stated_threads,
)
from pi2.plan.arithmetic.units import Need, UnitFacts, UnitShare, list_matrices, list_wanted
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
    from pi2.machine import Machine
    from pi2.plan.arithmetic.resolved import ResolvedPlan
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


def count_unit_needs(resolved: ResolvedPlan) -> Mapping[str, Need]:
    """Bytes that each dense unit needs, and one that has the whole model, by its name, as its
    backend says; units whose backends serve no such units are left out."""
    needs = {}
    for name in resolved.source.whole_units:
        whole = find_alone_backend(resolved.name_backend(name))
        assert whole is not None, name
        needs[name] = whole.need_unit_memory(describe_unit(resolved, name))
    for name in resolved.dense_units:
        backend = find_unit_backend(resolved.name_backend(name))
        if backend is not None:
            needs[name] = backend.need_unit_memory(describe_unit(resolved, name))
    return needs


def _find_sparse_backend(resolved: ResolvedPlan) -> ExecutorBackend:
    """The sparse unit's backend; any other if the plan names none that computes models."""
    unit = resolved.sparse_unit
    name = resolved.find_backend(unit) or "cpu"
    backend = find_executor_backend(name) or find_executor_backend("cpu")
    assert backend is not None, "the CPU's backend computes models"
    return backend


def count_arrays(
    resolved: ResolvedPlan,
    machine: Machine | None = None,
    threads: int | None = None,
    *,
    chunks: int = 1,
) -> Mapping[str, int]:
    """Bytes that an executor takes by segment, on ``machine`` or on any that the device may be;
    ``threads`` where none are stated."""
    unit = resolved.device.units.get(resolved.sparse_unit)
    architecture: str | None = None if unit is None else unit.architecture
    features: Collection[str] | None = None if unit is None else unit.features
    if machine is not None:
        architecture = architecture or machine.architecture
        features = machine.features if features is None else features
    return _find_sparse_backend(resolved).count_segments(
        resolved,
        threads=count_stated_threads(resolved) or threads,
        chunks=chunks,
        architecture=architecture,
        features=features,
    )


def count_staging(resolved: ResolvedPlan) -> int:
    return STAGING_BUFFERS * count_staged_neurons(resolved) * resolved.bundle.stride


def count_threads(resolved: ResolvedPlan, machine: Machine) -> int:
    """Compute threads of a run on ``machine``: as stated, else its cores, as far as the workspace
    has room for them."""
    stated = count_stated_threads(resolved)
    if stated is not None:
        return stated
    room = resolved.plan.memory.segments.workspace - count_staging(resolved)

    def fits(count: int) -> bool:
        return count_arrays(resolved, machine, count, chunks=resolved.chunks)["workspace"] <= room

    return next(filter(fits, range(machine.cores, 1, -1)), 1)


def describe_unit(resolved: ResolvedPlan, name: str) -> UnitFacts:
    """What the backend of a unit is asked about."""
    if name == resolved.sparse_unit:
        return UnitFacts(resolved=resolved, unit=name, share=None)
    plan, model, rows = resolved.plan, resolved.model, resolved.divided_rows
    settings, owners = plan.units.get(name), [layer.dense for layer in resolved.layers]
    share = UnitShare(
        unit=resolved.device.units[name],
        model=model,
        bundle=resolved.bundle,
        neurons=tuple(0 if own is None or own.unit != name else own.kept for own in owners),
        wanted=list_wanted(resolved, name),
        graphs=None if settings is None else settings.graphs,
        matrices={} if rows is None or rows.unit != name else list_matrices(model, rows),
        chunk=count_chunk_tokens(plan),
        jobs=resolved.chunks,
        stretch=min(model.layer_neurons, STAGED_NEURONS),
    )
    return UnitFacts(resolved=resolved, unit=name, share=share)


def list_graph_tokens(resolved: ResolvedPlan, name: str) -> tuple[int, ...]:
    """Numbers of tokens of a unit's graphs, ascending; none if its backend computes any number."""
    backend = find_graph_backend(resolved.name_backend(name))
    return () if backend is None else backend.list_graph_tokens(describe_unit(resolved, name))
