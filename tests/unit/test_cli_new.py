"""`pi2 new`: documents to begin with, which are sound from the start."""

import shutil
from pathlib import Path

import pytest
import tomli

from pi2.cli import new
from pi2.cli.main import run
from pi2.fitting.check import check_file, load_plan
from pi2.fitting.sizes import find_needs
from pi2.plan.reading.references import list_shipped
from tests.helpers.goldens import copy_checkpoint, list_goldens
from tests.helpers.programs import Ask
from tests.helpers.slow import keep_quick

SIZES = "layers=4 hidden=64 ffn=128 heads=4 kv-heads=2 head-dim=16 vocab=100 context=128"
SHAPE = [f"--{item}" for item in SIZES.split()]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_plan(*arguments: str, memory: str = "1 GiB") -> int:
    return run(["new", "plan", "--memory", memory, *arguments])


@pytest.mark.parametrize("device", ["host", "oneplus-12", "raspberry-pi-5", "x86-laptop"])
@pytest.mark.parametrize("memory", ["300 MiB", "4 GiB"])
def test_a_new_plan_is_sound(device: str, memory: str) -> None:
    assert make_plan("--device", device, "--model", "pi2-demo", memory=memory) == 0
    report = check_file(Path(f"pi2-demo-on-{device}.plan.toml"))
    assert report.is_sound and report.resolved is not None
    assert report.resolved.plan.memory.segments.hot >= find_needs(report.resolved).hot.bytes


@pytest.mark.parametrize(("device", "is_phone"), [("oneplus-12", True), ("x86-laptop", False)])
def test_plans_for_phones_name_android_s_limit(device: str, is_phone: bool) -> None:
    assert make_plan("--device", device, "--model", "pi2-demo") == 0
    lines = Path(f"pi2-demo-on-{device}.plan.toml").read_text().splitlines()
    (budget,) = [line for line in lines if line.startswith("budget")]
    assert ("Android 17 limits anonymous memory" in budget) == is_phone


MODELS = sorted(list_shipped("model"))


@pytest.mark.parametrize("model", keep_quick(MODELS, MODELS[::4]))
def test_every_shipped_model_gets_a_plan(model: str) -> None:
    assert make_plan("--device", "pc-rtx-4090", "--model", model, memory="64 GiB") == 0
    (path,) = Path().glob("*.plan.toml")
    report = check_file(path)
    assert report.is_sound and report.resolved is not None
    segments = report.resolved.plan.memory.segments
    assert sum(size for _, size in segments) <= report.resolved.plan.memory.budget


def test_more_memory_keeps_more_neurons() -> None:
    hot = []
    for memory in ("3 GiB", "4 GiB", "5 GiB", "8 GiB"):
        arguments = ("--device", "cloud-vm-zen5", "--model", "bamboo-7b", "--force")
        assert make_plan(*arguments, "-o", "my.plan.toml", memory=memory) == 0
        resolved = check_file(Path("my.plan.toml")).resolved
        assert resolved is not None
        hot.append(resolved.layers[0].hot)
    assert hot == sorted(hot) and hot[0] < hot[-1] == 1.0


def test_too_little_memory_is_refused_with_what_is_needed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--device", "host", "--model", "llama-2-7b")
    assert make_plan(*arguments, memory="1 GiB") == 2
    error = capsys.readouterr().err
    assert "error[P026]" in error
    needed = error.partition("--memory '")[2].partition("'")[0]
    assert make_plan(*arguments, memory=needed) == 0


def test_references_are_seen_from_the_new_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path(".git").mkdir()
    assert run(["new", "device", "box"]) == 0
    assert run(["new", "model", "tiny", *SHAPE, "--activation", "relu"]) == 0
    arguments = ["--device", "./box.device.toml", "--model", "tiny.model.toml"]
    assert make_plan(*arguments, "-o", "a/b/my.plan.toml") == 0
    assert tomli.loads(Path("a/b/my.plan.toml").read_text())["device"] == "../../box.device.toml"
    assert load_plan("a/b/my.plan.toml").plan.decode.predictor == "gate"


def test_a_device_is_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["new", "device", "box"]) == 0
    assert check_file(Path("box.device.toml")).diagnostics == ()
    assert tomli.loads(Path("box.device.toml").read_text())["units"]["cpu"]["kind"] == "cpu"


def test_devices_and_models_begin_with_others() -> None:
    assert run(["new", "device", "pad", "--like", "oneplus-12"]) == 0
    assert run(["new", "model", "mine", "--like", "llama-2-7b"]) == 0
    for name in ("pad.device.toml", "mine.model.toml"):
        report = check_file(Path(name))
        assert report.diagnostics == () and report.document is not None
        assert report.document.id == name.split(".")[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_that_is_no_checkpoint_is_refused(name: str, ask: Ask) -> None:
    Path("empty").mkdir()
    assert "error[P5" in ask(["new", "model", "small", "--checkpoint", name], 2).err
    assert list(Path().glob("*.toml")) == []


def test_a_model_may_be_a_checkpoint_s(tmp_path: Path) -> None:
    copy_checkpoint(list_goldens()[0], tmp_path / "checkpoint")
    assert run(["new", "model", "small", "--checkpoint", "checkpoint"]) == 0
    report = check_file(Path("small.model.toml"))
    assert report.is_sound and report.document is not None
    assert report.document.id == "small"  # type: ignore[attr-defined]


def test_nothing_is_overwritten(ask: Ask) -> None:
    Path("box.device.toml").write_text("mine")
    assert "error[P027]" in ask(["new", "device", "box"], 2).err
    assert Path("box.device.toml").read_text() == "mine"
    assert run(["new", "device", "box", "--force"]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan"], "--device is missing"),
        (["plan", "--device", "host"], "--model is missing"),
        (["plan", "--device", "host", "--model", "pi2-demo"], "--memory is missing"),
        (["device"], "NAME is missing"),
        (["model", "x"], "--layers is missing"),
        (["plan", "--device", "hots"], "--model is missing"),
        (["plan", "--device", "hots", "--model", "pi2-demo", "--memory", "1 GiB"], "P015"),
        (["plan", "--device", "host", "--model", "pi2-demo", "--memory", "1"], "P105"),
        (["device", "box", "-o", "box.toml"], "P009"),
        (["device", "Box"], "P106"),
        (["model", "x", *SHAPE, "--activation", "gelo"], "P104"),
    ],
)
def test_elsewhere_than_on_a_terminal_everything_must_be_given(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["new", *arguments]) in (1, 2)
    assert text in capsys.readouterr().err
    assert list(Path().glob("*.toml")) == []


def test_on_a_terminal_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["host", "pi2-demo", "400 MiB"])
    asked = []

    def answer(question: str, **options: object) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr(new, "is_guided", lambda: True)
    monkeypatch.setattr("click.prompt", answer)
    assert run(["new", "plan"]) == 0
    assert asked == ["Device", "Model", "Memory for the whole process"]
    assert check_file(Path("pi2-demo-on-host.plan.toml")).is_sound


def test_the_schema_is_named_where_there_is_one() -> None:
    Path("schemas").mkdir()
    shutil.copy(Path(__file__).parents[2] / "schemas/device.schema.json", "schemas")
    assert run(["new", "device", "box", "-o", "devices/box.device.toml"]) == 0
    text = Path("devices/box.device.toml").read_text()
    assert text.startswith("#:schema ../schemas/device.schema.json\n")
