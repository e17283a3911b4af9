"""Messages name the setting, its value, the limit and what mends it."""

import re
from pathlib import Path

import pytest

from pi2.backends.gpu import devices
from pi2.checkup import find_device_obstacles
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.misfits import find_misfits
from pi2.importing.hub import parse_reference
from pi2.plan.documents.quantities import BYTE_UNITS, parse_quantity, parse_size
from pi2.planning.wish import read_document
from pi2.sharing.fetching import Cache, hash_bytes
from tests.helpers.programs import start_python
from tests.unit.test_fit import make_machine

Capture = pytest.CaptureFixture[str]
DEMO = 'schema_version = 3\nextends = ["demo"]\n'


def validate(folder: Path, text: str, capsys: Capture) -> str:
    plan = folder / "mine.plan.toml"
    plan.write_text(DEMO + text)
    run(["validate", str(plan)])
    return capsys.readouterr().out


def test_the_advised_size_fits_and_is_hardly_larger(tmp_path: Path, capsys: Capture) -> None:
    text = 'model = "llama-2-7b"\nmemory.segments.attention = "1 MiB"\nkv.context = 1000\n'
    said = validate(tmp_path, text, capsys)
    needs = re.findall(r"segment (\w+) has .+? and needs ([\d.]+ \w+):", said)
    assert len(needs) > 2
    for name, need in needs:
        advised = re.search(rf'write (?:memory.segments.)?{name} = "([^"]+)"', said)
        assert advised is not None
        size = parse_quantity(advised[1], BYTE_UNITS)
        assert 0.99 < size / parse_quantity(need, BYTE_UNITS) < 1.03


def test_the_two_sizes_of_a_message_differ() -> None:
    limit = 700_000_000
    device = read_document("host", "device").document
    machine = make_machine(limit=limit, available=limit)
    (found,) = find_misfits(device, machine, limit + 4096)  # type: ignore[arg-type]
    numbers = re.findall(r"([\d.]+) MiB", found.message)
    assert found.code == "P303" and len(set(numbers)) == 2
    advised = re.search(r"--memory '([^']+)'", found.help or "")
    assert advised is not None and parse_size(advised[1]) <= limit


def test_sizes_of_options_say_which_option() -> None:
    with pytest.raises(UserError, match=r"--memory '20': the unit is missing\n  help: .*20GiB"):
        parse_size("20")
    with pytest.raises(UserError, match="--cache '3 parsecs': unknown unit"):
        parse_size("3 parsecs", "--cache")
    with pytest.raises(UserError, match="the size is zero"):
        parse_size("0 B")


def test_a_reference_without_its_scheme_is_told() -> None:
    with pytest.raises(UserError, match="write hf:meta-llama/Llama-3"):
        parse_reference("meta-llama/Llama-3")


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    cache, name = Cache(tmp_path), "phone.device.toml"
    path = cache.add(b"id", name)
    path.write_bytes(b"other")
    with pytest.raises(UserError) as caught:
        cache.find(hash_bytes(b"id"), name)
    (found,) = caught.value.diagnostics
    assert found.code == "P713" and str(path) in found.message and str(path) in (found.help or "")


def test_a_gpu_without_a_driver_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = [devices.Survey(api="opencl", obstacle="no OpenCL driver finds a device (why)")]
    monkeypatch.setattr("pi2.backends.gpu.devices.survey_devices", lambda apis: nothing)
    for emulated in (False, True):
        found = find_device_obstacles("gpu", emulated=emulated)
        assert found == ["no device here: opencl: no OpenCL driver finds a device"]
        assert find_device_obstacles("cpu", emulated=emulated) == []


def test_crashes_are_reported_though_the_installation_has_gone() -> None:
    code = "import pi2.cli.main, sys; print('pi2.cli.main' in sys.modules)"
    assert start_python("-c", code, check=True).stdout == "True\n"
