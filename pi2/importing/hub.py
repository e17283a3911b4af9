"""Fetches checkpoints from a hub that speaks Hugging Face's protocol, by its own library."""

import errno
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from pi2.caches import VARIABLE, replace_file
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import (
    INDEXES,
    PICKLED,
    TEMPLATES,
    Checkpoint,
    open_checkpoint,
    open_folder,
    read_json,
)
from pi2.importing.config import Config
from pi2.importing.families import describe_family, unwrap_config
from pi2.importing.safetensors_file import measure_header
from pi2.progress import ByteProgress, Progress, ignore_progress

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_REFERENCE = re.compile(
    rf"hf:(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w./-]{{1,200}}?))?"
    r"(?:/(?P<file>.+\.(?i:gguf)))?"
)
_WEIGHTS = (".safetensors", ".gguf", *PICKLED)
_SMALL = (".json", ".jinja", ".model")
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HubReference:
    """A repository of the hub, and a branch, tag or commit of it."""

    repository: str
    revision: str = "main"
    file: str | None = None
    """A GGUF file of it."""


def parse_reference(text: str) -> HubReference:
    """Read ``hf:ORG/NAME[@REV][/FILE.gguf]``; `UserError` P760 if it is something else."""
    match = _REFERENCE.fullmatch(text)
    if match is None or ".." in text or "--" in match["repository"]:
        raise UserError.of(
            "P760",
            f"{text!r} is no reference to a model of the hub",
            help=f"write hf:{text}"
            if _REFERENCE.fullmatch(f"hf:{text}")
            else "write hf:ORG/NAME or hf:ORG/NAME@REVISION, and /FILE.gguf for one of its files",
        )
    return HubReference(match["repository"], match["revision"] or "main", match["file"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A commit of a repository."""

    name: str
    commit: str
    sizes: Mapping[str, int]
    """Bytes of the files that a conversion reads, by name."""
    cached: Path | None = None
    """Its folder, if the hub's own cache has the files."""

    @property
    def reference(self) -> HubReference:
        return HubReference(self.name, self.commit)


def find_repository(reference: HubReference, file: str | None = None) -> Repository:
    """Resolve the revision and choose files with the hub's settings; ``file``: one of several
    models. `UserError` P761 unknown, P762 forbidden, P763 unreachable, P767 without a model."""
    from huggingface_hub import HfApi, is_offline_mode, snapshot_download

    name, revision = reference.repository, reference.revision
    folder: Path | None = None
    with explain_errors(reference):
        if is_offline_mode():
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
            found = (path for path in folder.rglob("*") if path.is_file())
            files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
            commit: str | None = folder.name
        else:
            info = HfApi().model_info(name, revision=revision, files_metadata=True)
            files = {item.rfilename: item.size or 0 for item in info.siblings or []}
            commit = info.sha
        if commit is None:
            raise _NotTheHub("it names no commit")
    sizes = choose_files(reference, files, file)
    cached = folder or _find_cached(name, commit, list(sizes))
    return Repository(name=name, commit=commit, sizes=sizes, cached=cached)


def choose_files(
    reference: HubReference, files: Mapping[str, int], file: str | None = None
) -> dict[str, int]:
    """Files of a conversion with sizes; ``file``: one of several GGUF models.  `UserError` P767."""
    if file is not None:
        return _choose_gguf(reference, files, file)
    top = {name: size for name, size in files.items() if "/" not in name}
    small = {
        name: size
        for name, size in files.items()
        if name.endswith(_SMALL)
        and (name in top or PurePosixPath(name).parent == PurePosixPath(TEMPLATES))
    }
    for ending in _WEIGHTS:
        if ending == ".gguf" and (models := _find_only_gguf(reference, files)):
            return models
        weights = {name: size for name, size in top.items() if name.endswith(ending)}
        if weights and "config.json" in top:
            # Mistral's repositories have all weights twice.
            whole = {name: n for name, n in weights.items() if not name.startswith("consolidated")}
            return {**small, **(whole or weights)}
    raise UserError.of(
        "P767",
        f"{reference.repository} has no weights that pi2 reads at {reference.revision}",
        help="name a repository with config.json and safetensors files, or with a GGUF model",
    )


_SIDE_FILE = re.compile(r"(^|[/.-])(mmproj|imatrix)([.-]|$)", re.IGNORECASE)
"""GGUF files that are no models: encoders of pictures, and importance matrices."""
_NUMBER = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")


def _find_only_gguf(reference: HubReference, files: Mapping[str, int]) -> dict[str, int]:
    """The GGUF model of a repository with all its parts; `UserError` P767 if it has several."""
    names = [name for name in files if name.endswith(".gguf") and not _SIDE_FILE.search(name)]
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        models.setdefault(_NUMBER.sub(r"\1", name), []).append(name)
    if len(models) > 1:
        firsts = [parts[0] for parts in models.values()]
        raise UserError.of(
            "P767",
            f"{reference.repository} has {len(models)} GGUF models",
            help=f"choose one: `pi2 pull hf:{reference.repository}/{firsts[0]}`, or of "
            + ", ".join(firsts[1:12]),
        )
    return {name: files[name] for name in names}


def _choose_gguf(reference: HubReference, files: Mapping[str, int], file: str) -> dict[str, int]:
    """A GGUF model, with all parts of a split one; `UserError` P767 if there is no such file."""
    known = sorted(name for name in files if name.endswith(".gguf"))
    if file not in known:
        raise UserError.of(
            "P767",
            f"{reference.repository} has no GGUF file {file!r} at {reference.revision}",
            help="it has " + (", ".join(known[:12]) or "none"),
        )
    parts = re.compile(re.sub(r"\d{5}(\\?-of)", r"\\d{5}\1", re.escape(file)))
    return {name: files[name] for name in known if parts.fullmatch(name)}


def is_weight_file(name: str) -> bool:
    return name.endswith(_WEIGHTS)


def fetch_files(
    repository: Repository,
    folder: Path,
    progress: Progress = ignore_progress,
    *,
    names: Sequence[str] | None = None,
) -> Path:
    """The folder with the repository's files: the hub's cache if complete, else ``folder``, into
    which missing ones are fetched. ``names``: some files.  `UserError` P544 before weights come,
    P761-P764."""
    if repository.cached is not None:
        return repository.cached
    chosen = list(repository.sizes) if names is None else names
    total, is_known = sum(repository.sizes[name] for name in chosen), False
    with explain_errors(repository.reference):
        folder.mkdir(parents=True, exist_ok=True)
        check_space(repository, folder, total)
    ordered = sorted(chosen, key=lambda name: (is_weight_file(name), name))
    for name, report in _list_reports(repository, ordered, progress):
        if is_weight_file(name) and not is_known:
            check_family(folder)
            is_known = True
        fetch_file(repository, name, folder, report)
    return folder


def _list_reports(
    repository: Repository, names: Sequence[str], progress: Progress
) -> Iterator[tuple[str, Callable[[int], None]]]:
    """Files one after the other, each with a function that reports how many of its bytes came."""
    ends = list(accumulate((repository.sizes[name] for name in names), initial=0))
    advance = ByteProgress(progress, "downloading", ends[-1])
    for name, done in zip(names, ends, strict=False):

        def report(count: int, done: int = done) -> None:
            advance(done + count)

        yield name, report


def fetch_file(
    repository: Repository, name: str, folder: Path, report: Callable[[int], None]
) -> None:
    """Fetch one file into ``folder``; ``report`` is told how many of its bytes have come.  Raises
    as `fetch_files`."""
    from huggingface_hub import hf_hub_download

    with explain_errors(repository.reference):
        for left in folder.rglob("*.incomplete"):
            left.unlink()  # the library does not go on with what a call before has left
        if is_weight_file(name):
            _fetch_weights(repository, name, folder, report)
        commit, bar = repository.commit, _make_bar(report)
        hf_hub_download(repository.name, name, revision=commit, local_dir=folder, tqdm_class=bar)
        file, size = folder / name, repository.sizes[name]
        if size and file.stat().st_size != size:
            found = file.stat().st_size
            file.unlink()  # the next call would take it for the file
            raise _NotTheHub(f"{name} has {found} bytes there, {size} were announced")


def _fetch_weights(
    repository: Repository, name: str, folder: Path, report: Callable[[int], None]
) -> None:
    """Fetch a large file as the library does, and go on with what calls before have left of it.
    The library then compares its SHA-256."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    size, commit = repository.sizes[name], repository.commit
    cached = try_to_load_from_cache(repository.name, name, revision=commit)
    if (folder / name).exists() or isinstance(cached, str):
        return
    if not 0 < size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    part = folder / f"{name}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        http_get(
            hf_hub_url(repository.name, name, revision=commit),
            file,
            resume_size=file.tell(),
            headers=build_hf_headers(),
            expected_size=size,
            displayed_filename=name,
            tqdm_class=_make_bar(report),
        )
    part.rename(folder / name)


def fetch_into_cache(
    repository: Repository, progress: Progress = ignore_progress
) -> dict[str, Path]:
    """The repository's files by name, in the hub's own cache; raises as `fetch_files`."""
    from huggingface_hub import hf_hub_download

    found = dict[str, Path]()
    for name, report in _list_reports(repository, list(repository.sizes), progress):
        with explain_errors(repository.reference):
            place = hf_hub_download(
                repository.name, name, revision=repository.commit, tqdm_class=_make_bar(report)
            )
        found[name] = Path(place)
    return found


class _NotTheHub(ValueError):
    """The server that answered is no hub."""


def check_family(folder: Path) -> None:
    """`UserError` P544 if ``config.json``, if there is one, tells of an unknown family."""
    file = folder / "config.json"
    if file.exists():
        describe_family(Config(file, unwrap_config(read_json(file))))


def _find_cached(name: str, commit: str, files: Sequence[str]) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(name, file, revision=commit) for file in files]
    config = next((Path(path) for path in found if isinstance(path, str)), None)
    if config is None or not all(isinstance(path, str) for path in found):
        return None
    return next(parent for parent in config.parents if parent.name == commit)


def check_space(repository: Repository, folder: Path, size_bytes: int) -> None:
    """`UserError` P764 if ``folder`` has no room for files of ``size_bytes`` more."""
    there = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
    needed, free = size_bytes - there, shutil.disk_usage(folder).free
    if needed > free:
        raise UserError.of(
            "P764",
            f"{repository.name} needs {needed / _MIB:,.0f} MiB more in {folder}, "
            f"where {free / _MIB:,.0f} MiB are free",
            help="free some space, or let PI2_CACHE_DIR name a folder of another disk",
        )


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Let no other process fetch into ``folder`` meanwhile; `UserError` P522 if one does, P764 if
    the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError.of(
            "P764",
            f"cannot make {folder}: {error.strerror}",
            help=f"set {VARIABLE} to a folder that you may write to",
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError.of("P522", f"another process is fetching into {folder}") from None
        yield
    finally:
        os.close(descriptor)


def _make_bar(report: Any) -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings["disable"] = True
            self.count = settings.get("initial") or 0
            super().__init__(*args, **settings)

        def update(self, n: float | None = 1) -> bool | None:
            self.count += n or 0
            report(self.count)
            return None

    return Bar


def _describe_answer(error: Exception) -> str:
    if isinstance(error, _NotTheHub):
        return str(error)
    return "it sends a page" if isinstance(error, ValueError) else "it sends another kind of JSON"


@contextmanager
def explain_errors(reference: HubReference) -> Iterator[None]:
    import httpx2
    from huggingface_hub import constants, errors, is_offline_mode

    name, revision = reference.repository, reference.revision
    try:
        yield
    except errors.GatedRepoError:
        raise UserError.of(
            "P762",
            f"{name} is given only to people who have agreed to its terms",
            help="agree on the model's page, then `hf auth login`, or set HF_TOKEN",
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError.of(
            "P761",
            f"the hub has no {name}, or does not show it",
            help="correct the name; for a private model `hf auth login`, or set HF_TOKEN",
        ) from None
    except (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError):
        raise UserError.of(
            "P761", f"{name} has no revision {revision!r}", help="name a branch, tag or commit"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        cause = error.__cause__
        offline = is_offline_mode()
        raise UserError.of(
            "P763",
            f"{name} at {revision} is not on this machine, and HF_HUB_OFFLINE is set"
            if offline
            else f"the hub does not give {name}: {cause or error}",
            help="unset HF_HUB_OFFLINE"
            if offline
            else "check your connection and HF_ENDPOINT, then rerun: finished files are kept",
        ) from None
    except errors.HfHubHTTPError as error:
        refused = error.response.status_code in (401, 403)
        raise UserError.of(
            "P762" if refused else "P763",
            f"the hub answers {error.response.status_code} for {name}",
            help="log in with `hf auth login`, or set HF_TOKEN" if refused else "try again later",
        ) from None
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        # A network that asks to log in, a proxy, a wrong address: a page instead of an answer.
        raise UserError.of(
            "P763",
            f"what answers at {constants.ENDPOINT} is no hub: {_describe_answer(error)}",
            help="open the address in a browser: a network may ask you to log in; look at "
            "HF_ENDPOINT and the proxy",
        ) from None
    except (httpx2.HTTPError, ConnectionError, TimeoutError) as error:
        raise UserError.of(
            "P763",
            f"cannot reach the hub: {str(error) or type(error).__name__}",
            help="check your connection and HF_ENDPOINT, then rerun: finished files are kept",
        ) from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError.of(
            "P764",
            f"cannot write {error.filename or 'the download'}: {error.strerror or error}",
            help="free some space, then rerun: finished files are kept" if full else None,
        ) from None


_HEADERS = "headers"
"""Folder of the headers that were read: a job that goes on needs no network for them."""


def open_repository(
    repository: Repository, folder: Path, progress: Progress = ignore_progress
) -> Checkpoint:
    """Open a checkpoint with small files in ``folder``; safetensors come when read (`HubShards`),
    others now.  Raises as `fetch_files` and `open_checkpoint`."""
    sizes = repository.sizes
    shards = [name for name in sizes if name.endswith(".safetensors")]
    if repository.cached is not None or INDEXES[0] not in sizes or len(shards) < 2:
        place = fetch_files(repository, folder, progress)
        models = sorted(name for name in sizes if name.endswith(".gguf"))
        return open_checkpoint(place / models[0] if models else place)
    small = [name for name in sizes if not is_weight_file(name)]
    fetch_files(repository, folder, names=small)
    check_family(folder)
    return open_folder(folder, HubShards(repository, folder, progress))


class HubShards:
    """The safetensors files of a repository, as `pi2.importing.safetensors_file.Shards` has it."""

    def __init__(
        self, repository: Repository, folder: Path, progress: Progress = ignore_progress
    ) -> None:
        self._repository = repository
        self._folder = folder
        total = sum(size for name, size in repository.sizes.items() if is_weight_file(name))
        self._advance = ByteProgress(progress, "downloading", total)
        self._lock = threading.Lock()
        self._small: dict[tuple[str, int, int], bytes] = {}
        self._settled_bytes = 0
        """Bytes of files that were there, or that nothing needed."""

    def read_header(self, file: Path) -> tuple[bytes, int]:
        size = self._repository.sizes[file.name]
        kept = self._folder / _HEADERS / file.name
        if kept.is_file():
            return kept.read_bytes(), size
        prefix = self.read_bytes(file, 0, 8)
        text = self.read_bytes(file, 8, measure_header(file, prefix, size))
        with explain_errors(self._repository.reference):
            replace_file(kept, prefix + text)
        return prefix + text, size

    def read_bytes(self, file: Path, offset: int, count: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]

        place = (file.name, offset, count)
        if count == 0 or place in self._small:
            return self._small.get(place, b"")
        name, commit = self._repository.name, self._repository.commit
        url = hf_hub_url(name, file.name, revision=commit)
        headers = {**build_hf_headers(), "Range": f"bytes={offset}-{offset + count - 1}"}
        found = bytearray()
        with (
            explain_errors(self._repository.reference),
            http_stream_backoff("GET", url, headers=headers, timeout=30) as response,
        ):
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            # A server that knows no ranges sends the file from its beginning.
            skipped = 0 if response.status_code == 206 else offset
            for piece in response.iter_bytes():
                found += piece
                if len(found) >= skipped + count:
                    break
        self._small[place] = bytes(found[skipped : skipped + count])
        return self._small[place]

    def measure(self, file: Path) -> int:
        return self._repository.sizes[file.name]

    def reserve(self, needed: Collection[Path], most_bytes: int) -> None:
        names = {file.name for file in needed}
        for name, size in self._repository.sizes.items():
            if is_weight_file(name) and name not in names:
                self.drop(self._folder / name)
                self._settled_bytes += size
        check_space(self._repository, self._folder, most_bytes)

    def bring(self, file: Path) -> None:
        with self._lock:
            if file.exists():
                return
            sizes = self._repository.sizes

            def report(count: int) -> None:
                self._advance(self._settled_bytes + count)

            check_space(self._repository, self._folder, sizes[file.name])
            fetch_file(self._repository, file.name, self._folder, report)
            self._settled_bytes += sizes[file.name]

    def drop(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def describe(self, file: Path) -> list[str | int]:
        repository = self._repository
        return [repository.name, repository.commit, file.name, repository.sizes[file.name]]
