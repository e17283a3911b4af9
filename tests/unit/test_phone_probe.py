"""A bundle's own probe writes a device file that pi2 validates and plans with."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.phone.runtime import probing
from pi2.phone.runtime.probing import write_toml
from pi2.probing import storage

MIB = 1 << 20


def test_what_is_written_is_a_valid_device_with_rates_of_flash_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ROUND_S", 0.002)
    monkeypatch.setattr(probing, "METER_BYTES", 4 * MIB)
    flash = tmp_path / "store/layers"
    flash.mkdir(parents=True)
    (flash / "ffn-000.arrow").write_bytes(bytes(storage.SAMPLE_BYTES + MIB))
    output = tmp_path / "phone.device.toml"
    probing.write_probe(output, tmp_path / "store", [], rounds=1)
    report = check_file(output)
    assert report.is_sound, report.diagnostics
    values = tomllib.loads(output.read_text())
    assert values["id"] == "phone"
    assert {item["pattern"] for item in values["storage"]["reads"]} == {"sequential", "random"}
    assert "numpy maximum" in values["memory"]["read_bandwidth"]["source"]
    assert "8 MiB" in values["noise"]["source"]
    assert run(["validate", str(output)]) == 0


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    output = tmp_path / "phone.device.toml"
    output.write_text("mine")
    with pytest.raises(UserError, match="P675"):
        probing.write_probe(output, tmp_path, [])
    assert output.read_text() == "mine"


def test_plain_values_come_back_as_they_were_written() -> None:
    values = {
        "id": 'a"b\\c\n\u00e9',
        "share": 0.25,
        "whole": 3.0,
        "count": 3,
        "truth": True,
        "names": ["x", "y"],
        "units": {"odd name": {"kind": "cpu", "reads": [{"a": 1}, {"a": 2, "deep": {"b": "c"}}]}},
    }
    assert tomllib.loads(write_toml({**values, "none": None, "empty": []})) == values
