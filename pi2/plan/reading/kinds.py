"""The kinds of documents: their models, and whether a file is of the kind that is expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pi2.diagnostics import Diagnostic, Span
from pi2.plan.documents.common import Document
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.source import Kind, detect_kind

DOCUMENTS: Mapping[Kind, type[Document]] = {"plan": Plan, "device": Device, "model": Model}


def check_suffix(file_name: str, name: str, kind: Kind) -> Diagnostic | None:
    """A finding about a file whose name does not say that it is a ``kind``."""
    found = detect_kind(file_name)
    if found == kind:
        return None
    span = Span.of_file(name)
    if found is None:
        return Diagnostic(
            code="P009",
            message=f"expected a file name that ends in .{kind}.toml",
            span=span,
        )
    return report_kind(span, kind, found)


def report_kind(span: Span, wanted: Kind, found: Kind) -> Diagnostic:
    """The finding that a document is of another kind."""
    return Diagnostic(
        code="P014",
        message=f"this is a {found}, expected a {wanted}",
        help=f"a {wanted}'s file name ends in .{wanted}.toml and its keys are "
        f"{', '.join(_list_own_keys(wanted))}",
        span=span,
    )


def _list_own_keys(kind: Kind) -> list[str]:
    return [
        name
        for name, item in DOCUMENTS[kind].model_fields.items()
        if item.is_required() and name != "schema_version"
    ]


def guess_kind(values: Mapping[str, Any], kind: Kind) -> Kind | None:
    """Another kind of document that ``values`` fit much better, judged by the required keys."""
    keys = set(values)
    scores: dict[Kind, float] = {}
    for other in DOCUMENTS:
        own = set(_list_own_keys(other))
        scores[other] = len(keys & own) / len(own)
    best = max(scores, key=lambda item: scores[item])
    unknown = keys - set(DOCUMENTS[kind].model_fields)
    if best != kind and scores[best] > 0.6 and scores[kind] < 0.4 and unknown:
        return best
    return None
