"""A plan has one name in every command: pulled models, shipped plans, checkpoints and files."""

from pathlib import Path

import pytest

from pi2.cli.documents import find_document_path, find_plan_path
from pi2.cli.main import COMMANDS, run
from pi2.diagnostics import UserError
from pi2.loading import list_names
from pi2.plan.reading.references import list_shipped
from pi2.pulled_models import PulledModel, Source
from tests.helpers.compiling import use_own_data
from tests.helpers.programs import Ask


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without models."""
    use_own_data(tmp_path, monkeypatch)


NESTED = "oneplus-12/bamboo-7b-half"


def report(name: str) -> str:
    with pytest.raises(UserError) as caught:
        find_plan_path(Path(name))
    (found,) = caught.value.diagnostics
    assert found.code == "P001"
    return found.help or ""


def test_every_shipped_plan_has_its_name() -> None:
    shipped = list_shipped("plan")
    assert len(shipped) > 9 and NESTED in shipped
    for name, path in shipped.items():
        assert find_plan_path(Path(name)) == find_document_path(Path(name)) == path
    assert set(shipped) <= set(list_names())


def test_a_name_that_nothing_has_leads_to_names_that_are_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "did you mean oneplus-12/bamboo-7b-half" in report("oneplus-12/bamboo-7b-hlf")
    assert "oneplus-12/bamboo-7b-half or oneplus-ace-2/bamboo-7b-half" in report("bamboo-7b-half")
    assert "did you mean demo" in report("demo.plan.toml")
    (tmp_path / "mine.plan.toml").touch()
    assert "did you mean mine.plan.toml" in report("mien.plan.toml")
    assert "pi2 pull hf:meta-llama/Llama-3" in report("meta-llama/Llama-3")
    assert "pi2 pull hf:org/name@v2" in report("hf:org/name@v2")
    assert report("x" * 5000) and report("a\0b")


@pytest.mark.parametrize("command", [["store", "info"], ["convert", "-o", "new"]])
def test_a_name_that_no_file_system_takes_is_refused(command: list[str], ask: Ask) -> None:
    assert "error[P003]: the name is too long\n --> xxx" in ask([*command, "x" * 500], 2).err


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert find_plan_path(Path("demo")).name == "demo.plan.toml"
    (tmp_path / "oneplus-12").mkdir()
    (tmp_path / NESTED).write_text("")
    assert find_plan_path(Path(NESTED)) == Path(NESTED)


def test_a_model_of_the_hub_is_fetched_if_somebody_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", "hf:org/tiny", "-p", "x"]) == 2  # nobody is asked
    assert "pi2 pull hf:org/tiny" in capsys.readouterr().err
    asked: list[str] = []
    made = PulledModel(
        name="tiny",
        folder=tmp_path,
        source=Source(repository="org/tiny", revision="main", commit="1", quantization=None),
    )
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    def fetch(name: str, **_: object) -> PulledModel:
        asked.append(name)
        return made

    monkeypatch.setattr("pi2.model_folders.fetch_model", fetch)
    for answer in (False, True):
        monkeypatch.setattr("click.confirm", lambda *_, answer=answer, **__: answer)
        if answer:
            assert find_plan_path(Path("hf:org/tiny")) == made.plan
        else:
            assert "pi2 pull hf:org/tiny" in report("hf:org/tiny")
    assert asked == ["hf:org/tiny"]


def test_options_of_several_commands_are_spelt_alike(ask: Ask) -> None:
    spelt = {
        "-p": ("run", "chat", "trace", "bench"),
        "-n": ("run", "chat", "trace", "bench"),
        "--force": ("convert", "pull", "activations", "plan", "probe", "fit"),
        "--format": ("validate", "bench"),
        "-o, --output": ("validate", "bench", "plan", "probe", "fit", "trace", "convert"),
        "--memory": ("run", "chat", "bench", "simulate", "evaluate", "show", "explain", "trace"),
    }
    for option, commands in spelt.items():
        for command in commands:
            assert f"{option}" in ask([command, "--help"]).out, (command, option)


def test_the_help_begins_with_the_commands_of_every_day() -> None:
    *sections, more = COMMANDS.values()
    assert sum(map(len, sections)) <= 16
    assert {"run", "chat", "pull", "convert", "plan", "validate"} <= set().union(*sections)
    assert list(COMMANDS)[-1] == "More commands" and "fit" in more
