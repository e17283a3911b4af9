"""Where a name leads: the files of references, and the units of the device."""

from __future__ import annotations

from pathlib import Path

from pi2.diagnostics import Span
from pi2.lsp.checked import Checked
from pi2.plan.toml.paths import KeyPath
from pi2.plan.toml.source import Kind

MANIFEST = "manifest.json"


def find_definition(checked: Checked, line: int, column: int) -> tuple[Path, Span] | None:
    """File and place that the name at a place, counted from 1, stands for."""
    found = checked.find_path(line, column)
    kind = checked.kind
    if found is None or kind is None:
        return None
    path = found[0]
    if path[:1] == ("extends",):
        return _find_document(checked, path, kind)
    if kind != "plan":
        return None
    if path in (("device",), ("model",)):
        return _find_document(checked, path, "device" if path == ("device",) else "model")
    if path == ("store",):
        text = checked.read_text(path)
        target = checked.path.parent / (text or "") / MANIFEST
        return (target, Span.of_file(str(target))) if text and target.is_file() else None
    if path[-2:-1] == ("split",):
        return _find_unit(checked, str(path[-1]))
    return None


def _find_document(checked: Checked, path: KeyPath, kind: Kind) -> tuple[Path, Span] | None:
    located = checked.find_document(path, kind)
    return None if located is None else (located.path, Span.of_file(str(located.path)))


def _find_unit(checked: Checked, name: str) -> tuple[Path, Span] | None:
    device = checked.report.files.get("device")
    if device is None or not device.spans.has(("units", name)):
        return None
    span = device.spans.find_value(("units", name))
    if span.file == device.name:
        return device.path, span
    path = Path(span.file)
    return (path, span) if path.is_file() else None
