"""Commands that only read plans start fast, because they leave heavy libraries alone."""

import json
from pathlib import Path

import pytest

from tests.helpers.programs import start_python

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "plans/demo.plan.toml"
HEAVY = ("jinja2", "numpy", "pyarrow", "rich", "structlog", "tokenizers", "tvm", "tvm_ffi")

RUN_AND_LIST = """
import json, sys
from pi2.cli.main import main
sys.argv[0] = "pi2"
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
json.dump({"code": code, "modules": sorted(sys.modules)}, sys.stderr)
"""


def run_command(*arguments: str) -> tuple[int, set[str]]:
    """Run ``pi2`` in a process of its own; return its exit code and the modules it imported."""
    done = start_python("-c", RUN_AND_LIST, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stderr.splitlines()[-1])
    return report["code"], set(report["modules"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",), ("--version",), ("run", "--help"), ("store", "--help"), ("explain", "P210"),
        ("validate", str(DEMO)), ("validate", "--format", "sarif", str(DEMO)),
        ("validate", "--format", "junit", str(DEMO)),
    ],
    ids=" ".join,
)  # fmt: skip
def test_reading_plans_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    code, modules = run_command(*arguments)
    assert code == 0
    assert "pi2.cli.main" in modules
    assert [name for name in HEAVY if name in modules] == []


def test_showing_a_plan_imports_only_what_computes_its_speed() -> None:
    code, modules = run_command("show", str(DEMO))
    assert code == 0
    assert [name for name in HEAVY if name in modules] == ["numpy"]


@pytest.mark.slow
def test_doctor_does_not_import_tvm() -> None:
    code, modules = run_command("doctor", "--json")
    assert code in (0, 1)
    assert "pi2.checkup" in modules
    assert [name for name in ("tvm", "tvm_ffi") if name in modules] == []


def test_package_itself_is_light() -> None:
    done = start_python("-c", "import sys, pi2; print(*sys.modules)", cwd=ROOT, check=True)
    modules = set(done.stdout.split())
    assert [name for name in (*HEAVY, "pydantic", "click") if name in modules] == []
