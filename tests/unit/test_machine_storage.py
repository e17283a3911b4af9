"""Detection of the storage behind a path."""

import os
from pathlib import Path

import pytest

from pi2.machine.storage import inspect_storage, probe_direct_reads


def make_block_device(root: Path, number: int, block_bytes: int) -> None:
    disk = root / "sys/devices/virtual/block/nvme0n1"
    partition = disk / "nvme0n1p2"
    partition.mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "queue/logical_block_size").write_text(f"{block_bytes}\n")
    links = root / "sys/dev/block"
    links.mkdir(parents=True)
    (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(partition)


def test_partition_has_the_block_of_its_disk(tmp_path: Path) -> None:
    make_block_device(tmp_path / "root", tmp_path.stat().st_dev, 4096)
    storage = inspect_storage(tmp_path, tmp_path / "root")
    assert (storage.device, storage.block_bytes) == ("nvme0n1", 4096)


def test_filesystem_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        f"20 1 {name} / / rw,relatime - ext4 /dev/vda rw\n"
        f"21 1 {name} / {tmp_path} rw shared:1 - btrfs /dev/vda rw\n"
        "22 1 0:99 / /proc rw - proc proc rw\n"
    )
    assert inspect_storage(tmp_path / "not/there", root).filesystem == "btrfs"


def test_nothing_is_claimed_of_unknown_devices(tmp_path: Path) -> None:
    storage = inspect_storage(tmp_path, tmp_path / "empty")
    assert (storage.device, storage.block_bytes, storage.filesystem) == (None, None, None)
    assert storage.free_bytes is not None and storage.free_bytes > 0


def test_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    probe_direct_reads(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_probe_reads_a_file_where_there_is_one(tmp_path: Path) -> None:
    sample = tmp_path / "layer.arrow"
    sample.write_bytes(bytes(8192))
    direct = probe_direct_reads(sample)
    assert direct == probe_direct_reads(tmp_path)
    assert direct.works == (direct.obstacle is None)
    assert direct.align_bytes in ((512, 4096) if direct.works else (None,))


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="needs Linux")
def test_file_system_that_refuses_direct_reads() -> None:
    direct = probe_direct_reads(Path("/proc/cpuinfo"))
    assert not direct.works and direct.obstacle


def test_system_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    assert probe_direct_reads(tmp_path).obstacle == "this system has no O_DIRECT"
