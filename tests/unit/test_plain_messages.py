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
from tests.helpers.programs import Ask, start_python
from tests.unit.test_fit import make_machine

Capture = pytest.CaptureFixture[str]
DEMO = 'schema_version = 3\nextends = ["demo"]\n'


def validate(folder: Path, text: str, capsys: Capture) -> str:
    plan = folder / "mine.plan.toml"
    plan.write_text(DEMO + text)
    run(["validate", str(plan)])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message", "help_text"),
    [
        (
            "decode = { threshold = 0.5, missing_threshold = 0.5 }",
            "missing_threshold = 0.5 has no effect: it must be above threshold = 0.5",
            "remove missing_threshold, or raise it",
        ),
        (
            'decode = { predictor = "gate", leave_out = 0.02 }',
            'leave_out has no effect with predictor = "gate"',
            'remove leave_out, or write predictor = "low-rank"',
        ),
        (
            "decode = { missing_threshold = 1.0, leave_out = 0.02 }",
            "leave_out and missing_threshold = 1 exclude each other",
            "remove one",
        ),
        (
            "kv.context = 4096",
            "context 4096 exceeds the limit of the model `pi2-demo`: 1024",
            "write context = 1024 or less",
        ),
        ("layers.hot = 1.5", "`layers.hot` must be 0 to 1, got 1.5", ""),
        ("layers.hot = 50", "`layers.hot` must be 0 to 1, got 50", "write 0.5 for 50 %"),
        (
            "sparsity.method = 'cats'",
            "[sparsity] needs target or max_perplexity_increase",
            "target = 0.5",
        ),
        ('name = "demo', "unterminated string", 'use """ for multi-line strings'),
        ("memory.segments.kv = '1 MiB'", "segment kv has 1 MiB and needs 4 MiB", '"4 MiB"'),
        ("memory.budget = '100 MiB'", "more than the budget of 100 MiB", "raise the budget to 126"),
    ],
)
def test_a_plan_is_told_what_to_change(
    tmp_path: Path, text: str, message: str, help_text: str, capsys: Capture
) -> None:
    said = validate(tmp_path, text, capsys)
    assert message in said and help_text in said
    assert "write 0.015" not in said


@pytest.mark.parametrize("slip", ["hto", "hott", "Hot", "oht"])
def test_a_misspelt_key_is_one_finding(tmp_path: Path, slip: str, capsys: Capture) -> None:
    plan = tmp_path / "mine.plan.toml"
    demo = (Path(__file__).parents[2] / "plans/demo.plan.toml").read_text()
    plan.write_text(demo.replace("hot = 0.125", f"{slip} = 0.125"))
    run(["validate", str(plan)])
    said = capsys.readouterr().out
    assert said.count("error[") == 1 and "did you mean `hot`?" in said


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
        cache.read(hash_bytes(b"id"), name)
    (found,) = caught.value.diagnostics
    assert found.code == "P713" and str(path) in found.message and str(path) in (found.help or "")


def test_a_missing_checkpoint_is_no_folder(tmp_path: Path, capsys: Capture) -> None:
    assert run(["convert", str(tmp_path / "none"), "-o", str(tmp_path / "store")]) != 0
    said = capsys.readouterr().err
    assert f"there is no file or folder {tmp_path}/none" in said and "GGUF file" in said


def test_missing_store_has_a_plain_path(tmp_path: Path, ask: Ask) -> None:
    plan = tmp_path / "plans/mine.plan.toml"
    plan.parent.mkdir()
    plan.write_text(DEMO + 'weights = "../stores/none"\n')
    said = ask(["run", str(plan), "--prompt", "x"], 2).err
    assert f"no neuron store at {tmp_path}/stores/none" in said
    assert f"pi2 convert CHECKPOINT -o {tmp_path}/stores/none" in said


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
