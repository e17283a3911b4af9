"""The kernel cache: one compilation per spec, whatever happens to its files."""

import dataclasses
import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pi2.backends.compiler import cache
from pi2.backends.compiler.cache import start_compiler
from pi2.backends.compiler.functions import CompiledFunctions
from pi2.backends.compiler.signature import find_signatures
from pi2.backends.kernels.spec import KernelSpec
from pi2.diagnostics import UserError
from pi2.logging import configure_logging
from pi2.progress import ignore_progress
from tests.helpers.kernels import make_spec
from tests.helpers.programs import start_python

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def spec() -> KernelSpec:
    return make_spec(hidden=32, heads=1, kv_heads=1, head_dim=32, gates=False, ranks=())


@pytest.fixture(scope="module")
def folder(spec: KernelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PI2_CACHE_DIR", str(path))
        patch.setattr(cache, "start_compiler", start_compiler)
        cache.load_or_compile(spec, ignore_progress)
    return path


@pytest.fixture(autouse=True)
def _use_folder(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(folder))


@pytest.fixture
def _new_compilers(monkeypatch: Patch) -> None:
    """Compiling processes load TVM, as those of users do."""
    monkeypatch.setattr(cache, "start_compiler", start_compiler)


def forbid_compiling(label: str, share: float) -> None:
    raise AssertionError(f"compiling: {label} {share}")


def test_a_spec_survives_json(spec: KernelSpec) -> None:
    assert KernelSpec.from_json(spec.to_json()) == spec


def test_a_cached_library_is_not_compiled_again(spec: KernelSpec, folder: Path) -> None:
    path = cache.load_or_compile(spec, forbid_compiling)
    assert path.parent == folder / "kernels"
    assert set(path.parent.iterdir()) == {path, find_signatures(path)}


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_entry_is_built_again(spec: KernelSpec, damage: str) -> None:
    path = cache.load_or_compile(spec, forbid_compiling)
    content = path.read_bytes()
    spoiled = {
        "truncated": content[: len(content) // 2],
        "changed": content[:-1] + bytes([content[-1] ^ 1]),
        "empty": b"",
    }[damage]
    path.write_bytes(spoiled)
    shares: list[float] = []
    rebuilt = cache.load_or_compile(spec, lambda _label, share: shares.append(share))
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)
    assert rebuilt.read_bytes() == content
    assert set(path.parent.iterdir()) == {rebuilt, find_signatures(rebuilt)}


@pytest.mark.usefixtures("_new_compilers")
def test_a_folder_with_another_pi2_compiles_nothing(
    spec: KernelSpec, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "pi2").mkdir()
    (tmp_path / "pi2/__init__.py").write_text("raise SystemExit('another version')")
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert cache.load_or_compile(spec, ignore_progress).exists()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_an_entry_with_damaged_signatures_is_built_again(spec: KernelSpec, damage: str) -> None:
    signatures = find_signatures(cache.load_or_compile(spec, forbid_compiling))
    content = signatures.read_text()
    signatures.write_text(content.replace("tokens", "token"))
    if damage == "missing":
        signatures.unlink()
    rebuilt = cache.load_or_compile(spec, lambda _label, _share: None)
    assert find_signatures(rebuilt).read_text() == content


def test_processes_may_compile_the_same_kernels_at_once(
    spec: KernelSpec, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: cache.load_or_compile(spec, ignore_progress), range(3)))
    assert all(path.exists() for path in paths)
    assert not list((tmp_path / "kernels").glob("compiling-*"))


def test_the_key_depends_on_the_spec(spec: KernelSpec) -> None:
    other = dataclasses.replace(spec, threads=spec.threads + 1)
    assert cache.compute_key(spec) == cache.compute_key(spec)
    assert cache.compute_key(spec) != cache.compute_key(other)


def test_a_read_only_cache_folder_does_not_stop_a_run_and_is_named(
    spec: KernelSpec, monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A file where the folder should be: even root cannot make a folder there.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "file"))
    configure_logging()
    path = cache.load_or_compile(spec, ignore_progress)
    assert path.exists()
    assert tmp_path not in path.parents
    assert cache.load_or_compile(spec, forbid_compiling) == path
    cache.load_or_compile(dataclasses.replace(spec, threads=spec.threads + 32), ignore_progress)
    line = json.loads(capsys.readouterr().err)  # one line for all kernels of a process
    assert line["level"] == "warning"
    assert line["folder"] == str(tmp_path / "file" / "kernels")
    assert "PI2_CACHE_DIR" in line["help"]


def give_problems(monkeypatch: Patch, *folders: Path) -> None:
    """Let no code run in ``folders``."""

    def find(folder: Path, *, runs_code: bool) -> str | None:
        is_there = any(folder.is_relative_to(other) for other in folders)
        return "noexec" if runs_code and is_there else None

    monkeypatch.setattr(cache, "find_problem", find)
    cache._make_own_folder.cache_clear()


def test_kernels_are_compiled_for_this_start_where_the_cache_runs_no_code(
    spec: KernelSpec, folder: Path, monkeypatch: Patch
) -> None:
    give_problems(monkeypatch, folder)
    path = cache.load_or_compile(spec, ignore_progress)
    assert folder not in path.parents
    assert cache.load_or_compile(spec, forbid_compiling) == path


def test_both_folders_are_named_where_neither_runs_code(
    spec: KernelSpec, folder: Path, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    give_problems(monkeypatch, folder, tmp_path)
    with pytest.raises(UserError, match="P655") as caught:
        cache.load_or_compile(spec, ignore_progress)
    found = caught.value.diagnostics[0]
    assert str(folder / "kernels") in found.message
    assert "PI2_CACHE_DIR" in str(found.help)
    assert str(tmp_path) in found.notes[0]


@pytest.mark.parametrize("has_room", [True, False])
def test_a_folder_without_room_fails_no_compiler(
    spec: KernelSpec, monkeypatch: Patch, tmp_path: Path, has_room: bool
) -> None:
    """The compiler says so: kernels then go into a folder of this start, if that has room."""
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "full"))
    cache._make_own_folder.cache_clear()
    compile_it = cache._compile

    def fail(specs: list[KernelSpec], outputs: list[Path], *others: Any) -> None:
        if has_room and tmp_path not in outputs[0].parents:
            compile_it(specs, outputs, *others)
            return
        note = f"OSError: [Errno 28] {os.strerror(errno.ENOSPC)}"
        raise UserError.of("P651", "compiling the kernels failed", notes=[note])

    monkeypatch.setattr(cache, "_compile", fail)
    if has_room:
        assert cache.load_or_compile(spec, ignore_progress).exists()
        return
    with pytest.raises(UserError, match=r"P655.*No space left on device"):
        cache.load_or_compile(spec, ignore_progress)


def test_a_library_that_cannot_be_loaded_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(UserError, match=r"P655.*cannot be loaded") as caught:
        CompiledFunctions(tmp_path / "broken.so")
    assert str(tmp_path) in str(caught.value)


def test_libraries_that_came_with_pi2_or_from_another_machine_are_used(
    spec: KernelSpec, folder: Path, monkeypatch: Patch, tmp_path: Path
) -> None:
    """Copied next to pi2, or into another cache; a damaged one is compiled in the cache."""
    (kept,) = (folder / "kernels").glob(f"{cache.compute_key(spec)}-*.so")
    ready, copied = tmp_path / "ready", tmp_path / "copied"
    for place in (ready, copied / "kernels"):
        place.mkdir(parents=True)
        for path in (kept, find_signatures(kept)):
            (place / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("PI2_CACHE_DIR", str(copied))
    assert cache.load_or_compile(spec, forbid_compiling) == copied / "kernels" / kept.name
    monkeypatch.setattr(cache, "READY", ready)
    monkeypatch.setattr(cache, "_list_ready", lambda: os.listdir(ready))
    assert cache.load_or_compile(spec, forbid_compiling) == ready / kept.name
    (ready / kept.name).write_bytes(b"damaged")
    assert cache.load_or_compile(spec, forbid_compiling) == copied / "kernels" / kept.name


def test_kernels_need_no_program_of_the_machine(
    spec: KernelSpec, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = cache.load_or_compile(spec, ignore_progress)
    assert CompiledFunctions(found)._module is not None


@pytest.mark.usefixtures("_new_compilers")
def test_failing_compiler_is_reported(spec: KernelSpec, monkeypatch: Patch, tmp_path: Path) -> None:
    # A broken `tvm` package hides the real one from the compiling process.
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").write_text("raise ImportError('no compiler today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = dataclasses.replace(spec, threads=spec.threads + 1)
    with pytest.raises(UserError) as caught:
        cache.load_or_compile(other, ignore_progress)
    assert caught.value.diagnostics[0].code == "P651"
    assert any("no compiler today" in note for note in caught.value.diagnostics[0].notes)


@pytest.mark.usefixtures("_new_compilers")
def test_a_compiler_without_memory_is_no_faulty_installation(
    spec: KernelSpec, monkeypatch: Patch, tmp_path: Path
) -> None:
    (tmp_path / "tvm").mkdir()
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "tvm" / "__init__.py").write_text(killed)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = dataclasses.replace(spec, threads=spec.threads + 2)
    with pytest.raises(UserError, match="for lack of memory") as caught:
        cache.load_or_compile(other, ignore_progress)
    assert "run the plan once where" in str(caught.value.diagnostics[0].help)


def test_the_running_process_loads_neither_compiler_nor_tvms_runtime(tmp_path: Path) -> None:
    code = """
import json, sys
import numpy as np
from tests.helpers.kernels import RandomModel
from pi2.backends.cpu import backend as cpu
model = RandomModel(layers=1)
executor = cpu.build(model.request)
executor.embed(np.array([1], np.int32))
executor.attend(0, 0)
maps = open("/proc/self/maps").read()
print(json.dumps({"tvm": "tvm" in sys.modules, "compiler": "libtvm_compiler" in maps,
                  "runtime": "libtvm_runtime" in maps}))
"""
    done = start_python("-c", code, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == {"tvm": False, "compiler": False, "runtime": False}
