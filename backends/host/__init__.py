"""Compiled loops of the host: cache look-up, placing, read lists, reads; once a machine."""

from collections.abc import Set

from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.compiler.runtime import Library
from pi2.memory.host_loops import HostLoops, HostSpec, choose_checks
from pi2.progress import Progress

__all__ = ["HostLoops", "load_host_loops"]


def load_host_loops(progress: Progress, features: Set[str] = frozenset()) -> HostLoops:
    """The host loops for processor ``features``, compiled unless cached; UserError P651."""
    spec = HostSpec(checks=choose_checks(features))
    return HostLoops(Library(load_or_compile(spec, progress)))
