"""Checking many plans reads their devices and models once, and finds the same."""

import os
import shutil
from pathlib import Path

import pytest

from pi2.fitting.check import check_file
from pi2.fitting.inspection import Reuse
from pi2.plan.reading import references
from pi2.plan.reading.references import list_documents
from pi2.plan.toml.source import read_source

ROOT = Path(__file__).parents[2]
BROKEN = ROOT / "tests/plans/broken"
PARTS = BROKEN / "parts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, tmp_path)
    for number in range(5):
        shutil.copy(PARTS / "base.plan.toml", tmp_path / f"{number}.plan.toml")
    return tmp_path


def test_the_same_is_found_with_and_without() -> None:
    reuse = Reuse()
    paths = [*list_documents([BROKEN]), *list_documents([ROOT / "plans"])][::3]
    assert len(paths) > 50
    for path in paths:
        alone, together = check_file(path), check_file(path, reuse=reuse)
        assert together.diagnostics == alone.diagnostics, path
        assert together.sources == alone.sources and together.document == alone.document
        assert (together.resolved is None) == (alone.resolved is None)
        if together.resolved is not None and alone.resolved is not None:
            assert together.resolved.digest == alone.resolved.digest


def test_devices_and_models_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = read_source

    def count(path: Path, name: str) -> object:
        read.append(path.name)
        return original(path, name)

    monkeypatch.setattr(references, "read_source", count)
    reuse = Reuse()
    for path in sorted(folder.glob("*.plan.toml")):
        assert check_file(path, reuse=reuse).is_sound
    assert read.count("phone.device.toml") == read.count("small.model.toml") == 1
    assert len(read) == 8


def test_a_file_that_changes_is_read_again(folder: Path) -> None:
    reuse, device = Reuse(), folder / "phone.device.toml"
    assert check_file(folder / "0.plan.toml", reuse=reuse).is_sound
    device.write_text(device.read_text().replace("cores = 3", "cores = 0 "))
    os.utime(device, ns=(1, 1))
    found = check_file(folder / "1.plan.toml", reuse=reuse).diagnostics
    assert [item.code for item in found] == ["P104"]
