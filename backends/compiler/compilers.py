"""Programs that compile kernels, each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compiler:
    """A program that writes compiled kernels: ``python -m MODULE PROGRAM SPEC.json OUTPUT``."""

    module: str
    suffix: str
    """Suffix of the file that it writes."""


LIBRARIES = Compiler("pi2.backends.compiler.library_compiler", ".so")
"""Shared libraries for the processor."""
