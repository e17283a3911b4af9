"""The functions of the host loops' library; `pi2.backends.host.contract` says what each does."""

from __future__ import annotations

from collections.abc import Callable

import tvm

from pi2.backends.compiler.parameters import Parameters
from pi2.backends.compiler.target import make_target
from pi2.backends.host.reads import (
    emit_fill_entries,
    emit_note_results,
    emit_plan_reads,
    emit_read_runs,
)
from pi2.backends.host.residency import emit_find_neurons, emit_place_neurons


def read_program(text: str) -> Program:
    """Return the program; nothing of a spec changes it."""
    return Program()


class Program:
    """Loops in scalar code for the machine that compiles them."""

    @property
    def target(self) -> tvm.target.Target:
        """The least processor of this machine's architecture."""
        return make_target()

    def list_functions(self) -> dict[str, Callable[[Parameters], None]]:
        """Return what emits each function, by name."""
        return {
            "read_runs": emit_read_runs,
            "plan_reads": emit_plan_reads,
            "fill_entries": emit_fill_entries,
            "note_results": emit_note_results,
            "find_neurons": emit_find_neurons,
            "place_neurons": emit_place_neurons,
        }
