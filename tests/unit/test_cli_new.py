"""`pi2 new`: documents to begin with, which are sound from the start."""

from pathlib import Path

import pytest

from pi2.cli import new
from pi2.cli.main import run
from pi2.fitting.check import check_file
from pi2.plan.reading.references import list_shipped
from tests.helpers.goldens import copy_checkpoint, list_goldens
from tests.helpers.slow import keep_quick


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
    assert report.resolved.plan.memory.segments.hot >= report.resolved.needs.hot.bytes


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


def test_a_model_may_be_a_checkpoint_s(tmp_path: Path) -> None:
    copy_checkpoint(list_goldens()[0], tmp_path / "checkpoint")
    assert run(["new", "model", "small", "--checkpoint", "checkpoint"]) == 0
    report = check_file(Path("small.model.toml"))
    assert report.is_sound and report.document is not None
    assert report.document.id == "small"  # type: ignore[attr-defined]


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
