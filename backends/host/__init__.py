"""Compiled loops of the machine that runs the engine: cache look-up, placing, read lists, reads.

They are TensorIR in a library of its own, which depends on no model and no compute unit: one
compilation per machine, for all plans.  `HostLoops` says what they do.
"""

from __future__ import annotations

from collections.abc import Set

from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.compiler.runtime import Library
from pi2.backends.host.loops import CompiledLoops
from pi2.memory.host_loops import HostLoops, HostSpec, choose_checks
from pi2.progress import Progress

__all__ = ["CompiledLoops", "HostLoops", "load_host_loops"]


def load_host_loops(progress: Progress, features: Set[str] = frozenset()) -> CompiledLoops:
    """Return the host loops, compiled now unless they are cached.

    ``features`` are those of this machine's processor.  ``progress`` is called with a label and the
    share done while they are compiled.  UserError P650 without a linker, P651 where compiling
    fails.
    """
    spec = HostSpec(checks=choose_checks(features))
    return CompiledLoops(Library(load_or_compile(spec, progress)))
