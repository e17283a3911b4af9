"""The README keeps its word: its commands, its plan and its Python examples are real."""

import os
import re
import shlex
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import chain
from pathlib import Path

import pytest

from pi2.cli.main import list_commands, run
from tests.helpers.programs import Ask, start_pi2

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_commands_that_ci_runs_install_first() -> None:
    """`.ci/run` takes both blocks as they are, and installs with the second without its tests."""
    run_it, test_it = find_blocks("sh")
    assert run_it.startswith("python3 -m venv .venv && .venv/bin/pip install .")
    assert "pi2 run" in run_it
    install, _, tests = test_it.rpartition(" && ")
    assert "pip install" in install and "pytest" in tests
    # What README's command leaves out runs afterwards.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]
    assert "-m=not slow" in settings["ini_options"]["addopts"]
    assert re.search(r"^\S+ -m pytest .*-m slow$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_the_plan_that_is_shown_validates_and_runs(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of the package that the first command installs is one with a tiny model."""
    pytest.importorskip("gguf")
    from tests.unit.test_checkpoint_models import write_model

    (text,) = find_blocks("toml")
    assert len(text.splitlines()) <= 8
    weights = tomllib.loads(text)["weights"].removeprefix("package:")
    (tmp_path / weights).parent.mkdir()
    (tmp_path / weights).parent.joinpath("__init__.py").touch()
    write_model(tmp_path, "tiny", kind="Q4_1").rename(tmp_path / weights)
    plan = tmp_path / "small.plan.toml"
    plan.write_text(text.replace("context = 1024", "context = 64"))  # the tiny model's most
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    assert run(["validate", plan.name, "--strict"]) == 0
    ask(["show", plan.name])
    # In a process of its own, whose memory is that of the run.
    command = ["run", plan.name, "--prompt", "def ", "--max-tokens", "2"]
    assert "within the budget of 160 MiB" in start_pi2(*command, check=True).stderr


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"(?:`|^\$ |bin/)pi2 ([\w-]+)", README, re.MULTILINE))
    assert named - set(list_commands()) == set()
    assert {"run", "chat", "serve", "pull", "validate", "plan"} <= named


@pytest.mark.slow
def test_the_commands_work_after_the_install_line(tmp_path: Path) -> None:
    """Packages that only extras bring cannot be imported here."""
    pytest.importorskip("gguf")
    from tests.unit.test_checkpoint_models import write_model

    file = write_model(tmp_path, "my-model", kind="Q4_1")
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {sorted(list_extra_modules())!r}:\n    sys.modules[name] = None\n"
    )
    commands = re.findall(r"^\$ pi2 (run .+)$", README, re.MULTILINE)
    assert commands
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "XDG_DATA_HOME": str(tmp_path / "data"),
    }
    for command in [*commands, f"chat {file.name}"]:
        words = shlex.split(command)
        words = [file.name if re.search(r"\.gguf$|^smollm2$", word) else word for word in words]
        # A tiny model that was never trained has no chat template, and is smaller than 3 GiB.
        words = ["--prompt" if word == "--chat" else word for word in words]
        words = ["256MiB" if word == "3GiB" else word for word in words]
        quick = ["--max-tokens", "2"] if words[0] == "run" else []
        done = start_pi2(*words, *quick, cwd=tmp_path, env=environment, input="")
        is_without_template = words[0] == "chat" and "P609" in done.stderr
        assert done.returncode == 0 or is_without_template, (words, done.stderr)


def list_extra_modules() -> set[str]:
    """Modules of the packages that only extras bring."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    base, extra = (
        {re.split(r"[\[<>=]", line)[0].lower().replace("_", "-") for line in lines}
        for lines in (
            project["dependencies"],
            chain.from_iterable(project["optional-dependencies"].values()),
        )
    )
    kept = base | list_dependencies(base)
    return {
        module
        for module, packages in packages_distributions().items()
        if (names := {name.lower().replace("_", "-") for name in packages}) & extra
        and not names & kept
    }


def list_dependencies(names: set[str]) -> set[str]:
    """Packages that packages need, and theirs."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        try:
            lines = requires(waiting.pop()) or []
        except PackageNotFoundError:
            continue
        for line in lines:
            name = re.split(r"[\[<>=!~; (]", line)[0].lower().replace("_", "-")
            if "extra ==" not in line and name not in found:
                found.add(name)
                waiting.append(name)
    return found


def test_the_python_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = find_blocks("python")
    exec(compile(example, "README's example", "exec"), {})
    assert capsys.readouterr().out.strip()
