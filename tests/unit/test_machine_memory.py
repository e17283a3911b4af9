"""Detection of main memory and of limits on it."""

import os
import sys
from pathlib import Path

import pytest

from limited.memory_group import GroupUnavailable, MemoryGroup
from pi2.machine import detect_memory
from tests.helpers.patience import PATIENCE_S

GIB = 1 << 30


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_meminfo(root: Path, total_gib: int, available_gib: int) -> None:
    """Write ``/proc/meminfo``, which counts in KiB and calls them kB."""
    write(
        root,
        "proc/meminfo",
        f"MemTotal:       {total_gib << 20} kB\nMemFree:          1024 kB\n"
        f"MemAvailable:   {available_gib << 20} kB\nHugePages_Total:       0\n",
    )


def test_machine_without_limits(tmp_path: Path) -> None:
    write_meminfo(tmp_path, 16, 9)
    memory = detect_memory(tmp_path)
    assert memory.installed_bytes == 16 * GIB and memory.limit_bytes == 16 * GIB
    assert memory.available_bytes == 9 * GIB


STATISTICS = {
    "inactive_file": 1024, "active_file": 512, "file_dirty": 64, "file_writeback": 32,
    "unevictable": 128, "anon": 300,
}  # fmt: skip
"""Of a group of version 2, in MiB; version 1 has other names for three of them."""
GROUPS = {
    1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    2: ("job/memory.max", "job/memory.current", "job/memory.stat"),
}


def write_group(root: Path, version: int, limit: int, used: int, **changes: int) -> None:
    """Write a group's limit, use and ``memory.stat`` [MiB], as the kernel names them."""
    names = GROUPS[version]
    write(root, "proc/self/cgroup", "4:memory:/docker/0123\n" if version == 1 else "0::/job\n")
    lines: dict[str, int] = {}
    for key, size in (STATISTICS | changes).items():
        name = f"total_{key.removeprefix('file_')}" if version == 1 else key
        lines |= {name: size << 20} | ({key.removeprefix("file_"): 7} if version == 1 else {})
    texts = (limit << 20, used << 20, "".join(f"{key} {n}\n" for key, n in lines.items()))
    for name, text in zip(names, texts, strict=True):
        write(root, f"sys/fs/cgroup/{name}", f"{text}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_all_page_cache_of_a_group_is_free_but_what_is_not_written_yet(
    tmp_path: Path, version: int
) -> None:
    write_meminfo(tmp_path, 16, 9)
    write_group(tmp_path, version, limit=4096, used=3000)
    memory = detect_memory(tmp_path)
    assert memory.installed_bytes == 16 * GIB and memory.limit_bytes == 4 * GIB
    assert memory.available_bytes == 4096 - (3000 - 1024 - 512 + 64 + 32) << 20


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_that_is_read_again_and_again_takes_no_memory(tmp_path: Path, version: int) -> None:
    """Pages that are used again move from one list of the kernel to the other."""
    write_meminfo(tmp_path, 16, 9)
    found = []
    for active in (0, 200, 400):
        write_group(tmp_path, version, 800, 500, active_file=active, inactive_file=400 - active)
        found.append(detect_memory(tmp_path).available_bytes)
    assert len(set(found)) == 1


def test_a_group_without_statistics_is_taken_at_its_word(tmp_path: Path) -> None:
    write_meminfo(tmp_path, 16, 9)
    write(tmp_path, "proc/self/cgroup", "4:memory:/docker/0123\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    memory = detect_memory(tmp_path)
    assert (memory.limit_bytes, memory.available_bytes) == (2 * GIB, GIB)


def test_no_limit_is_written_as_a_word_or_as_a_huge_number(tmp_path: Path) -> None:
    write_meminfo(tmp_path, 16, 9)
    write(tmp_path, "proc/self/cgroup", "4:memory:/\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert detect_memory(tmp_path).limit_bytes == 16 * GIB


def test_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    write_meminfo(tmp_path, 16, 9)
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", f"{GIB}\n")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.max", f"{8 * GIB}\n")
    assert detect_memory(tmp_path).limit_bytes == GIB


def test_this_machine() -> None:
    memory = detect_memory()
    assert 0 < memory.available_bytes <= memory.limit_bytes <= memory.installed_bytes


def make_version_2(root: Path, control: str) -> Path:
    """A tree of control groups of version 2 as plain files, this process in ``user/session``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/user/session\n")
    group = root / "sys/fs/cgroup/user"
    (group / "session").mkdir(parents=True)
    (group / "cgroup.subtree_control").write_text(control)
    return group


def test_a_group_of_version_2_is_limited_counted_and_removed(tmp_path: Path) -> None:
    parent = make_version_2(tmp_path, "cpu memory\n")
    with MemoryGroup(64 << 20, name="test", root=tmp_path) as group:
        assert group.folder.parent == parent, "the nearest that hands on its memory controller"
        assert (group.folder / "memory.max").read_text() == str(64 << 20)
        assert (group.folder / "memory.swap.max").read_text() == "0"
        (group.folder / "memory.peak").write_text("123\n")
        (group.folder / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
        assert (group.peak_bytes, group.kills) == (123, 2)
        process = group.start([sys.executable, "-c", "pass"])
        assert process.wait(timeout=PATIENCE_S) == 0
        assert (group.folder / "cgroup.procs").read_text() == f"{process.pid}\n"
        for file in group.folder.iterdir():  # in a real one they go with the folder
            file.unlink()
    assert not group.folder.exists()


def test_a_group_is_refused_where_no_parent_hands_on_its_memory_controller(tmp_path: Path) -> None:
    control = make_version_2(tmp_path, "cpu\n") / "cgroup.subtree_control"
    control.chmod(0o444)
    if os.access(control, os.W_OK):  # root may write everywhere
        control.unlink()
    with pytest.raises(GroupUnavailable, match="no memory controller of version 2"):
        MemoryGroup(1 << 20, version=2, root=tmp_path).__enter__()
    with pytest.raises(GroupUnavailable, match="no memory controller of version 1"):
        MemoryGroup(1 << 20, version=1, root=tmp_path).__enter__()
