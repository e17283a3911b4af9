"""Licences of what a bundle has: a folder ``licences``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pi2.plan.arithmetic.resolved import ResolvedPlan


def write_notes(room: Path, resolved: ResolvedPlan) -> None:
    """Write the licences of pi2 and of the compiled code, and what the model says of its own."""
    folder = room / "licences"
    folder.mkdir()
    names = []
    for name in ("LICENSE", "NOTICE"):
        text = _find_licence(name)
        if text is not None:
            (folder / f"pi2-{name}").write_text(text, encoding="utf-8")
            names.append(f"pi2-{name}")
    model = resolved.model
    lines = [
        f"pi2, the programs and the kernels: Apache-2.0 ({', '.join(names) or 'no file found'}).",
        "The kernels were compiled by Apache TVM with LLVM; nothing of either is in this folder.",
        f"The weights of {model.id}: {model.licence or 'the model document states no licence'}.",
        "",
    ]
    (folder / "README.txt").write_text("\n".join(lines), encoding="utf-8")


def _find_licence(name: str) -> str | None:
    """Text of a file of pi2's own, from where it was installed or is developed."""
    beside = Path(__file__).resolve().parents[2] / name
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    try:
        files = distribution("pi2").files or ()
    except PackageNotFoundError:
        return None
    found = [file for file in files if file.name == name]
    return found[0].read_text(encoding="utf-8") if found else None
