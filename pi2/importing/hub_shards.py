"""Weight files of a hub's repository, fetched when a conversion needs them and deleted after it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from pi2.importing.checkpoint import Checkpoint, open_checkpoint, open_folder
from pi2.importing.hub import (
    HubReference,
    Repository,
    check_family,
    check_space,
    explain_errors,
    fetch_file,
    fetch_files,
    is_weight_file,
)
from pi2.importing.safetensors_file import measure_header
from pi2.progress import Progress, ignore_progress

_INDEX = "model.safetensors.index.json"
_HEADERS = "headers"
"""Folder of the headers that were read: a job that goes on needs no network for them."""


def open_repository(
    repository: Repository,
    folder: Path,
    progress: Progress = ignore_progress,
    *,
    endpoint: str | None = None,
) -> Checkpoint:
    """Open a repository's checkpoint, whose small files are fetched into ``folder``.

    Weights in several safetensors files come when they are read (`HubShards`), all others now, and
    none where the hub's own cache has everything.  An unknown family is refused before any weights
    come.  Raises `UserError` as `pi2.importing.hub.fetch_files` and
    `pi2.importing.checkpoint.open_checkpoint` do.
    """
    sizes = repository.sizes
    shards = [name for name in sizes if name.endswith(".safetensors")]
    if repository.cached is not None or _INDEX not in sizes or len(shards) < 2:
        place = fetch_files(repository, folder, progress, endpoint=endpoint)
        models = sorted(name for name in sizes if name.endswith(".gguf"))
        return open_checkpoint(place / models[0] if models else place)
    small = [name for name in sizes if not is_weight_file(name)]
    fetch_files(repository, folder, names=small, endpoint=endpoint)
    check_family(folder)
    return open_folder(folder, HubShards(repository, folder, progress, endpoint=endpoint))


class HubShards:
    """The safetensors files of a repository, as `pi2.importing.shards.Shards` has it."""

    def __init__(
        self,
        repository: Repository,
        folder: Path,
        progress: Progress = ignore_progress,
        *,
        endpoint: str | None = None,
    ) -> None:
        self._repository = repository
        self._folder = folder
        self._progress = progress
        self._endpoint = endpoint
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
        with explain_errors(self._reference):
            kept.parent.mkdir(exist_ok=True)
            unfinished = kept.with_suffix(".partial")
            unfinished.write_bytes(prefix + text)
            unfinished.replace(kept)
        return prefix + text, size

    def read_bytes(self, file: Path, offset: int, count: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        place = (file.name, offset, count)
        if count == 0 or place in self._small:
            return self._small.get(place, b"")
        name, commit = self._repository.name, self._repository.commit
        url = hf_hub_url(name, file.name, revision=commit, endpoint=self._endpoint)
        headers = {**build_hf_headers(), "Range": f"bytes={offset}-{offset + count - 1}"}
        found = bytearray()
        with (
            explain_errors(self._reference),
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
            total = sum(size for name, size in sizes.items() if is_weight_file(name))

            def report(count: int) -> None:
                self._progress("downloading", min(1.0, (self._settled_bytes + count) / total))

            check_space(self._repository, self._folder, sizes[file.name])
            fetch_file(self._repository, file.name, self._folder, report, self._endpoint)
            self._settled_bytes += sizes[file.name]

    def drop(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def describe(self, file: Path) -> list[str | int]:
        repository = self._repository
        return [repository.name, repository.commit, file.name, repository.sizes[file.name]]

    @property
    def _reference(self) -> HubReference:
        return HubReference(self._repository.name, self._repository.commit)
