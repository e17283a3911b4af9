"""Files of a checkpoint: regular ones, that lie where the checkpoint is.

What is read goes into stores, which people share.  A symbolic link named ``chat_template.jinja``
must not put somebody's key file there.
"""

from __future__ import annotations

import os
from pathlib import Path

from pi2.diagnostics import UserError
from pi2.regular_file import check_regular, read_regular

_BLOBS, _SNAPSHOTS = "blobs", "snapshots"
"""Folders of a repository in the hub's cache: ``snapshots/REVISION/NAME`` links to ``blobs``."""


def check_place(folder: Path, file: Path) -> os.stat_result:
    """What the system knows of ``file``, which is in the checkpoint ``folder``.

    `UserError` P538 if symbolic links lead out of the folder, but for those of the hub's cache;
    `OSError` if it is no regular file, or cannot be looked at.
    """
    home = folder.resolve()
    places = [home]
    if home.parent.name == _SNAPSHOTS:
        places.append(home.parent.parent / _BLOBS)
    target = file.resolve()
    if not any(target.is_relative_to(place) for place in places):
        raise UserError.of(
            "P538",
            f"{file} is a link out of the checkpoint, to {target}",
            help="copy the file to where the link is: what lies outside of the folder is not read",
        )
    return check_regular(file)


def read_place(folder: Path, file: Path) -> bytes:
    """Contents of ``file`` in the checkpoint ``folder``; raises as `check_place`."""
    check_place(folder, file)
    return read_regular(file)
