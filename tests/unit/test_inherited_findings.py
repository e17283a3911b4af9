"""A finding about a value of a shipped document stands at the user's line that inherits it."""

from __future__ import annotations

from pathlib import Path

from pi2.diagnostics import Diagnostic
from pi2.fitting.check import check_file
from pi2.plan.reading.references import find_shipped_folder
from pi2.plan.toml.source import display_path


def find(path: Path, text: str) -> Diagnostic:
    """The only finding about a document of the user's."""
    path.write_text(f"schema_version = 3\n{text}")
    (item,) = check_file(path).diagnostics
    return item


def show(item: Diagnostic) -> tuple[str, str, str | None]:
    """Code, place, and help."""
    assert item.span is not None
    return item.code, f"{item.span.line}:{item.span.column}", item.help


def test_a_value_of_a_shipped_plan_is_found_where_it_is_inherited(tmp_path: Path) -> None:
    path = tmp_path / "my.plan.toml"
    item = find(path, 'extends = ["demo"]\nkv.context = 1024\nlayers.hot = 0.25\n')
    assert item.span is not None
    assert item.span.file == str(path)
    wanted = f'in {path}, write memory.segments.hot = "1 MiB", or lower layers.hot'
    assert show(item) == ("P202", "2:12", wanted)
    place = display_path(find_shipped_folder() / "demo.plan.toml")
    assert any(note.startswith(f"{place}:") for note in item.notes)
    assert any(note.endswith('hot = "512 KiB"') for note in item.notes)
    # What it says to write is enough.
    path.write_text(path.read_text() + 'memory.segments.hot = "1 MiB"\nmemory.budget = "129 MiB"\n')
    assert check_file(path).is_sound


def test_a_value_of_a_shipped_device_is_found_in_the_device_that_extends_it(tmp_path: Path) -> None:
    path = tmp_path / "c.device.toml"
    item = find(path, 'id = "c"\nextends = ["oneplus-12"]\nmemory.capacity = "1 GiB"\n')
    assert show(item) == ("P250", "3:12", f"write memory.usable in {path}, and it counts instead")


def test_a_name_in_a_shipped_plan_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "my.plan.toml"
    text = 'extends = ["oneplus-12/bamboo-7b-half"]\ndevice = "x86-laptop"\nthreads.compute = 4\n'
    path.write_text(f"schema_version = 3\n{text}")
    found = [item for item in check_file(path).diagnostics if item.code == "P211"]
    assert show(found[0])[1] == "2:12"
    assert f'write remove = ["layers.split.npu"] in {path} to leave it out' in str(found[0].help)


def test_the_way_through_files_of_one_s_own_ends_at_the_last_of_them(tmp_path: Path) -> None:
    base = tmp_path / "base.plan.toml"
    base.write_text('schema_version = 3\n\nextends = ["demo"]\n')
    item = find(tmp_path / "my.plan.toml", 'extends = ["base.plan.toml"]\nlayers.hot = 0.25\n')
    assert item.span is not None
    assert item.span.place == f"{base}:3:12"
    assert f'{tmp_path / "my.plan.toml"}:2:12: extends "base.plan.toml"' in item.notes


def test_a_value_in_a_file_of_one_s_own_stays_where_it_is(tmp_path: Path) -> None:
    base = tmp_path / "base.plan.toml"
    base.write_text('schema_version = 3\nextends = ["demo"]\nmemory.segments.hot = "256 KiB"\n')
    item = find(tmp_path / "my.plan.toml", 'extends = ["base.plan.toml"]\n')
    assert item.span is not None
    assert item.span.place == f"{base}:3:23"
