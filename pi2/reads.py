"""Reads from disks that may refuse a kind of read, or fail."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.caches import open_regular
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.arrays import U8


def read_at(descriptor: int, target: memoryview, offset: int, least: int) -> int:
    """Read from byte ``offset`` into ``target`` until it has ``least`` bytes; return how many it
    has, fewer at the end of the file.

    A read past the page cache that the system refuses goes through the page cache, as all later
    ones of ``descriptor`` do. Raises `OSError`."""
    done, refused = 0, False
    while done < least:
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            # Another thread may have let reads go through the page cache meanwhile.
            if error.errno == errno.EINVAL and not refused:
                leave_direct(descriptor)
                refused = True
                continue
            raise
        if count == 0:
            break
        done += count
    return done


def is_direct(descriptor: int) -> bool:
    """Whether its reads go past the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def leave_direct(descriptor: int) -> None:
    """Let reads of ``descriptor``, by any engine, go through the page cache."""
    if is_direct(descriptor):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def describe_failure(path: Path, offset: int, error: OSError) -> str:
    """What could not be read: file, place and disk."""
    found = find_mount(path)
    disk = "" if found is None else f" on {found[1]} ({found[0]})"
    return f"cannot read {path} at byte {offset}{disk}: {error.strerror or error}"


def refuse_weights(path: Path, offset: int, error: OSError) -> UserError:
    """The error for weights that their disk does not give."""
    return UserError.of(
        "P546",
        describe_failure(path, offset, error),
        help="look at the disk's own messages (`dmesg`), and copy the file to another disk",
    )


def read_weights(path: Path, target: U8, offset: int, part: str) -> None:
    """Fill ``target`` from byte ``offset`` of a file; `UserError` P532 where it ends inside
    ``part``, or cannot be opened, P546 where the disk fails."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise UserError.of("P532", f"cannot read {part} of {path}: {error.strerror}") from None
    try:
        if read_at(descriptor, target.data, offset, target.nbytes) < target.nbytes:
            raise UserError.of(
                "P532", f"{path} ends inside {part}", help="download or export it again"
            )
    except OSError as error:
        raise refuse_weights(path, offset, error) from None
    finally:
        os.close(descriptor)


def refuse_cut(path: Path) -> UserError:
    """The error for weights that ended while they were in use."""
    return UserError.of(
        "P532",
        f"cannot read {path}: it was cut while it was in use",
        help="restore the file, and load the model again",
    )


def find_mount(path: Path, root: Path = Path("/")) -> tuple[str, str] | None:
    """Type and source, such as ``ext4`` and ``/dev/sda1``, of the file system that has ``path``;
    ``root`` has ``proc``."""
    try:
        path, number = path.absolute(), os.stat(path).st_dev
        lines = (root / "proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    nearest, found = -1, None
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields, words = mount.split(), source.split()
        if len(fields) < 5 or fields[2] != wanted or len(words) < 2:
            continue
        point = Path(fields[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) > nearest:
            nearest, found = len(point.parts), (words[0], words[1])
    return found
