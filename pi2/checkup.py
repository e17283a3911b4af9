"""This machine, and the shipped plans that can run on it, for `pi2 doctor`; TVM is not imported."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pi2.backends.gpu.devices import Survey, survey_devices
from pi2.caches import find_cache_folder
from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting import find_alone_backend, find_backend, find_unit_backend
from pi2.fitting.misfits import find_plan_misfits
from pi2.machine import Machine, Storage, detect_machine, inspect_storage, list_hints
from pi2.machine.storage import EMULATORS, Tvm, detect_tvm, find_programs, read_version
from pi2.memory.uring import find_refusal
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.common import list_backend_names
from pi2.plan.documents.device import Unit
from pi2.plan.reading.references import find_shipped_folder
from pi2.refit import read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that pi2 writes to."""

    path: Path
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    """Whether a plan can run on this machine."""

    name: str
    """Its path below the folder of shipped plans."""
    verdict: Literal["runs", "dry run", "cannot run"]
    """A dry run counts what would happen and computes nothing (backend ``null``)."""
    findings: tuple[Diagnostic, ...] = ()
    """Errors keep it from running, warnings do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """Everything that `pi2 doctor` prints."""

    pi2_version: str
    python_version: str
    machine: Machine
    storage: Storage
    """What holds the shipped neuron stores."""
    tvm: Tvm
    emulators: Mapping[str, str | None]
    gpus: Sequence[Survey]
    """What each API finds."""
    kernel_cache: Folder
    backends: Mapping[str, Sequence[str]]
    """By backend, what keeps it from running here."""
    hints: tuple[str, ...] = ()
    """What keeps runs slower than they could be here, and what changes it."""
    only_emulated: frozenset[str] = frozenset()
    """Backends that pi2 was tested with on emulated devices only."""
    emulated: frozenset[str] = frozenset()
    """Backends that find only devices here that the CPU emulates."""
    plans: tuple[PlanVerdict, ...]


def examine_machine() -> Checkup:
    machine = detect_machine()
    folder = find_shipped_folder()
    backends = {name: find_obstacles(name, machine) for name in list_backend_names()}
    uring = find_refusal()
    hints = list_hints(machine) if uring is None else (*list_hints(machine), uring)
    without = {
        emulated: {
            name: find_device_obstacles(name, emulated=emulated)
            for name, found in backends.items()
            if not found
        }
        for emulated in (False, True)
    }
    return Checkup(
        pi2_version=read_version("pi2") or "not installed",
        python_version=platform.python_version(),
        machine=machine,
        hints=tuple(hints),
        storage=inspect_storage(folder / "stores"),
        tvm=detect_tvm(),
        emulators=find_programs(EMULATORS),
        gpus=survey_devices(),
        kernel_cache=inspect_folder(find_cache_folder("kernels")),
        backends={name: found or without[True][name] for name, found in backends.items()},
        emulated=frozenset(
            name for name, found in without[False].items() if found and not without[True][name]
        ),
        only_emulated=frozenset(
            name
            for name, obstacles in backends.items()
            if not any("cannot import" in item for item in obstacles)
            and find_backend(name).ONLY_EMULATED
        ),
        plans=tuple(
            judge_plan(path, path.relative_to(folder).as_posix(), machine, backends)
            for path in sorted(folder.rglob("*.plan.toml"))
        ),
    )


def find_obstacles(name: str, machine: Machine) -> list[str]:
    """What keeps the backend ``name`` from running on ``machine``."""
    try:
        backend = find_backend(name)
    except ImportError as error:
        return [f"cannot import it: {error}"]
    return backend.find_obstacles(frozenset[str](machine.features), machine.architecture)


def find_device_obstacles(name: str, *, emulated: bool) -> list[str]:
    """Why a backend for other devices than the CPU has none, which may be ``emulated``."""
    backend = find_backend(name)
    if not hasattr(backend, "find_unit_obstacles") or len(backend.KINDS) != 1:
        return []
    unit = Unit.model_construct(kind=backend.KINDS[0], emulated=emulated)
    found: list[str] = backend.find_unit_obstacles(unit)
    reasons = "; ".join(reason.partition(" (")[0] for reason in found)  # without what to install
    return [f"no device here: {reasons}"] if found else []


def judge_plan(
    path: Path, name: str, machine: Machine, backends: Mapping[str, Sequence[str]]
) -> PlanVerdict:
    """Validate a plan and hold it against ``machine`` and the obstacles of its backends."""
    try:
        resolved = read_plan(path).resolved
    except UserError as error:
        return PlanVerdict(name=name, verdict="cannot run", findings=error.diagnostics)
    used = resolved.list_backends()
    findings = [
        Diagnostic(code="P320", message=f"backend {backend!r} cannot run here: {obstacle}")
        for backend in sorted(used)
        for obstacle in backends.get(backend, ())
    ]
    findings += find_unit_obstacles(resolved)
    findings += find_plan_misfits(resolved, machine)
    absent = resolved.source.find_absent(resolved)
    if absent is not None:
        findings.append(
            Diagnostic(
                code="P501",
                message=f"{absent} not on this machine",
                help="make it with `pi2 convert`",
                path="weights",
            )
        )
    sparse = resolved.name_backend(resolved.sparse_unit)
    sound = all(finding.severity != "error" for finding in findings)
    return PlanVerdict(
        name=name,
        verdict=find_backend(sparse).VERDICT if sound else "cannot run",
        findings=tuple(findings),
    )


def find_unit_obstacles(resolved: ResolvedPlan) -> list[Diagnostic]:
    """Why a unit with the whole model, or a unit next to the sparse one, cannot be used here."""
    found = []
    whole = resolved.source.whole_units
    for name in (*whole, *resolved.dense_units):
        find = find_alone_backend if name in whole else find_unit_backend
        backend = find(resolved.name_backend(name))
        # The rules of the plan language have seen to it (P265).
        assert backend is not None, name
        obstacles = backend.find_unit_obstacles(resolved.device.units[name])
        if obstacles:
            message = f"the unit {name!r} cannot be used: {'; '.join(obstacles)}"
            found.append(Diagnostic(code="P320", message=message))
    return found


def inspect_folder(path: Path) -> Folder:
    """Whether a folder can be written to, or made."""
    existing = next(place for place in (path, *path.parents) if place.exists())
    return Folder(path=path, writable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK))
