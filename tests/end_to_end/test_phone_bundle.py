"""`pi2 build` makes a folder that runs a plan with Python and numpy alone, as `pi2 run` does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pi2.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
PLAN = ROOT / "plans/demo.plan.toml"
PROMPT = ["--prompt", "def ", "--max-tokens", "24"]
NUMPY_ALONE = """
import os, runpy, sys
allowed = {"numpy", "pi2", "pi2_phone", "pydantic", "pydantic_core"} | set(sys.stdlib_module_names)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and not name.startswith("__") and "site" not in top:
            raise ModuleNotFoundError(f"{name} is not for bundles", name=name)
sys.meta_path.insert(0, Refuse())
runpy.run_module("pi2_phone", run_name="__main__")
"""
"""Starts a bundle in a Python that has nothing but numpy and the standard library."""

pytestmark = pytest.mark.skipif(shutil.which("ld.lld") is None, reason="needs lld")


def build(folder: Path, *options: str) -> Path:
    arguments = ["build", str(PLAN), "--threads", "2", "-o", str(folder), *options]
    assert run(arguments) == 0
    return folder


def start(
    bundle: Path, *options: str, numpy_alone: bool = True
) -> subprocess.CompletedProcess[str]:
    begin = ["-c", NUMPY_ALONE] if numpy_alone else ["-m", "pi2_phone"]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PI2_")
    } | {"PYTHONPATH": str(bundle), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *begin, str(bundle), *options],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        cwd=bundle,
        check=False,
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("bundles") / "demo", "--target", "x86_64-linux-gnu")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle to be spoilt: its files are its own."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def test_the_text_is_that_of_pi2_run(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", str(PLAN), *PROMPT]) == 0
    expected = capsys.readouterr().out
    done = start(bundle, *PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
    assert "within the budget" in done.stderr


def test_two_builds_are_equal_byte_by_byte(bundle: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again", "--target", "x86_64-linux-gnu", "--copy-store")
    first, second = (
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (bundle, again)
    )
    assert first == second


def test_without_its_store_it_is_small_and_says_what_is_missing(tmp_path: Path) -> None:
    bundle = build(tmp_path / "small", "--target", "aarch64-linux-android", "--without-store")
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    assert size <= 15e6
    done = start(bundle, *PROMPT)
    assert done.returncode == 2
    assert "P676" in done.stderr and "--store" in done.stderr
    for library in (bundle / "kernels").glob("*.so"):
        content = library.read_bytes()
        assert int.from_bytes(content[18:20], "little") == 183  # EM_AARCH64
    # Kernels of another architecture are not even opened.
    done = start(bundle, *PROMPT, "--store", str(ROOT / "plans/stores/pi2-demo"))
    assert done.returncode == 2 and "P301" in done.stderr


def test_what_a_run_needs_beyond_the_c_library_is_in_the_kernels(bundle: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("needs binutils")
    for library in sorted((bundle / "kernels").glob("*.so")):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)],
            capture_output=True,
            text=True,
            check=True,
        )
        names = {line.split()[-1] for line in listed.stdout.splitlines()}
        assert names <= {"memcpy", "memmove", "memset", "preadv", "strlen", "syscall"}


def test_damaged_files_are_named(copy: Path) -> None:
    kernels = copy / "kernels/kernels-0.so"
    content = kernels.read_bytes()
    kernels.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = start(copy, "--verify")
    assert done.returncode == 2 and "P672" in done.stderr and "kernels-0.so" in done.stderr
    kernels.write_bytes(content[:-1])
    done = start(copy, *PROMPT)
    assert done.returncode == 2 and "P672" in done.stderr


def test_an_intact_bundle_verifies(bundle: Path) -> None:
    done = start(bundle, "--verify")
    assert done.returncode == 0, done.stderr
    assert "as they were built" in done.stdout


def test_a_plan_for_other_kernels_is_a_finding(copy: Path) -> None:
    plan = json.loads((copy / "plan.json").read_text())
    plan["plan"]["threads"]["compute"] = 3
    text = json.dumps(plan)
    (copy / "plan.json").write_text(text)
    index = json.loads((copy / "bundle.json").read_text())
    index["files"]["plan.json"]["bytes"] = len(text)
    (copy / "bundle.json").write_text(json.dumps(index))
    done = start(copy, *PROMPT)
    assert done.returncode == 2 and "P674" in done.stderr


def test_another_bundles_folder_is_refused(bundle: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pi2_phone", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=bundle,
        check=False,
    )
    assert done.returncode == 2 and "P671" in done.stderr


def test_the_script_starts_it_from_anywhere(bundle: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(bundle / "run.sh"), "--machine"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "architecture x86-64" in done.stdout


def test_an_existing_folder_is_left_alone(bundle: Path) -> None:
    assert run(["build", str(PLAN), "-o", str(bundle)]) == 2


def test_a_plan_for_another_architecture_cannot_be_built(tmp_path: Path) -> None:
    plan = ROOT / "plans/x86-laptop"
    path = next(iter(sorted(plan.glob("*.plan.toml"))))
    assert run(["build", str(path), "-o", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
