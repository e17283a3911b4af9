"""Weights that a plan names on the hub: they lie in the hub's own cache, pinned in ``pi2.lock``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pi2.diagnostics import UserError
from pi2.progress import Progress, ignore_progress
from pi2.sharing.lock import PinnedWeights, choose_lock, edit_lock, find_lock, read_lock

HUB = "hf:"
"""Begins a reference to a file of the hub: ``hf:ORG/NAME[@REVISION]/FILE.gguf``."""
_REFERENCE = re.compile(
    r"(?P<repository>hf:[\w.-]+/[\w.-]+)(?P<revision>@[\w.-]{1,200})?/(?P<file>.+\.gguf)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository of the hub."""

    repository: str
    """``hf:ORG/NAME``."""
    revision: str
    """A branch, tag or commit with ``@`` before it; empty for the main branch."""
    file: str

    @classmethod
    def parse(cls, text: str) -> HubFile:
        """Read a reference; `UserError` P760 if it is none."""
        match = _REFERENCE.fullmatch(text)
        if match is None or ".." in text:
            raise UserError.of(
                "P760",
                f"{text!r} is no reference to a file of the hub",
                help="write hf:ORG/NAME/FILE.gguf or hf:ORG/NAME@REVISION/FILE.gguf",
            )
        return cls(match["repository"], match["revision"] or "", match["file"])

    def name(self, file: str) -> str:
        """The reference of ``file`` beside this one."""
        return f"{self.repository}{self.revision}/{file}"


def find_hub_file(text: str, folder: Path) -> Path:
    """The file on this machine that a plan in ``folder`` means by ``text``: of the commit in the
    lock, if it is there.  Nothing is fetched.

    `UserError` P530 where it was not pulled, P729 where it has another size than was pinned, P760
    for no reference.
    """
    from huggingface_hub import try_to_load_from_cache

    wanted = HubFile.parse(text)
    pinned = _find_pin(text, folder)
    revision = wanted.revision[1:] or None if pinned is None else pinned.revision
    repository = wanted.repository.removeprefix(HUB)
    found = try_to_load_from_cache(repository, wanted.file, revision=revision)
    if not isinstance(found, str):
        raise UserError.of(
            "P530",
            f"{text} was not pulled to this machine",
            help="fetch it: `pi2 pull PLAN`, with this plan's name",
        )
    if pinned is not None and Path(found).stat().st_size != pinned.size_bytes:
        raise _report_others(pinned)
    return Path(found)


def fetch_hub_file(text: str, folder: Path, progress: Progress = ignore_progress) -> Path:
    """Fetch the file that a plan in ``folder`` means by ``text``, with the other parts of a split
    one, and pin the commit, size and SHA-256 in the lock.

    `UserError` P729 where the bytes are not the pinned ones, P761 to P764 and P767 as
    `pi2.importing.hub.find_repository`.
    """
    from pi2.importing.hub import HubReference, fetch_into_cache, find_repository
    from pi2.store.files import hash_file

    wanted = HubFile.parse(text)
    with edit_lock(choose_lock(folder)) as edit:
        known = edit.lock.find_weights(text)
        revision = wanted.revision[1:] or "main" if known is None else known.revision
        reference = HubReference(wanted.repository.removeprefix(HUB), revision)
        repository = find_repository(reference, wanted.file)
        paths = fetch_into_cache(repository, progress)
        for file, path in paths.items():
            pin = PinnedWeights(
                reference=wanted.name(file),
                revision=repository.commit,
                size_bytes=path.stat().st_size,
                sha256=hash_file(path),
            )
            before = edit.lock.find_weights(pin.reference)
            if before is not None and before != pin:
                raise _report_others(before)
            edit.lock = edit.lock.pin(pin)
    return paths[wanted.file]


def list_missing(path: Path) -> Iterator[str]:
    """References to the hub in the plan at ``path`` itself whose files are not here."""
    import tomli

    try:
        text = path.read_text("utf-8")
        weights = tomli.loads(text).get("weights") if HUB in text else None
    except (OSError, ValueError):  # reading the plan says what is wrong
        return
    if isinstance(weights, str) and weights.startswith(HUB):
        try:
            find_hub_file(weights, path.parent)
        except UserError as error:
            if error.diagnostics[0].code == "P530":
                yield weights


def _find_pin(text: str, folder: Path) -> PinnedWeights | None:
    lock = find_lock(folder)
    return None if lock is None else read_lock(lock).find_weights(text)


def _report_others(pin: PinnedWeights) -> UserError:
    return UserError.of(
        "P729",
        f"`{pin.reference}` is no longer what was locked: its contents have changed",
        help="if that is meant, delete its entry in pi2.lock and run `pi2 pull PLAN`",
    )
