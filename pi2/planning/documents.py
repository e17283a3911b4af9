"""Reading the devices and models that a wish names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pi2.diagnostics import UserError
from pi2.plan.checking.check import check_file
from pi2.plan.reading.kinds import DOCUMENTS
from pi2.plan.reading.references import UnknownName, locate_document
from pi2.sharing.resolver import LockedReferences

if TYPE_CHECKING:
    from pi2.plan.checking.check import Report
    from pi2.plan.toml.source import Kind


def read_document(reference: str, kind: Kind, folder: Path | None = None) -> Report:
    """Check the device or model that a reference means; it is sound.

    ``reference``: a path relative to ``folder``, a short name or a locked reference.  Raises
    `UserError` P015 for a name that nobody knows, P014 for a document of another kind, or with
    the document's own findings.
    """
    folder = folder or Path()
    resolver = LockedReferences(folder)
    try:
        found = locate_document(reference, kind, folder, resolver=resolver)
    except UnknownName as error:
        raise UserError.of("P015", str(error), help=error.hint) from None
    report = check_file(found.path, name=found.name, resolver=resolver, reference=found.reference)
    if report.document is not None and not isinstance(report.document, DOCUMENTS[kind]):
        raise UserError.of("P014", f"`{reference}` is no {kind}", help=f"name a *.{kind}.toml")
    if not report.is_sound or report.document is None:
        raise report.make_error()
    return report
