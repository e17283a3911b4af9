"""References between documents: a relative path, a shipped short name, or a scheme that a
`Resolver` finds."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pi2
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.documents.common import Document
from pi2.plan.documents.device import Device
from pi2.plan.documents.family import Family
from pi2.plan.documents.model import Model, WrittenModel
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.source import (
    CANNOT_READ,
    Kind,
    SourceFile,
    detect_kind,
    display_path,
    read_source,
)


def list_documents(paths: Iterable[str | Path]) -> list[Path]:
    """Files, and documents below folders, sorted and unique, without hidden folders."""
    found: dict[Path, None] = {}
    for item in paths:
        path = Path(item)
        documents = sorted(_walk(path)) if path.is_dir() else []
        found.update(dict.fromkeys(documents or [path]))
    return list(found)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if detect_kind(name) is not None)


DOCUMENTS: Mapping[Kind, type[Document]] = {
    "plan": Plan,
    "device": Device,
    "model": Model,
    "family": Family,
}
WRITTEN: Mapping[Kind, type[Document]] = {**DOCUMENTS, "model": WrittenModel}
"""Classes with every key that may be written."""
_FOLDERS: Mapping[Kind, str] = {
    "plan": "",
    "device": "devices",
    "model": "models",
    "family": "families",
}
"""Folders of shipped documents, below the folder of all."""


def check_suffix(file_name: str, name: str, kind: Kind) -> Diagnostic | None:
    """A finding about a file whose name does not say that it is a ``kind``."""
    found = detect_kind(file_name)
    if found == kind:
        return None
    span = Span.of_file(name)
    if found is None:
        return Diagnostic(
            code="P009", message=f"expected a file name that ends in .{kind}.toml", span=span
        )
    return report_kind(span, kind, found)


def report_kind(span: Span, wanted: Kind, found: Kind) -> Diagnostic:
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
        scores[other] = len(keys & own) / max(1, len(own))
    best = max(scores, key=lambda item: scores[item])
    unknown = keys - set(WRITTEN[kind].model_fields)
    if best != kind and scores[best] > 0.6 and scores[kind] < 0.4 and unknown:
        return best
    return None


MAX_LISTED = 8
MAX_LENGTH = 500
"""Longest reference, in characters."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True, kw_only=True)
class Located:
    """A file that a reference means."""

    path: Path
    """The file that has the document's bytes."""
    file_name: str
    """The document's own name, which the file that holds its bytes need not have."""
    name: str
    """How findings name it."""
    reference: str | None = None
    """The whole reference, if it has a scheme; other references in the file begin there."""


class Resolver(Protocol):
    """Finds files of references that have a scheme, without fetching anything."""

    def find(self, reference: str, kind: Kind) -> Located | None:
        """The file of ``reference``, None for an unknown short name; `UserError` for faulty
        ones."""
        ...

    def join(self, reference: str, relative: str) -> str:
        """The reference that the path ``relative`` means in the document ``reference``."""
        ...


class UnknownName(Exception):
    """A name that leads to no file; ``hint`` says what may be meant."""

    def __init__(self, message: str, hint: str | None) -> None:
        super().__init__(message)
        self.hint = hint


def find_shipped_folder() -> Path:
    """Folder of the plans that come with pi2."""
    return (Path(pi2.__file__).parent / "plans").resolve()


def list_shipped(kind: Kind) -> dict[str, Path]:
    """Files of shipped documents by short name; a plan's name may have a folder in it."""
    suffix, folder = f".{kind}.toml", find_shipped_folder() / _FOLDERS[kind]
    files = [*folder.glob(f"*{suffix}"), *folder.glob(f"*/*{suffix}")]
    return {
        path.relative_to(folder).as_posix().removesuffix(suffix): path for path in sorted(files)
    }


LOCK = "pi2.lock"
"""The file that locks the references of a project's documents."""


def find_project(folder: Path) -> Path:
    """The folder whose documents may name each other: the repository's, else the nearest with a
    ``pi2.lock``, else ``folder`` itself; without links."""
    real = Path(os.path.realpath(folder))
    above = [real, *real.parents]
    for mark, exists in ((".git", os.path.lexists), (LOCK, os.path.isfile)):
        for place in above:
            if exists(place / mark):
                return place
    return real


FOREIGN = frozenset({"P032", "P033"})
"""Codes of files that documents may not name, or that are no documents."""


def check_inside(file: Path, folder: Path, root: Path | None = None) -> None:
    """`UserError` P032 for a ``file`` that a document in ``folder`` may not name: it is outside of
    the project, or a link leads there, and it does not come with pi2.

    The user named a document in the folder ``root``: documents below share its project."""
    if "\0" in str(file):
        return  # reading it says so
    real, project = Path(os.path.realpath(file)), find_project(root or folder)
    if root is not None and not Path(os.path.realpath(folder)).is_relative_to(project):
        project = find_project(folder)  # the user named it too
    if real.is_relative_to(project) or real.is_relative_to(find_shipped_folder()):
        return
    raise UserError.of(
        "P032",
        f"{display_path(file)} leads out of the project {project}",
        help=f"keep it there, run `git init` in the folder of both, or name it yourself: {real}",
    )


def read_document(
    file: Path, name: str, ending: str, root: Path | None = None
) -> SourceFile | list[Diagnostic]:
    """Read a document whose name has the ``ending``; tell nothing of another program's file.

    P032 for a link out of the file's project (``root``: as `check_inside`).  P033 for a file whose
    real name has not the ending, unless it states a schema version."""
    try:
        check_inside(file, file.parent, root)
    except UserError as error:
        return [replace(item, span=Span.of_file(name)) for item in error.diagnostics]
    source = read_source(file, name)
    if "\0" in str(file) or os.path.realpath(file).endswith(ending):
        return source
    if isinstance(source, SourceFile):
        if "schema_version" in source.values:
            return source
        fault = "it states no `schema_version`"
    elif source[0].code in CANNOT_READ:
        return source
    else:
        fault = "it is no TOML"
    return [
        Diagnostic(
            code="P033",
            message=f"this is no document of pi2: {fault}",
            help=f"findings show lines only of files that are called *{ending}",
            span=Span.of_file(name),
        )
    ]


def is_path(reference: str) -> bool:
    """Whether a reference is a path rather than a short name."""
    return "/" in reference or "\\" in reference or reference.endswith((".toml", ".gguf"))


def has_scheme(reference: str) -> bool:
    """Whether a reference begins with a scheme; one letter is a drive, not a scheme."""
    return _SCHEME.match(reference) is not None


def find_document(reference: str, kind: Kind, base: Path) -> Path:
    """File that a user's ``reference`` means; paths are relative to the folder ``base``."""
    return locate_document(reference, kind, base, is_given=True).path


def locate_document(
    reference: str,
    kind: Kind,
    base: Path,
    *,
    resolver: Resolver | None = None,
    origin: str | None = None,
    is_given: bool = False,
    root: Path | None = None,
) -> Located:
    """File that ``reference`` means in ``base``; ``origin``: the document's own reference;
    ``is_given``: the user names it, no document; ``root``: as `check_inside`.  `UnknownName`;
    `UserError` P032, or as ``resolver``."""
    path = is_path(reference)
    if kind == "plan" and not reference.endswith((".toml", ".gguf")):
        path = False  # plans lie in folders, and their short names have them
    if path and not has_scheme(reference):
        if origin is None or resolver is None:
            file = base / reference
            if not is_given:
                check_inside(file, base, root)
            return Located(path=file, file_name=file.name, name=display_path(file))
        reference = resolver.join(origin, reference)
    if has_scheme(reference):
        found = None if resolver is None else resolver.find(reference, kind)
        if found is None:
            raise UnknownName(f"`{reference}` cannot be looked up here", None)
        return found
    return _find_name(reference, kind, base, resolver)


def _find_name(reference: str, kind: Kind, base: Path, resolver: Resolver | None) -> Located:
    folder = find_shipped_folder() / _FOLDERS[kind]
    file = folder / f"{reference}.{kind}.toml"
    if _is_short_name(reference) and os.path.isfile(file):
        return Located(path=file, file_name=file.name, name=display_path(file))
    if resolver is not None and (found := resolver.find(reference, kind)) is not None:
        return found
    shipped = list_shipped(kind)
    from difflib import get_close_matches

    near = get_close_matches(reference, shipped, n=1, cutoff=0.5)
    hint = f"shipped {kind}s: {', '.join(list(shipped)[:MAX_LISTED])}"
    if near:
        hint = f'did you mean "{near[0]}"?'
    elif _is_short_name(reference) and os.path.exists(base / f"{reference}.{kind}.toml"):
        hint = f'for the file of that name here write "{reference}.{kind}.toml"'
    raise UnknownName(f"no shipped {kind} is called `{reference}`", hint)


def _is_short_name(reference: str) -> bool:
    parts = reference.split("/")
    return len(parts) <= 2 and all(
        part and not part.startswith(".") and part.isprintable() and "\\" not in part
        for part in parts
    )
