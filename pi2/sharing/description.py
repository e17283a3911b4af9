"""A profile in words: where it comes from, and every figure with its source."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError
from pi2.diagnostics.text import escape_controls
from pi2.plan.checking.check import check_file
from pi2.plan.checking.figures import walk_figures
from pi2.plan.reading.references import has_scheme, list_shipped
from pi2.plan.toml.paths import format_path
from pi2.plan.toml.source import display_path
from pi2.sharing.agreement import find_copy, name_in_lock
from pi2.sharing.files import hash_bytes
from pi2.sharing.project import Project
from pi2.sharing.references import parse_reference
from pi2.sharing.resolver import LockedReferences


def describe_profile(project: Project, profile: str) -> dict[str, Any]:
    """Everything there is to say of a locked reference, a name, or a file of this machine."""
    path, reference, origin = _find(project, profile)
    folder = path.parent if reference is None else project.folder
    resolver = LockedReferences(folder, settings=project.settings)
    report = check_file(path, name=profile, resolver=resolver, reference=reference)
    if report.document is None:
        raise UserError(report.diagnostics, sources=report.sources)
    document = report.document
    data = path.read_bytes()
    return {
        "profile": profile,
        "name": document.name,
        "description": " ".join(document.description.split()),
        "sha256": hash_bytes(data),
        "size_bytes": len(data),
        "file": display_path(path),
        **origin,
        "figures": [
            {"figure": format_path(place), **figure.model_dump(mode="json", exclude_none=True)}
            for place, figure in walk_figures(document)
        ],
        "findings": len(report.diagnostics),
    }


def _find(project: Project, profile: str) -> tuple[Path, str | None, dict[str, Any]]:
    lock = project.read_lock()
    source = None
    if has_scheme(profile):
        source = lock.find(name_in_lock(parse_reference(profile), project.folder, lock.folder))
    if source is not None:
        path = find_copy(source, project.cache)
        if path is None:
            raise UserError.of(
                "P715",
                f"`{profile}` is locked, but its file is not here",
                help="`pi2 profile add` fetches what is locked",
            )
        kept = {"url", "path", "revision", "revision_kind"}
        origin = source.model_dump(mode="json", include=kept, exclude_defaults=True)
        return path, source.reference, origin
    shipped = list_shipped("device")
    if profile in shipped:
        return shipped[profile], None, {"origin": "comes with pi2"}
    path = project.folder / profile
    if profile.endswith(".toml") and path.is_file():
        return path, None, {}
    known = [*shipped, *(source.reference for source in lock.sources)]
    near = difflib.get_close_matches(profile, known, n=1, cutoff=0.5)
    raise UserError.of(
        "P710",
        f"`{profile}` is neither locked nor shipped",
        help=f"did you mean {near[0]}?" if near else "`pi2 profile search` lists what there is",
    )


def write_description(found: dict[str, Any]) -> str:
    """The description for people."""
    lines = [f"{found['profile']}: {found['name'] or '(no name)'}"]
    if found["description"]:
        lines.append(found["description"])
    lines.append("")
    for key in ("origin", "url", "path", "revision", "revision_kind", "file", "sha256"):
        if found.get(key):
            lines.append(f"{key.replace('_', ' '):13} {found[key]}")
    if found["figures"]:
        lines += ["", f"{len(found['figures'])} figures"]
    for item in found["figures"]:
        value = item.get("value") or item.get("rate") or f"{item.get('giga_ops')} GOP/s"
        tail = ""
        if "spread" in item:
            tail = f", spread {item['spread']:.1%} of {item.get('samples', '?')}"
        lines.append(f"  {item['figure']}: {value} ({item['status']}{tail}): {item['source']}")
    return "".join(f"{escape_controls(line)}\n" for line in lines)
