"""The functions of the host loops' library; `pi2.backends.host.contract` says what each does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm

from pi2.backends.compiler.parameters import Parameters
from pi2.backends.compiler.target import make_target
from pi2.backends.host.checks import emit_compute_checks
from pi2.backends.host.naming import emit_unite_named
from pi2.backends.host.reads import (
    emit_fill_entries,
    emit_plan_reads,
    emit_read_runs,
)
from pi2.backends.host.residency import emit_find_neurons, emit_place_neurons
from pi2.backends.host.ring import emit_drive_ring, emit_submit_reads
from pi2.backends.host.spec import HostSpec


def read_program(text: str) -> Program:
    """Return the program of a spec."""
    return Program(HostSpec.from_json(text))


class Program:
    """Loops for the machine that compiles them."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec

    @property
    def target(self) -> tvm.target.Target:
        """The least processor of this machine's architecture that has the instruction of checks."""
        return make_target(self._spec)

    def list_functions(self) -> dict[str, Callable[[Parameters], None]]:
        """Return what emits each function, by name."""
        functions: dict[str, Callable[[Parameters], None]] = {
            "read_runs": emit_read_runs,
            "plan_reads": emit_plan_reads,
            "fill_entries": emit_fill_entries,
            "drive_ring": partial(emit_drive_ring, self._spec.architecture),
            "submit_reads": partial(emit_submit_reads, self._spec.architecture),
            "unite_named": emit_unite_named,
            "find_neurons": emit_find_neurons,
            "place_neurons": emit_place_neurons,
        }
        if self._spec.checks is not None:
            functions["compute_checks"] = partial(emit_compute_checks, self._spec.checks)
        return functions
