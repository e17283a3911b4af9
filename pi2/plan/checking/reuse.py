"""What checks of many plans in one process have in common: their devices and models.

Most plans of a folder name the same few of them.  Reading and checking each once makes checking
many plans several times as fast.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from pi2.diagnostics import Diagnostic
from pi2.plan.documents.common import Document
from pi2.plan.reading.references import Located
from pi2.plan.toml.source import Kind, SourceFile

FileKey = tuple[Kind, str, str, int, int, int]


@dataclass(frozen=True)
class ReadDocument:
    """A device or model that was read and held against its schema."""

    file: SourceFile
    document: Document | None
    diagnostics: tuple[Diagnostic, ...]


@dataclass
class Reuse:
    """Devices and models that were read, and what rules found in each of them alone.

    Documents that extend others are left out: what they are depends on other files too.
    """

    documents: dict[FileKey, ReadDocument] = field(default_factory=dict)
    findings: dict[tuple[str, int], tuple[Diagnostic, ...]] = field(default_factory=dict)
    """Findings by the rule's code and the identity of the document, which ``documents`` keeps
    alive."""


def make_key(located: Located, kind: Kind) -> FileKey | None:
    """Name a file and its state; None for what is not a file of this machine's own."""
    if located.reference is not None:
        return None
    try:
        status = os.stat(located.path)
    except (OSError, ValueError):
        return None
    state = (status.st_ino, status.st_mtime_ns, status.st_size)
    return (kind, str(located.path), located.name, *state)
