"""What a model needs before its memory is filled: an open store, and compiled kernels.

Compilers are processes beside this one, and take more than a hundred MB of memory while they work.
They are over before anything is read to where it stays, so that the first run of a plan needs no
more than the following ones wherever its budget is larger than a compiler.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pi2.backends.host import HostLoops, load_host_loops
from pi2.backends.protocol import BuildRequest, ExecutorBackend
from pi2.diagnostics import UserError
from pi2.engine.build_request import make_request
from pi2.engine.opened_store import open_store
from pi2.fit import find_plan_misfits
from pi2.machine import Machine, detect_machine
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.backends import find_backend, find_executor_backend, find_preparer
from pi2.progress import Progress
from pi2.store.reader import NeuronStore

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that is computed layer by layer, before it has memory."""

    resolved: ResolvedPlan
    backend: ExecutorBackend
    machine: Machine
    store: NeuronStore | None
    """None where nothing is computed, as are tokenizer and loops."""
    tokenizer: Tokenizer | None
    loops: HostLoops | None
    draft: OpenedModel | None
    """The model that guesses tokens, if there is one."""


def open_model(
    resolved: ResolvedPlan, progress: Progress, cleanup: ExitStack, *, alone: bool = False
) -> OpenedModel:
    """Open what a plan names, to be closed by ``cleanup``, and compile what is not compiled yet;
    ``alone``: for an executor that computes everything, whatever the plan gives to other units.

    UserError P320 where a backend cannot run here, P3xx where the device is not this machine, P5xx
    for the store, P605 for its tokenizer, P618 where a draft's tokens are others, P650 and P651
    where compiling fails.
    """
    backend = find_executor_backend(resolved.name_backend(resolved.sparse_unit))
    # The rules of the plan language have seen to it (P265).
    assert backend is not None, resolved.sparse_unit
    machine = detect_machine()
    store = tokenizer = loops = None
    if backend.COMPUTES:
        check_fit(resolved, machine)
        store, tokenizer = open_store(resolved, cleanup)
    request = make_request(resolved, machine, {} if store is None else store.tensors)
    request = replace(request, progress=progress, rows=None if alone else request.rows)
    check_backends(resolved, request)
    preparer = find_preparer(resolved.name_backend(resolved.sparse_unit))
    if preparer is not None:
        preparer.prepare(request)
    if store is not None:
        loops = load_host_loops(progress, machine.features)
    draft = None
    if resolved.draft is not None:
        draft = open_model(resolved.draft, progress, cleanup)
        check_draft(resolved.draft, resolved, tokenizer, draft.tokenizer)
    return OpenedModel(
        resolved=resolved,
        backend=backend,
        machine=machine,
        store=store,
        tokenizer=tokenizer,
        loops=loops,
        draft=draft,
    )


def check_fit(resolved: ResolvedPlan, machine: Machine) -> None:
    """UserError P3xx if the plan's device is not this machine."""
    misfits = find_plan_misfits(resolved, machine)
    errors = tuple(finding for finding in misfits if finding.severity == "error")
    if errors:
        raise UserError(errors, exit_code=2)


def check_backends(resolved: ResolvedPlan, request: BuildRequest) -> None:
    """UserError P320 where the backend of a unit cannot run here."""
    for unit in (resolved.sparse_unit, *resolved.dense_units):
        name = resolved.name_backend(unit)
        obstacles = find_backend(name).find_obstacles(request.features, request.architecture)
        if obstacles:
            raise UserError.of("P320", f"backend {name!r} cannot run here: {'; '.join(obstacles)}")


def check_draft(
    draft: ResolvedPlan,
    resolved: ResolvedPlan,
    tokenizer: Tokenizer | None,
    guessing: Tokenizer | None,
) -> None:
    """UserError P618 where the tokens of the model that guesses are others."""
    if tokenizer is None or guessing is None or tokenizer.get_vocab() == guessing.get_vocab():
        return
    raise UserError.of(
        "P618",
        f"{draft.path} cannot guess for this plan: its tokens are others",
        help="name the plan of a model with the same tokenizer in decode.speculation.plan",
        file=str(resolved.path),
    )
