"""Finding the device and model files that a plan names."""

from __future__ import annotations

import difflib
from pathlib import Path

import pi2
from pi2.plan.source import Kind

MAX_LISTED = 8


class UnknownName(Exception):
    """A name that leads to no file; ``hint`` says what may be meant."""

    def __init__(self, message: str, hint: str | None) -> None:
        super().__init__(message)
        self.hint = hint


def find_shipped_folder() -> Path:
    """Folder of the plans that come with pi2."""
    return (Path(pi2.__file__).parent / "plans").resolve()


def list_shipped(kind: Kind) -> dict[str, Path]:
    """Files of shipped devices or models by short name."""
    suffix = f".{kind}.toml"
    folder = find_shipped_folder() / f"{kind}s"
    return {path.name.removesuffix(suffix): path for path in sorted(folder.glob(f"*{suffix}"))}


def is_path(reference: str) -> bool:
    """Whether a reference is a path rather than a short name."""
    return "/" in reference or "\\" in reference or reference.endswith(".toml")


def find_document(reference: str, kind: Kind, base: Path) -> Path:
    """File that ``reference`` means; paths are relative to the folder ``base``."""
    if is_path(reference):
        return base / reference
    shipped = list_shipped(kind)
    if reference in shipped:
        return shipped[reference]
    near = difflib.get_close_matches(reference, shipped, n=1, cutoff=0.5)
    hint = f"shipped {kind}s: {', '.join(list(shipped)[:MAX_LISTED])}"
    if near:
        hint = f'did you mean "{near[0]}"?'
    elif (base / f"{reference}.{kind}.toml").exists():
        hint = f'for the file beside the plan write "{reference}.{kind}.toml"'
    raise UnknownName(f"no shipped {kind} is called `{reference}`", hint)
