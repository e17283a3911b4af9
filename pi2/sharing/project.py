"""Device descriptions of others and for others: references of a repository, and publishing."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tomli

from pi2.caches import find_home
from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting.check import check_file
from pi2.plan.documents.device import Device
from pi2.plan.documents.private import find_private, strip_private
from pi2.plan.reading.references import has_scheme, list_shipped
from pi2.plan.toml.source import Kind, detect_kind, display_path, read_source
from pi2.sharing.fetching import (
    Cache,
    Settings,
    fetch,
    hash_bytes,
    is_local,
    read_regular,
    refuse_network,
    write_atomically,
)
from pi2.sharing.git import Fetched, resolve_revision
from pi2.sharing.lock import (
    Lock,
    Source,
    check_agreement,
    check_drift,
    choose_lock,
    edit_lock,
    find_copy,
    find_lock,
    name_in_lock,
    read_lock,
    require_copy,
)
from pi2.sharing.references import LockedReferences, Reference, join_reference, parse_reference

MAX_SOURCES = 64
"""Most documents that one reference may bring along."""

State = Literal["added", "fetched", "unchanged", "updated"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    source: Source
    state: State
    before: Source | None = None


@dataclass(frozen=True, kw_only=True)
class Project:
    folder: Path
    """Folder that references in paths are relative to."""
    settings: Settings
    offline: bool = False
    locked: bool = False

    @property
    def cache(self) -> Cache:
        return Cache(self.settings.cache)

    @property
    def lock_path(self) -> Path:
        return choose_lock(self.folder)

    def read_lock(self) -> Lock:
        return read_lock(find_lock(self.folder) or self.lock_path)

    def _find(self, name: str, lock: Lock) -> tuple[Reference, str]:
        """The reference ``name`` of a lock, taken apart, and the address that it means."""
        reference = parse_reference(name)
        return reference, reference.locate(self.settings.github, lock.folder)

    def _fetch(self, url: str, path: str = "", revision: str = "") -> Fetched:
        return fetch(url, path, revision, settings=self.settings, offline=self.offline)

    def _ask_commit(self, url: str, revision: str) -> str:
        """The commit that the revision of a repository means now."""
        refuse_network(url, self.offline)
        return resolve_revision(url, revision, timeout_s=self.settings.timeout_s).commit

    def add(self, references: Sequence[str]) -> list[Outcome]:
        """Lock ``references`` and their needs at once or not at all; by default locked ones."""
        if not references:
            return [self._restore(item) for item in self.read_lock().sources]
        with edit_lock(self.lock_path) as edit:
            outcomes: dict[str, Outcome] = {}
            folder = edit.lock.folder
            waiting = [name_in_lock(parse_reference(t), self.folder, folder) for t in references]
            while waiting:
                name = waiting.pop(0)
                if name in outcomes:
                    continue
                if known := edit.lock.find(name):
                    outcomes[name] = self._restore(known)
                else:
                    added = self._fetch_anew(name, edit.lock)
                    outcomes[name] = Outcome(source=added, state="added")
                if len(outcomes) > MAX_SOURCES:
                    raise UserError.of("P732", f"more than {MAX_SOURCES} documents come along")
                waiting += self._list_further(outcomes[name].source)
            new = [item.source for item in outcomes.values() if item.state == "added"]
            edit.lock = self._replace(edit.lock, new, "would change: `{}` is new")
        return list(outcomes.values())

    def _restore(self, source: Source) -> Outcome:
        """Have the locked bytes here, fetching the locked commit if they are not."""
        lock = self.read_lock()
        reference, url = self._find(source.reference, lock)
        check_agreement(reference, source, lock)
        if find_copy(source, self.cache) is not None:
            return Outcome(source=source, state="unchanged")
        url = url if reference.is_local else source.url
        fetched = self._fetch(url, source.path, source.revision)
        if hash_bytes(fetched.data) != source.sha256:
            raise _report_other_bytes(source)
        self.cache.add(fetched.data, source.file_name)
        return Outcome(source=source, state="fetched")

    def _fetch_anew(self, name: str, lock: Lock) -> Source:
        """Put what a reference means now into the cache; say what the lock is to say of it."""
        reference, url = self._find(name, lock)
        fetched = self._fetch(url, reference.path, reference.revision)
        source = Source(
            reference=name,
            # As it is written: nothing about this machine where it is relative.
            url=f"file:{reference.url}" if reference.is_local else url,
            path=reference.path,
            revision=fetched.commit,
            revision_kind=fetched.kind,
            size_bytes=len(fetched.data),
            sha256=hash_bytes(fetched.data),
        )
        self.cache.add(fetched.data, source.file_name)
        return source

    def _replace(self, lock: Lock, sources: Sequence[Source], problem: str) -> Lock:
        """The lock with other sources; UserError for unsound ones, P714 where it is to stay."""
        replaced = lock.replace(*sources)
        for source in sources:
            self._check_document(require_copy(source, self.cache), source.reference, replaced)
        if sources and self.locked:
            raise UserError.of(
                "P714",
                f"{display_path(lock.path)} {problem.format(sources[0].reference)}",
                help="run it without --locked, and commit the lock",
            )
        return replaced

    def _check_document(self, path: Path, reference: str, lock: Lock) -> None:
        """Refuse a document with errors, P731, and show them."""
        if detect_kind(path.name) == "plan":
            return  # it may be a part of one, and its store is not here
        resolver = LockedReferences(lock.folder, settings=self.settings, lock=lock)
        report = check_file(path, name=reference, resolver=resolver, reference=reference)
        errors = [item for item in report.diagnostics if item.severity == "error"]
        if errors:
            raise _report_unsound(reference, errors, report.sources)

    def _list_further(self, source: Source) -> list[str]:
        return list(list_references(require_copy(source, self.cache), source.reference))

    def update(
        self, references: Sequence[str] = (), *, accept_moved: bool = False
    ) -> list[Outcome]:
        """Lock what the sources are now: branches and files move, tags must not (P727)."""
        with edit_lock(self.lock_path) as edit:
            lock = edit.lock
            chosen = _choose(lock, references, self.folder)
            outcomes = [self._update_one(item, lock, accept_moved) for item in chosen]
            changed = [item.source for item in outcomes if item.state == "updated"]
            edit.lock = self._replace(lock, changed, "does not say what `{}` is now")
        further = [name for item in outcomes for name in self._list_further(item.source)]
        if further:
            outcomes += [item for item in self.add(further) if item.state != "unchanged"]
        return outcomes

    def _update_one(self, source: Source, lock: Lock, accept_moved: bool) -> Outcome:
        reference, url = self._find(source.reference, lock)
        if reference.is_git:
            commit = self._ask_commit(url, reference.revision)
            if commit == source.revision and find_copy(source, self.cache):
                return Outcome(source=source, state="unchanged")
            if source.revision_kind == "tag" and commit != source.revision and not accept_moved:
                raise _report_moved(source, commit)
        found = self._fetch_anew(source.reference, lock)
        if found == source:
            return Outcome(source=source, state="unchanged")
        return Outcome(source=found, state="updated", before=source)

    def verify(self) -> list[tuple[Source, UserError | None]]:
        """Check every locked source: its bytes here and, unless offline, its place there."""
        lock = self.read_lock()
        return [(source, self._verify_one(source, lock)) for source in lock.sources]

    def _verify_one(self, source: Source, lock: Lock) -> UserError | None:
        try:
            reference, url = self._find(source.reference, lock)
            check_agreement(reference, source, lock)
            self._check_document(require_copy(source, self.cache), source.reference, lock)
            check_drift(reference, source, lock, self.settings)
            if self.offline:
                return None
            # A tag still means its commit; a file of the web still has its bytes.
            if source.revision_kind == "tag":
                commit = self._ask_commit(url, reference.revision)
                return None if commit == source.revision else _report_moved(source, commit)
            if not reference.is_git and not is_local(url):
                if hash_bytes(self._fetch(url).data) != source.sha256:
                    return _report_other_bytes(source)
        except UserError as error:
            return error
        return None


def _choose(lock: Lock, references: Sequence[str], base: Path) -> list[Source]:
    if not references:
        return list(lock.sources)
    chosen = []
    for text in references:
        source = lock.find(name_in_lock(parse_reference(text), base, lock.folder))
        if source is None:
            raise UserError.of(
                "P710",
                f"`{text}` is not in {display_path(lock.path)}",
                help="`pi2 profile list` shows its profiles",
            )
        chosen.append(source)
    return chosen


def list_references(path: Path, reference: str) -> Iterator[str]:
    """Whole references of the documents that a document needs, without shipped ones."""
    source = read_source(path, reference)
    if isinstance(source, list):
        raise _report_unsound(reference, source, {})
    values = source.values
    extends = values.get("extends")
    found: list[tuple[Kind, object]] = [("device", values.get("device"))]
    found.append(("model", values.get("model")))
    kind = detect_kind(path.name) or "device"
    found += [(kind, item) for item in (extends if isinstance(extends, list) else [extends])]
    for wanted, item in found:
        if not isinstance(item, str) or item in list_shipped(wanted):
            continue
        if has_scheme(item):
            if item.startswith(("file:", "git+file:")) and not reference.startswith(
                ("file:", "git+file:")
            ):
                raise _report_not_alone(reference, item)
            yield parse_reference(item).text
        elif item.endswith(".toml"):
            yield join_reference(reference, item)
        else:
            raise _report_not_alone(reference, item)


def _report_unsound(
    reference: str, findings: Sequence[Diagnostic], sources: Mapping[str, str]
) -> UserError:
    message = f"`{reference}` is not sound and was not taken"
    head = Diagnostic(code="P731", message=message, help="its author has to fix it")
    return UserError([head, *findings], exit_code=1, sources=sources)


def _report_not_alone(reference: str, item: str) -> UserError:
    return UserError.of(
        "P732",
        f"`{reference}` needs `{item}`, which others do not have",
        help="its author can name it by a reference that others can follow",
    )


def _report_moved(source: Source, commit: str) -> UserError:
    return UserError.of(
        "P727",
        f"the tag of `{source.reference}` was moved from {source.revision[:12]} to {commit[:12]}",
        help="ask the author why; `pi2 profile update --accept-moved-tags` takes it",
    )


def _report_other_bytes(source: Source) -> UserError:
    return UserError.of(
        "P729",
        f"`{source.reference}` differs from the locked file: its contents have changed",
        help="if that is meant, `pi2 profile update` locks them",
    )


FOLDER = "devices"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A device that is ready for others."""

    id: str
    data: bytes
    sha256: str
    stripped: tuple[str, ...]
    """The removed parts, in words that do not give them away."""

    @property
    def file_name(self) -> str:
        return f"{self.id}.device.toml"


@dataclass(frozen=True, kw_only=True)
class Written:
    path: Path
    next_steps: tuple[str, ...]


def prepare_profile(path: Path) -> Prepared:
    """Check the device and remove private texts; UserError with its findings, P740 or P743."""
    name = display_path(path)
    if detect_kind(path.name) != "device":
        raise UserError.of(
            "P743", "only devices are published", file=name, help="its name ends in .device.toml"
        )
    report = check_file(path, name=name)
    if not report.is_sound or not isinstance(report.document, Device):
        raise UserError(report.diagnostics, sources=report.sources)
    source = read_source(path, name)
    assert not isinstance(source, list), name
    _check_alone(source.values, name)
    text, found = strip_private(source.text)
    home = str(find_home(os.environ))
    at_home = len(home) > 1 and home in text
    if at_home:
        text = text.replace(home, "~")
    text = _drop_local_schema(text)
    is_kept = check_file(path, name=name, text=text).is_sound and (
        _list_keys(tomli.loads(text)) == _list_keys(source.values)  # only texts have changed
    )
    if find_private(text) or not is_kept:
        raise UserError.of(
            "P740",
            "its private parts cannot be removed by a program",
            file=name,
            help="take it out by hand: `pi2 validate` shows where it is",
        )
    data = text.encode("utf-8")
    stripped = []
    for item in found:
        line = source.text.count("\n", 0, item.start) + 1
        stripped.append(f"{name}:{line}: {_WORDS[item.kind]} {item.shortened}")
    if at_home:
        stripped.append(f"{name}: your home folder")
    return Prepared(
        id=report.document.id, data=data, sha256=hash_bytes(data), stripped=tuple(stripped)
    )


_WORDS = {"serial": "serial number", "account": "account", "home": "home folder"}


def _check_alone(values: dict[str, object], name: str) -> None:
    extends = values.get("extends")
    for item in extends if isinstance(extends, list) else [extends]:
        if isinstance(item, str) and (item.endswith(".toml") and ":" not in item):
            raise UserError.of(
                "P743",
                f"it needs `{item}`, which others do not have",
                file=name,
                help="publish that first and name it by its reference, or take over its tables",
            )


def _drop_local_schema(text: str) -> str:
    first, newline, rest = text.partition("\n")
    if first.startswith("#:schema ") and "://" not in first:
        return rest
    return first + newline + rest


def _list_keys(values: object) -> object:
    if isinstance(values, dict):
        return {key: _list_keys(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_list_keys(value) for value in values]
    return None if isinstance(values, str) else values


def write_profile(prepared: Prepared, clone: Path, *, replace: bool = False) -> Written:
    """Write a device into a clone of a git repository; UserError P741, P742."""
    if not (clone / ".git").exists():
        raise UserError.of(
            "P742",
            "is not a clone of a git repository",
            file=str(clone),
            help="clone the repository that you want to publish in, and name that folder",
        )
    folder = clone / FOLDER
    if folder.is_symlink():
        raise UserError.of("P724", "is a symbolic link", file=str(folder))
    path = folder / prepared.file_name
    if os.path.lexists(path) and not replace and read_regular(path) != prepared.data:
        raise UserError.of(
            "P741",
            "another profile has this name",
            file=str(path),
            help="choose another id, or give --force to propose a new version",
        )
    if path.is_symlink():
        path.unlink()
    write_atomically(path, prepared.data)
    branch, place = f"profile-{prepared.id}", shlex.quote(str(clone))
    relative = f"{FOLDER}/{prepared.file_name}"
    steps = (
        f"git -C {place} checkout -b {branch}",
        f"git -C {place} add {relative} && git -C {place} commit -m 'Describe {prepared.id}'",
        f"git -C {place} push origin {branch}, and open a pull request",
    )
    return Written(path=path, next_steps=steps)
