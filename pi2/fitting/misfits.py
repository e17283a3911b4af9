"""Whether a plan fits this machine (P3xx) and its neuron store (P5xx)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting import find_backend, find_text_backend
from pi2.machine import Machine, list_allowed_cores
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device, Unit
from pi2.plan.documents.plan_units import list_cores
from pi2.plan.documents.quantities import compare_bytes, write_most

if TYPE_CHECKING:
    from pi2.fitting.check import Report

_ELSEWHERE = "run it on such a machine, or take a plan that fits this one: `pi2 doctor` lists them"


def find_plan_misfits(resolved: ResolvedPlan, machine: Machine) -> list[Diagnostic]:
    """Reasons why a plan cannot run on ``machine``; without compiled kernels there are none."""
    backends = [find_backend(name) for name in resolved.list_backends()]
    found = find_misfits(
        resolved.device,
        machine,
        resolved.source.count_budget(resolved),
        threads=resolved.plan.threads.compute,
        bound=list_cores(resolved.plan.threads.cores or ""),
        native=any(backend.NATIVE for backend in backends),
    )
    return locate_findings(found, resolved.path) if found else []


def check_fit(resolved: ResolvedPlan, machine: Machine) -> None:
    """UserError P3xx if the plan's device is not this machine."""
    found = find_plan_misfits(resolved, machine)
    errors = tuple(finding for finding in found if finding.severity == "error")
    if errors:
        raise UserError(errors, exit_code=2)


def find_processor_misfits(resolved: ResolvedPlan, machine: Machine) -> list[Diagnostic]:
    """What keeps the kernels of a plan's processor from running on ``machine``: P301 and P302."""
    unit = resolved.device.units[resolved.sparse_unit]
    return list(_check_processor(resolved.device.id, unit, machine))


def find_misfits(
    device: Device,
    machine: Machine,
    budget_bytes: int,
    *,
    threads: int | None = None,
    bound: Sequence[int] = (),
    native: bool = True,
) -> list[Diagnostic]:
    """Reasons why a plan for ``device`` cannot run on ``machine`` (P301 to P306).

    Values that the document leaves open are the machine's and so fit. ``budget_bytes`` is the
    plan's budget, ``threads`` its compute threads, if stated, and ``bound`` the cores that they are
    bound to; ``native`` says whether it uses compiled kernels. Errors mean that the plan cannot run
    here; warnings that it will run, but not as it was planned."""
    found: list[Diagnostic] = []
    for unit in device.units.values():
        if unit.kind == "cpu" and native:
            found += _check_processor(device.id, unit, machine)
            found += _check_cores(unit, machine, threads)
            found += _check_bound(bound)
    found += _check_memory(machine, budget_bytes)
    return found


def _check_processor(device: str, unit: Unit, machine: Machine) -> Iterator[Diagnostic]:
    """Compare instruction sets; features say nothing where the architecture already differs."""
    if unit.architecture not in (None, machine.architecture):
        yield Diagnostic(
            code="P301",
            message=f"device {device!r} has an {unit.architecture} processor,"
            f" this machine has {machine.architecture}",
            help=_ELSEWHERE,
            path="device",
        )
        return
    missing = sorted(set(unit.features or ()) - machine.features)
    if missing:
        yield Diagnostic(
            code="P302",
            message=f"this machine's processor lacks {', '.join(missing)},"
            f" which device {device!r} states",
            help=_ELSEWHERE,
            path="device",
        )


def _check_cores(unit: Unit, machine: Machine, threads: int | None) -> Iterator[Diagnostic]:
    wanted = threads or sum(cluster.cores for cluster in unit.clusters)
    if wanted > machine.cores:
        yield Diagnostic(
            code="P304",
            severity="warning",
            message=f"the plan uses {wanted} compute threads, this process has"
            f" {machine.cores} core{'s' if machine.cores > 1 else ''}",
            help=f"set threads.compute = {machine.cores}",
            path="threads.compute",
        )


def _check_bound(bound: Sequence[int]) -> Iterator[Diagnostic]:
    if not bound:
        return
    allowed = list_allowed_cores()
    missing = sorted(set(bound) - set(allowed))
    if missing:
        which = ", ".join(map(str, allowed)) if allowed else "none: this system binds no threads"
        yield Diagnostic(
            code="P306",
            message=f"core {missing[0]} is not for this process to use",
            help=f"name other cores ({which}), or leave threads.cores out",
            path="threads.cores",
        )


def _check_memory(machine: Machine, budget_bytes: int) -> Iterator[Diagnostic]:
    memory = machine.memory
    if 0 < memory.limit_bytes <= budget_bytes - 4096:  # groups round their limits down to pages
        wanted, limit = compare_bytes(budget_bytes, memory.limit_bytes)
        kind = "installed" if memory.limit_bytes == memory.installed_bytes else "allowed here"
        yield Diagnostic(
            code="P303",
            message=f"the plan's budget is {wanted}, {limit} of memory is {kind}",
            help=f"--memory '{write_most(memory.limit_bytes)}' fits the plan to it",
            path="memory.budget",
        )
    elif memory.limit_bytes and budget_bytes > memory.available_bytes:
        wanted, free = compare_bytes(budget_bytes, memory.available_bytes)
        yield Diagnostic(
            code="P305",
            severity="warning",
            message=f"the plan's budget is {wanted}, only {free} of memory is free now",
            help=f"end other programs, or --memory '{write_most(memory.available_bytes)}'",
            path="memory.budget",
        )


def locate_findings(found: list[Diagnostic], path: Path) -> list[Diagnostic]:
    """Add the places in the plan's file; a bundle's plan is no text of the user's."""
    if path.suffix == ".json":
        return found
    from pi2.plan.toml.source import SourceFile, display_path, read_source

    source = read_source(path, display_path(path))
    if not isinstance(source, SourceFile):  # changed or gone since it was loaded
        return found
    return [
        replace(item, span=source.spans.find_value(tuple((item.path or "").split("."))))
        for item in found
    ]


def list_store_findings(report: Report) -> list[Diagnostic]:
    """What a run of a checked plan would refuse about its store, at the places in the plan; nothing
    of a plan that runs dry, which opens no store."""
    resolved = report.resolved
    found: list[Diagnostic] = []
    if resolved is None or not resolved.source.list_stores(resolved):
        return found
    for item in find_store_misfits(resolved):
        path = tuple((item.path or "weights").split("."))
        # Places are looked for where something was found.
        place = item.span or report.files["plan"].spans.find_value(path)
        found.append(replace(item, span=place, path=".".join(path)))
    return found


def find_store_misfits(resolved: ResolvedPlan) -> list[Diagnostic]:
    """Refusals of a run about the store: P502-P506, P508, P520, P605, P689; none without it."""
    from pi2.store.identity import check_files, check_model, find_bundle_misfits
    from pi2.store.manifest import read_manifest

    path = resolved.store_path
    if not path.exists():
        return []
    text = find_text_backend(resolved.name_backend(resolved.sparse_unit))
    try:
        if resolved.source.gives_text and text is not None:
            text.check_weights(path, resolved.model)
            return []
        manifest = read_manifest(path)
        check_model(path, manifest, resolved.model)
        check_files(path, manifest)
    except UserError as error:
        return list(error.diagnostics)
    found = list(find_bundle_misfits(resolved, manifest.bundle))
    tokenizer = path / resolved.model.tokenizer.file
    if not tokenizer.is_file():
        found.append(
            Diagnostic(
                code="P605",
                message=f"the store {path} has no tokenizer {tokenizer.name}",
                help="convert the model again, or copy its tokenizer.json into the store",
                path="weights",
            )
        )
    return found
