"""The wheel holds everything that pi2 needs at run time, inside the package, and nothing else."""

import importlib.metadata
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Set
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers.programs import start_python

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("backends", "plans", "schemas")
MAX_WHEEL_BYTES = 25 << 20

pytestmark = pytest.mark.slow


def build(kind: str, tree: Path, output: Path) -> Path:
    script = f"import sys, setuptools.build_meta as b; print(b.build_{kind}(sys.argv[1]))"
    output.mkdir(exist_ok=True)
    done = start_python("-c", script, str(output), cwd=tree)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


def list_files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, as a clean clone has them."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("pi2", *LINKED):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build("wheel", tree, tree.parent / "wheel")


@pytest.fixture(scope="module")
def names(wheel: Path) -> Set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(
    installed: Path, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the installed package from ``folder``, which is not the repository."""
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from pi2.cli.main import main; main()"
    )
    return start_python("-P", "-c", script, str(installed), *arguments, cwd=folder)


@pytest.mark.parametrize("name", LINKED)
def test_package_links_to_the_folder_of_the_repository(name: str) -> None:
    link = ROOT / "pi2" / name
    assert link.is_symlink() and link.readlink() == Path("..", name)


def test_nothing_but_pi2_goes_into_site_packages(names: Set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pi2"}


@pytest.mark.parametrize("name", LINKED)
def test_wheel_holds_the_folders_of_the_repository(names: Set[str], name: str) -> None:
    wanted = {f"pi2/{name}/{file}" for file in list_files(ROOT / name)}
    assert wanted <= names, f"not in the wheel: {sorted(wanted - names)}"


def test_wheel_holds_modules_data_types_and_licence(names: Set[str]) -> None:
    wanted = {
        f"pi2/{file}" for file in list_files(ROOT / "pi2") if file.split("/")[0] not in LINKED
    }
    assert wanted <= names, f"not in the wheel: {sorted(wanted - names)}"
    assert "pi2/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)


def test_wheel_is_small_enough_to_pass_around(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_wheel_from_the_sdist_is_the_same(tree: Path, names: Set[str]) -> None:
    with tarfile.open(build("sdist", tree, tree.parent / "sdist")) as archive:
        archive.extractall(tree.parent / "unpacked", filter="data")
    (unpacked,) = (tree.parent / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, tree.parent / "wheel-again")) as archive:
        assert set(archive.namelist()) == names


def test_installed_package_finds_its_plans_from_any_folder(installed: Path, tmp_path: Path) -> None:
    demo = installed / "pi2/plans/demo.plan.toml"
    done = run_installed(installed, tmp_path, "validate", str(demo))
    assert done.returncode == 0, done.stdout + done.stderr


def test_installed_package_does_not_borrow_from_repository(installed: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pi2, pi2.backends.protocol as p;"
        "print(pi2.__file__, p.__file__)"
    )
    done = start_python("-P", "-c", script, str(installed), cwd=tmp_path, check=True)
    assert done.stdout.split() == [
        str(installed / "pi2/__init__.py"),
        str(installed / "pi2/backends/protocol.py"),
    ]


def read_constraints() -> dict[str, str]:
    """Pinned version by normalised name."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, separator, version = line.partition("==")
            assert separator, f"not a name and a version: {line!r}"
            pins[str(canonicalize_name(name))] = str(Version(version))
    return pins


def read_requirements(extra: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in project["dependencies"]] + [
        Requirement(text) for text in project["optional-dependencies"][extra]
    ]


def test_a_base_installation_reads_every_gguf_file_and_chats() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    assert {"gguf", "prompt-toolkit"} <= names
    # Install lines of before still work.
    assert project["optional-dependencies"]["gguf"] == []
    assert project["optional-dependencies"]["chat"] == []


def test_constraints_pin_versions_that_pyproject_allows() -> None:
    pins = read_constraints()
    for requirement in [*read_requirements("dev"), *read_requirements("docs")]:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_constraints_pin_what_dependencies_depend_on() -> None:
    pins = read_constraints()
    waiting = [canonicalize_name(requirement.name) for requirement in read_requirements("dev")]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(needed.name))
    assert seen <= set(pins), f"not pinned: {sorted(seen - set(pins))}"
