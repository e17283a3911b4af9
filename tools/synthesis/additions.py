"""Adds small files to a finished store, such as statistics measured on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from pi2.caches import replace_file
from pi2.store.files import explain_os_error
from pi2.store.manifest import MANIFEST, Manifest, StoredFile, read_manifest


def add_files(store: Path, contents: Mapping[str, bytes]) -> Manifest:
    """Write ``contents`` (bytes by path inside the store), replacing files of the same names.

    The manifest that lists them is replaced last and at once: after a crash the store is as it
    was, unless a file of the same name was there (`pi2 store verify` tells then).  Raises
    `UserError` P501-P508 if there is no sound store, P523 if it cannot be written to.
    """
    manifest = read_manifest(store)
    known = {entry.path: entry for entry in manifest.files}
    try:
        for path, content in contents.items():
            entry = known.get(path)
            assert entry is None or entry.rows is None, f"{path} holds weights"
            replace_file(store / path, content)
            digest = hashlib.sha256(content).hexdigest()
            known[path] = StoredFile(path=path, bytes=len(content), sha256=digest)
        described = manifest.model_copy(
            update={"files": tuple(known[path] for path in sorted(known))}
        )
        _write_manifest(store, described)
    except OSError as error:
        raise explain_os_error(error, store) from None
    return described


def _write_manifest(store: Path, manifest: Manifest) -> None:
    """Put ``manifest`` in the place of the store's; raises `OSError` as the system does."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False)
    replace_file(store / MANIFEST, text.encode() + b"\n")
