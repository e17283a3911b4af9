"""A plan has one name in every command: pulled models, shipped plans, checkpoints and files."""

import os
from pathlib import Path

import pytest

from pi2.cli.commands import COMMANDS
from pi2.cli.documents import find_document_path, find_plan_path
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.loading import list_names
from pi2.plan.reading.references import list_shipped
from pi2.pulled_models import PulledModel, Source, list_models
from tests.helpers.compiling import use_own_data
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.programs import Ask
from tests.helpers.slow import keep_quick


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


@pytest.fixture
def forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A GGUF file that runs as it is: itself, a short plan that names it, and a pulled folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    write_random_gguf(tmp_path, {"hidden": 256, "ffn": 4096, "layers": 4, "context": 512})
    short = 'schema_version = 3\nweights = "model.gguf"\nname = "short"\n'
    (tmp_path / "short.plan.toml").write_text(short)
    (tmp_path / "pulled").mkdir()
    os.link(tmp_path / "model.gguf", tmp_path / "pulled/model.gguf")
    (tmp_path / "pulled/default.plan.toml").write_text(short)
    return {"file": "model.gguf", "plan": "short.plan.toml", "folder": "pulled"}


PHONE = ["--set", "device=oneplus-12"]
FORMS = ["file", "plan", "folder"]


@pytest.mark.parametrize("form", keep_quick(FORMS, ["plan"]))
def test_a_gguf_file_is_a_plan_in_every_command_and_never_converted(
    form: str, forms: dict[str, str]
) -> None:
    name = forms[form]
    for command in (
        ["validate", name],
        ["show", name],
        ["explain", "kv.context", name],
        ["explain", name, "--cost", "--memory", "105MiB", *PHONE],
        ["simulate", name, "--tokens", "4", *PHONE],
        ["fit", name, "--memory", "105MiB", "-o", "fitted.plan.toml"],
        ["diff", name, "fitted.plan.toml"],
    ):
        assert run(command) == 0, command
    assert list_models() == []


@pytest.mark.parametrize("form", keep_quick(FORMS, ["file"]))
def test_a_gguf_file_is_planned_for_as_it_is(form: str, forms: dict[str, str], ask: Ask) -> None:
    wish = ["plan", forms[form], "--memory", "105MiB", "--device", "oneplus-12"]
    shown = ask([*wish, "--context", "256", "--exact", "-o", "made/my.plan.toml"]).out
    assert "MiB are read for every step" in shown and "KV cache: 128 KiB for 256 tokens" in shown
    assert "Drafts: 6 tokens" in shown and "Android 17 limits anonymous memory" in shown
    assert "tokens/s without drafts, bound by the disk" in shown
    text = Path("made/my.plan.toml").read_text()
    assert all(f"# {line}" in text for line in shown.splitlines())
    source = {
        "file": 'weights = "../model.gguf"',
        "plan": 'extends = ["../short.plan.toml"]',
        "folder": 'extends = ["../pulled/default.plan.toml"]',
    }
    assert source[form] in text and 'budget = "105 MiB"' in text and "context = 256" in text
    assert run(["validate", "made/my.plan.toml", "--strict"]) == 0
    here = ["--set", "device=host"]
    assert run(["run", "made/my.plan.toml", "-p", "hello", "-n", "2", *here]) == 0
    assert list_models() == []


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
