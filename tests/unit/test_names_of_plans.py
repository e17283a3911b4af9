"""A plan has one name in every command: pulled models, shipped plans, checkpoints and files."""

import json
from pathlib import Path

import pytest

from pi2.cli.commands import list_groups
from pi2.cli.main import run
from pi2.cli.named_plans import find_document_path, find_plan_path, list_names
from pi2.diagnostics import UserError
from pi2.plan.reading.references import list_shipped
from pi2.pulled_models import PulledModel, Source


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without models."""
    monkeypatch.delenv("PI2_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


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


@pytest.mark.parametrize(
    "command",
    [
        ["validate", NESTED],
        ["show", NESTED],
        ["explain", "kv.context", NESTED],
        ["explain", NESTED, "--cost"],
        ["simulate", NESTED, "--tokens", "4"],
        ["diff", "demo", NESTED, "--no-simulate"],
        ["diff", NESTED, NESTED],
        ["fit", NESTED, "--memory", "6GiB"],
        ["show", "oneplus-12"],
        ["explain", "memory.capacity", "oneplus-12"],
        ["diff", "bamboo-7b", "llama-2-7b"],
    ],
    ids=" ".join,
)
def test_every_command_takes_names(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(command) == 0


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


def test_an_unknown_name_is_a_finding_of_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "demo", "dmo", "--format", "json"]) == 2
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["code"], found["span"]["file"]) == ("P001", "dmo")


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

    def fetch(name: str) -> PulledModel:
        asked.append(name)
        return made

    monkeypatch.setattr("pi2.cli.models.fetch_model", fetch)
    for answer in (False, True):
        monkeypatch.setattr("click.confirm", lambda *_, answer=answer, **__: answer)
        if answer:
            assert find_plan_path(Path("hf:org/tiny")) == made.plan
        else:
            assert "pi2 pull hf:org/tiny" in report("hf:org/tiny")
    assert asked == ["hf:org/tiny"]


def test_options_of_several_commands_are_spelt_alike(capsys: pytest.CaptureFixture[str]) -> None:
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
            assert run([command, "--help"]) == 0
            assert f"{option}" in capsys.readouterr().out, (command, option)


def test_old_spellings_of_options_go_on_working(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    given = ["--output-format=json", "--output-file", str(report), "--warnings-as-errors"]
    assert run(["validate", "demo", *given]) == 0
    warned = capsys.readouterr().err
    for old, new in (("-format", "--format"), ("-file", "--output"), ("errors", "--strict")):
        assert f"{old} is deprecated: write {new}\n" in warned
    assert report.read_text().strip() == "[]"


def test_the_help_begins_with_the_commands_of_every_day() -> None:
    *sections, more = list_groups().values()
    assert sum(map(len, sections)) <= 16
    assert {"run", "chat", "pull", "convert", "plan", "validate"} <= set().union(*sections)
    assert list(list_groups())[-1] == "More commands" and "fit" in more
