"""Backends are found by being there: nothing lists them, and asking them loads nothing heavy."""

import subprocess
from pathlib import Path

import pytest

from pi2.fitting import find_backend, find_executor_backend, find_unit_backend, find_whole_backend
from pi2.fitting.check import load_plan
from pi2.plan.documents.common import list_backend_names
from tests.helpers.programs import start_python

ROOT = Path(__file__).parents[2]
HEAVY = ("numpy", "tvm", "tvm_ffi", "pyarrow", "torch")

TOY = '''
"""Computes with another backend's executor, and says how often it was built."""

from pi2.backends.reference.backend import *  # noqa: F403
from pi2.backends.reference import backend as reference


def find_limits(facts):
    """Refuse models that are not gated."""
    return [] if facts.resolved.model.ffn.gated else ["computes gated neurons only"]


def build(request):
    """Make the reference's executor."""
    print("the toy was built")
    return reference.build(request)
'''


def run(script: str) -> subprocess.CompletedProcess[str]:
    return start_python("-c", script, cwd=ROOT)


def test_every_folder_with_a_backend_module_is_one() -> None:
    names = list_backend_names()
    assert {"cpu", "null", "reference"} <= set(names)
    assert list(names) == sorted(names)
    assert "kernels" not in names and "host" not in names
    for name in names:
        backend = find_backend(name)
        assert ("dry run" if name == "null" else "runs") == backend.VERDICT
        assert isinstance(backend.NATIVE, bool)
        assert backend.find_obstacles(frozenset(), "x86-64") is not None
    assert find_unit_backend("reference") is not None
    assert find_unit_backend("cpu") is None
    assert find_executor_backend("cpu") is not None
    assert find_unit_backend("gpu") is not None
    assert find_executor_backend("gpu") is None
    assert find_whole_backend("gpu") is not None
    assert find_whole_backend("reference") is None


def test_asking_backends_loads_nothing_heavy() -> None:
    done = run(
        "import sys\n"
        "from pi2.fitting import find_backend, list_backend_names\n"
        "for name in list_backend_names(): find_backend(name)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_plan_language_imports_no_backend_in_any_way(tmp_path: Path) -> None:
    resolved = load_plan(ROOT / "plans/demo.plan.toml")
    for kind in ("plan", "device", "model"):
        text = getattr(resolved, kind).model_dump_json()
        (tmp_path / f"demo.{kind}.toml").write_text(text, "utf-8")
    done = run(
        "import importlib, pkgutil, sys\n"
        "from pathlib import Path\n"
        "import pi2.plan\n"
        "for found in pkgutil.walk_packages(pi2.plan.__path__, 'pi2.plan.'):\n"
        "    importlib.import_module(found.name)\n"
        "from pi2.plan.arithmetic.resolved import ResolvedPlan\n"
        "from pi2.plan.arithmetic.sources import Source\n"
        "from pi2.plan.checking import Facts\n"
        "from pi2.plan.checking.rules import load_rules\n"
        "from pi2.plan.reading.references import DOCUMENTS\n"
        "known, files = {}, {}\n"
        "for kind in ('plan', 'device', 'model'):\n"
        f"    path = files[kind] = Path({str(tmp_path)!r}) / f'demo.{{kind}}.toml'\n"
        "    known[kind] = DOCUMENTS[kind].model_validate_json(path.read_text())\n"
        "resolved = ResolvedPlan(**known, find_source=lambda resolved: Source())\n"
        "known['resolved'] = resolved\n"
        "rules = [rule for rule in load_rules() if set(rule.needs) <= known.keys()]\n"
        "for rule in rules:\n"
        "    list(rule.check(Facts(known=known, files=files)))\n"
        "assert len(rules) > 50 and resolved.digest\n"
        "print([name for name in sys.modules if name.startswith('pi2.backends')])\n"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_a_backend_is_added_by_its_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "backend.py").write_text(TOY)
    script = (
        "import pathlib, sys, pi2.backends\n"
        f"pi2.backends.__path__.append({str(tmp_path)!r})\n"
        "from pi2.plan.documents.common import BACKEND_FOLDERS\n"
        f"BACKEND_FOLDERS.append(pathlib.Path({str(tmp_path)!r}))\n"
        "from pi2.cli.main import run\n"
        "sys.exit(run(sys.argv[1:] or {arguments}))\n"
    )
    plan = str(ROOT / "plans/demo.plan.toml")
    toy = ["--set", 'backends.cpu="toy"']
    arguments = ["run", plan, *toy, "--prompt", "def ", "--max-tokens", "2", "--temperature", "0"]
    done = run(script.replace("{arguments}", repr(arguments)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the toy was built\n")
    expected = run(script.replace("{arguments}", repr(arguments)).replace('"toy"', '"reference"'))
    assert done.stdout.split("\n", 1)[1] == expected.stdout


def test_without_its_folder_it_is_no_word_of_the_plan_language() -> None:
    done = run(
        "import sys\n"
        "from pi2.cli.main import run\n"
        f"sys.exit(run(['show', {str(ROOT / 'plans/demo.plan.toml')!r}, "
        "'--set', 'backends.cpu=\"toy\"']))\n"
    )
    assert done.returncode != 0
    assert "`cpu`" in done.stderr + done.stdout


@pytest.mark.parametrize("name", ["torch", "ml_dtypes"])
def test_what_is_of_no_use_is_not_imported_with_tvm_ffi_and_can_be_imported_later(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text("class Tensor:\n    pass\n")
    done = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from pi2.backends.compiler.functions import import_ffi\n"
        "found = import_ffi()\n"
        f"print(found.__name__, {name!r} in sys.modules)\n"
        f"import {name}\n"
        f"print({name}.__file__)\n"
    )
    assert done.stdout == f"tvm_ffi False\n{tmp_path / name}.py\n", done.stderr
