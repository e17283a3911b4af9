"""The GitHub action, GitLab job and pre-commit hook, run as the services run them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
HOOK, MIGRATE_HOOK = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
GUIDE = (ROOT / "docs/howto/check-in-ci.md").read_text("utf-8")
BROKEN = ROOT / "tests/plans/broken"


def find_snippet(file: str) -> Any:
    """The YAML block of docs/howto/check-in-ci.md that begins with the name of ``file``."""
    for block in re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL):
        if block.startswith(f"# {file}\n"):
            return yaml.safe_load(block)
    raise AssertionError(file)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    parts = ("parts/phone.device.toml", "parts/small.model.toml")
    for place, name in (
        ("plans/sound.plan.toml", "chunk-above-context.plan.toml"),
        ("plans/wrong.plan.toml", "shares-above-one.plan.toml"),
        ("plans/my phone/sound.plan.toml", "chunk-above-context.plan.toml"),
        *((f"plans/{part}", part) for part in parts),
        *((f"plans/my phone/{part}", part) for part in parts),
    ):
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((BROKEN / name).read_bytes())
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "pi2"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pi2 "$@"\n')
    program.chmod(0o755)
    return folder


def start(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


# GitHub
def run_action(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the last step of the action with ``inputs`` (``_`` for ``-``) and its defaults."""
    given = {name: item["default"] for name, item in ACTION["inputs"].items()}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    step = ACTION["runs"]["steps"][-1]
    variables = {}
    for name, text in step["env"].items():
        (key,) = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", text).groups()  # type: ignore[union-attr]
        variables[name] = given[key]
    return start(step["run"], folder, **variables)


def test_the_action_shows_findings_beside_their_lines(repository: Path) -> None:
    done = run_action(repository)
    assert done.returncode == 1
    heads = sorted(line.partition("::")[2].partition("::")[0] for line in done.stdout.splitlines())
    assert [head.partition(",col=")[0] for head in heads] == [
        "error title=pi2 (P210),file=plans/wrong.plan.toml,line=23",
        "warning title=pi2 (P235),file=plans/my phone/sound.plan.toml,line=41",
        "warning title=pi2 (P235),file=plans/sound.plan.toml,line=41",
    ]
    assert done.stderr == "7 files, 1 error, 2 warnings\n"


def test_the_action_takes_patterns_with_blanks(repository: Path) -> None:
    done = run_action(repository, files="plans/my phone/*.plan.toml\nplans/s*.toml\n")
    assert (done.returncode, done.stderr) == (0, "2 files, 2 warnings\n")


def test_the_action_writes_reports(repository: Path) -> None:
    done = run_action(repository, output_format="sarif", report="pi2.sarif")
    assert (done.returncode, done.stdout) == (1, "")
    (run,) = json.loads((repository / "pi2.sarif").read_text())["runs"]
    assert len(run["results"]) == 3


def test_the_action_can_count_warnings_and_leave_out_what_is_known(repository: Path) -> None:
    done = run_action(repository, files="plans/sound.plan.toml", strict="true")
    assert (done.returncode, done.stderr) == (1, "1 file, 1 error\n")
    (repository / "known.json").write_text('{"version": 1, "findings": []}')
    done = run_action(repository, files="plans/sound.plan.toml", baseline="known.json")
    assert (done.returncode, done.stderr) == (0, "1 file, 1 warning (0 in the baseline)\n")


def test_the_action_fails_where_nothing_matches(repository: Path) -> None:
    done = run_action(repository, files="plan/*.toml")
    assert done.returncode == 2
    assert done.stdout.startswith("::error title=pi2::no file matches")


def test_inputs_of_the_action_are_no_commands(repository: Path) -> None:
    run_action(repository, files='plans/*.toml; touch here"\n$(touch here)\n`touch here`\n-x')
    assert not (repository / "here").exists()
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
        assert "run" not in step or step["shell"] == "bash"


def test_the_workflow_uses_inputs_that_the_action_has(repository: Path) -> None:
    step = find_snippet(".github/workflows/plans.yml")["jobs"]["validate"]["steps"][-1]
    assert set(step["with"]) <= set(ACTION["inputs"])
    assert run_action(repository, **step["with"]).stderr == "5 files, 1 error, 2 warnings\n"


# GitLab
def test_the_gitlab_job_writes_both_reports(repository: Path) -> None:
    job = find_snippet(".gitlab-ci.yml")["pi2-validate"]
    assert start("\n".join(job["script"]), repository).returncode == 1
    reports = {name: repository / file for name, file in job["artifacts"]["reports"].items()}
    quality = json.loads(reports["codequality"].read_text())
    assert sorted((item["check_name"], item["location"]["path"]) for item in quality) == [
        ("P210", "plans/wrong.plan.toml"),
        ("P235", "plans/my phone/sound.plan.toml"),
        ("P235", "plans/sound.plan.toml"),
    ]
    cases = ElementTree.fromstring(reports["junit"].read_bytes()).iter("testcase")
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert failed == ["plans/wrong.plan.toml"]


def test_the_gitlab_job_passes_without_errors(repository: Path) -> None:
    (repository / "plans/wrong.plan.toml").unlink()
    job = find_snippet(".gitlab-ci.yml")["pi2-validate"]
    assert start("\n".join(job["script"]), repository).returncode == 0


# pre-commit


def test_the_hook_checks_the_files_it_asks_for(repository: Path) -> None:
    assert HOOK["types"] == ["toml"]
    files = sorted(
        str(path.relative_to(repository))
        for path in repository.rglob("*.toml")
        if re.search(HOOK["files"], path.name)
    )
    assert len(files) == 7
    done = start(f"{HOOK['entry']} {shlex.join(files)}", repository)
    assert done.returncode == 1 and "error[P210]" in done.stdout
    sound = [file for file in files if "wrong" not in file]
    assert start(f"{HOOK['entry']} {shlex.join(sound)}", repository).returncode == 0


@pytest.mark.parametrize("name", ["pyproject.toml", "a.plan.toml.orig", "plan.toml"])
def test_the_hook_leaves_other_files_alone(name: str) -> None:
    assert re.search(HOOK["files"], name) is None


def test_the_guide_names_the_hook() -> None:
    (repo,) = find_snippet(".pre-commit-config.yaml")["repos"]
    assert [hook["id"] for hook in repo["hooks"]] == [HOOK["id"], MIGRATE_HOOK["id"]]


def test_the_hook_for_old_documents_finds_them(repository: Path) -> None:
    assert MIGRATE_HOOK["files"] == HOOK["files"]
    text = (ROOT / "tests/plans/versions/1/oneplus-12.device.toml").read_text("utf-8")
    (repository / "old.device.toml").write_text(text, "utf-8")
    done = start(f"{MIGRATE_HOOK['entry']} old.device.toml", repository)
    assert (done.returncode, "cluster" in done.stdout) == (1, True)
    assert (repository / "old.device.toml").read_text("utf-8") == text
