"""`pi2 build` makes a folder that runs a plan with Python and numpy alone, as `pi2 run` does."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import pi2
from pi2.cli.main import run
from pi2.costs.rates import read_rates
from pi2.fitting.check import check_file
from pi2.phone import building
from pi2.phone.runtime.probing import list_recipes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.probing import storage
from pi2.probing.probe import KernelRecipe
from pi2.probing.steps import USUAL
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.hexagon import require_emulator
from tests.helpers.programs import Ask, start_python

ROOT = Path(__file__).resolve().parents[2]
PLAN = ROOT / "plans/demo.plan.toml"
WITH_NPU = ROOT / "plans/demo-npu.plan.toml"
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
WITHOUT_FILES = """
import sys
shown = sys.argv.pop(1).split(",")
def hide(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path = arguments[0]
        if path.startswith(("/proc/", "/sys/")) and path not in shown:
            raise PermissionError(13, "Permission denied", path)
sys.addaudithook(hide)
"""
"""Hides the system's files, but for some, as SELinux does."""
WITHOUT_CALLS = """
import ctypes, struct
# io_uring_setup, sched_setaffinity, sched_getaffinity, mlock, mlock2 of x86-64
calls = (425, 203, 204, 149, 325)
code = struct.pack("<HBBI", 0x20, 0, 0, 0)  # load the call's number
for place, number in enumerate(calls):
    code += struct.pack("<HBBI", 0x15, len(calls) - place, 0, number)  # equal: to the end
code += struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)  # allow
code += struct.pack("<HBBI", 0x06, 0, 0, 0x00050001)  # EPERM
room = ctypes.create_string_buffer(code, len(code))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 8, ctypes.addressof(room)), 16)
library = ctypes.CDLL(None, use_errno=True)
library.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
assert library.prctl(38, 1, 0, 0, 0) == 0
assert library.prctl(22, 2, ctypes.addressof(program), 0, 0) == 0, ctypes.get_errno()
"""
"""Lets the kernel refuse some calls with EPERM (seccomp), as Android does."""
SMALL_PROBE = """
import os, sys
sys.path.insert(0, os.path.join(os.environ["PYTHONPATH"], "pi2_phone/packages"))
from dataclasses import replace
from pi2.phone.runtime import probing
from pi2.probing import steps, storage
whole = probing.list_recipes
probing.list_recipes = lambda plan: [replace(whole(plan)[1], varieties=(probing.USUAL,))]
probing.write_probe.__kwdefaults__["rounds"] = 1
probing.METER_BYTES = 4 << 20
storage.ROUND_S = steps.ROUND_S = 0.002
steps.SERIES_S = steps.CACHED_S = 0.02
"""
"""Times one kind of the smaller model's kernels, and not for long."""

pytestmark = pytest.mark.slow


def build(folder: Path, *options: str, plan: Path = PLAN) -> Path:
    options += ("--threads", "2", "--without-probe")
    assert run(["build", str(plan), "-o", str(folder), *options]) == 0
    return folder


def start(
    bundle: Path, *options: str, before: str = "", given: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Start a bundle; the program ``before`` it takes what it is ``given``."""
    begin = ["-c", before + NUMPY_ALONE, *given]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PI2_")
    } | {"PYTHONPATH": str(bundle), "PYTHONDONTWRITEBYTECODE": "1"}
    return start_python(*begin, str(bundle), *options, env=environment, cwd=bundle)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("bundles") / "demo", "--target", "x86_64-linux-gnu")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle to be spoilt: its files are its own."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


@pytest.fixture(scope="module")
def npu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_emulator()
    folder = tmp_path_factory.mktemp("bundles") / "npu"
    return build(folder, "--target", "x86_64-linux-gnu", plan=WITH_NPU)


def aim(plan: Path, bundle: Path) -> Path:
    """Copy a plan for the processor that a bundle is for: others add numbers up otherwise."""
    features = json.loads((bundle / "bundle.json").read_text())["features"]
    text = plan.read_text()
    own = re.search(r'^device = "(.*)"$', text, re.MULTILINE)
    assert own is not None
    (bundle.parent / "aimed.device.toml").write_text(
        f'schema_version = 2\nextends = ["{own[1]}"]\nname = "aimed"\nid = "aimed"\n'
        f'[units.cpu]\narchitecture = "x86-64"\nfeatures = {json.dumps(features)}\n'
    )
    aimed = bundle.parent / f"aimed-{plan.name}"
    text = text.replace(own[0], 'device = "./aimed.device.toml"')
    for path in ("stores/", "demo.plan.toml"):
        text = text.replace(f'"{path}', f'"{plan.parent}/{path}')
    aimed.write_text(text)
    return aimed


def test_the_text_is_that_of_pi2_run(bundle: Path, ask: Ask) -> None:
    expected = ask(["run", str(aim(PLAN, bundle)), *PROMPT]).out
    done = start(bundle, *PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected and "within the budget" in done.stderr


def test_with_an_npu_the_text_is_that_of_pi2_run_and_the_npu_is_called_emulated(
    npu_bundle: Path, ask: Ask
) -> None:
    expected = ask(["run", str(aim(WITH_NPU, npu_bundle)), *PROMPT]).out
    done = start(npu_bundle, *PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected
    assert "npu (emulated) owns 30% of the neurons" in done.stderr


def test_npu_has_its_graphs_their_index_and_what_a_real_one_is_built_of(npu_bundle: Path) -> None:
    folder = npu_bundle / "hexagon/npu"
    graphs = json.loads((folder / "graphs.json").read_text())
    assert {graph["tokens"] for graph in graphs["graphs"]} == {1, 32, 128}
    for name in ("graphs.elf", "graphs.o"):
        assert int.from_bytes((folder / name).read_bytes()[18:20], "little") == 164  # EM_HEXAGON
    names = {path.name for path in folder.iterdir()}
    assert {"build.sh", "host.c", "pi2_npu.idl", "protocol.h", "skel.c"} <= names
    assert "hexagon/npu/graphs.elf" in json.loads((npu_bundle / "bundle.json").read_text())["files"]


def test_a_bundle_for_a_real_npu_says_what_is_to_be_built_for_it(tmp_path: Path) -> None:
    device, plan = tmp_path / "real.device.toml", tmp_path / "real.plan.toml"
    device.write_text(
        'extends = ["host-npu"]\nschema_version = 3\nid = "real"\nname = "Real"\n'
        "[units.npu]\nemulated = false\n"
    )
    plan.write_text(
        f'extends = ["{os.path.relpath(WITH_NPU, tmp_path)}"]\nschema_version = 3\n'
        'name = "Real"\ndevice = "real.device.toml"\nmodel = "pi2-demo"\n'
    )
    done = start(build(tmp_path / "out", "--target", "x86_64-linux-gnu", plan=plan), *PROMPT)
    assert done.returncode == 2
    assert done.stderr.count("error[") == 1 and "P320" in done.stderr
    assert "pi2-npu-host" in done.stderr and "vendor's SDK" in done.stderr


def test_its_probe_times_the_kernels_that_it_has_for_a_device_that_plans_are_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_some(plan: ResolvedPlan) -> list[KernelRecipe]:
        return [replace(list_recipes(plan)[1], varieties=(USUAL,))]

    monkeypatch.setattr(building, "list_recipes", list_some)
    flash = tmp_path / "store/layers/ffn-000.arrow"
    flash.parent.mkdir(parents=True)
    flash.write_bytes(bytes(storage.SAMPLE_BYTES + (1 << 20)))
    target = ["--target", "x86_64-linux-gnu", "--threads", "2", "-o", str(tmp_path / "bundle")]
    assert run(["build", str(PLAN), *target]) == 0
    output = tmp_path / "phone.device.toml"
    asked = ["--probe", "-o", str(output), "--disk", str(tmp_path / "store")]
    for _ in range(5):  # rounds this short may meet other work of the machine
        done = start(tmp_path / "bundle", *asked, before=SMALL_PROBE)
        if "P343" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert "not timed" not in done.stderr
    report = check_file(output)
    assert report.is_sound and isinstance(report.document, Device), report.diagnostics
    found = {item.kernel for item in report.document.units["cpu"].kernels}
    assert {"multiply", "project", "attend", "predict", "gather", "dense", "engine"} <= found
    assert report.document.storage is not None and report.document.storage.overlap is not None
    assert read_rates(report.document).measured


def test_two_builds_are_equal_byte_by_byte(
    npu_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "cache"))
    options = ("--target", "x86_64-linux-gnu", "--copy-store")
    again = build(tmp_path / "again", *options, plan=WITH_NPU)
    first, second = (
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (npu_bundle, again)
    )
    assert first == second


def test_under_an_emulated_arm64_the_texts_are_those_of_x86() -> None:
    root = os.environ.get("PI2_ARM64_ROOT")
    if not root:
        pytest.skip("PI2_ARM64_ROOT names no folder of tools/emulate_phone.py")
    tool = [sys.executable, str(ROOT / "tools/emulate_phone.py"), "--root", root]
    done = subprocess.run([*tool, "--max-tokens", "8"], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_its_store_it_is_small_and_says_what_is_missing(tmp_path: Path) -> None:
    bundle = build(tmp_path / "small", "--target", "aarch64-linux-android", "--without-store")
    assert sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) <= 15e6
    done = start(bundle, *PROMPT)
    assert done.returncode == 2
    assert "P676" in done.stderr and "--store" in done.stderr
    for library in (bundle / "kernels").glob("*.so"):
        content = library.read_bytes()
        assert int.from_bytes(content[18:20], "little") == 183  # EM_AARCH64
        assert b"\0libc.so\0" in content  # Android's linker looks there only if it is told
    # Kernels of another architecture are not even opened.
    done = start(bundle, *PROMPT, "--store", str(ROOT / "plans/stores/pi2-demo"))
    assert done.returncode == 2 and "P301" in done.stderr


def test_a_store_that_a_run_would_refuse_is_refused_by_the_build(tmp_path: Path, ask: Ask) -> None:
    stride = ["--set", "bundle.stride=4KiB"]
    assert "P520" in ask(["build", str(PLAN), "-o", str(tmp_path / "new"), *stride], 2).err
    assert list(tmp_path.iterdir()) == []


def test_without_its_store_a_bundle_is_built_where_no_store_is(tmp_path: Path) -> None:
    """It is the one that is built beside the store."""
    target = ("--target", "x86_64-linux-gnu", "--without-store")
    without = build(tmp_path / "without", *target, "--set", f'weights="{tmp_path / "none"}"')
    beside = build(tmp_path / "beside", *target)
    names = [file.relative_to(beside) for file in sorted(beside.rglob("*")) if file.is_file()]
    assert names == [f.relative_to(without) for f in sorted(without.rglob("*")) if f.is_file()]
    for name in names:
        assert (beside / name).read_bytes() == (without / name).read_bytes()
    done = start(without, *PROMPT, "--store", str(ROOT / "plans/stores/pi2-demo"))
    assert done.returncode == 0, done.stderr


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


def change_plan(bundle: Path, **tables: dict[str, object]) -> None:
    plan = json.loads((bundle / "plan.json").read_text())
    for name, values in tables.items():
        plan["plan"][name] |= values
    text = json.dumps(plan)
    (bundle / "plan.json").write_text(text)
    index = json.loads((bundle / "bundle.json").read_text())
    index["files"]["plan.json"]["bytes"] = len(text.encode())
    (bundle / "bundle.json").write_text(json.dumps(index))


def test_a_plan_for_other_kernels_is_a_finding(copy: Path) -> None:
    change_plan(copy, threads={"compute": 3})
    done = start(copy, *PROMPT)
    assert done.returncode == 2 and "P674" in done.stderr


def test_another_bundles_folder_is_refused(bundle: Path, tmp_path: Path) -> None:
    done = start_python("-m", "pi2_phone", str(tmp_path), cwd=bundle)
    assert done.returncode == 2 and "P671" in done.stderr


def test_the_script_starts_it_from_anywhere(bundle: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(bundle / "run.sh"), "--machine"], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "architecture x86-64" in done.stdout


def test_an_existing_folder_is_left_alone(bundle: Path) -> None:
    assert run(["build", str(PLAN), "-o", str(bundle)]) == 2


def test_a_plan_for_another_architecture_cannot_be_built(tmp_path: Path) -> None:
    path = next(iter(sorted((ROOT / "plans/x86-laptop").glob("*.plan.toml"))))
    assert run(["build", str(path), "-o", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_files_that_the_system_hides_change_nothing(bundle: Path) -> None:
    expected = start(bundle, *PROMPT).stdout
    done = start(bundle, *PROMPT, before=WITHOUT_FILES, given=["/proc/cpuinfo"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


def test_a_processor_that_is_hidden_is_a_finding(bundle: Path) -> None:
    done = start(bundle, *PROMPT, before=WITHOUT_FILES, given=["none"])
    assert done.returncode == 2 and "P302" in done.stderr
    assert "Traceback" not in done.stderr


def test_calls_that_the_kernel_refuses_have_other_ways(bundle: Path) -> None:
    expected = start(bundle, *PROMPT).stdout
    done = start(bundle, *PROMPT, "-v", before=WITHOUT_CALLS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected and "neurons are read with pread" in done.stderr
    done = start(bundle, "--machine", before=WITHOUT_CALLS)
    assert done.returncode == 0 and "not bound" in done.stdout


def test_threads_that_cannot_be_bound_or_memory_that_cannot_be_locked_are_named(copy: Path) -> None:
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs cores 0 and 1")
    change_plan(copy, threads={"cores": "0,1"}, memory={"lock": "locked"})
    free = start(copy, *PROMPT)
    assert free.returncode == 0, free.stderr
    done = start(copy, *PROMPT, before=WITHOUT_CALLS.replace(" 203, 204,", " 203, 203,"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == free.stdout
    assert "not bound" in done.stderr and "memory is not locked" in done.stderr


# GGUF files
@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates and ups are looked up in tables, which the package `gguf` has."""
    shape = {"hidden": 256, "ffn": 96, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}
    kinds = {"gate.weight": "IQ2_XS", "up.weight": "IQ1_S"}
    return write_random_gguf(tmp_path_factory.mktemp("files"), shape, kinds=kinds)


@pytest.fixture(scope="module")
def file_bundle(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "file"
    return build(folder, "--target", "x86_64-linux-gnu", plan=file)


GREEDY = ["--prompt", "hello world", "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]


def test_a_gguf_file_runs_in_a_bundle_as_it_is(file: Path, file_bundle: Path) -> None:
    done = start(file_bundle, *GREEDY, "--json")
    assert done.returncode == 0, done.stderr
    features = json.loads((file_bundle / "bundle.json").read_text())["features"]
    with pi2.load(write_aimed_plan(file_bundle.parent, file, features)) as model:
        generation = model.generate("hello world", max_tokens=8, temperature=0.0, ignore_eos=True)
        expected = "".join(generation)
    assert json.loads(done.stdout)["text"] == expected
    assert (file_bundle / "store" / file.name).samefile(file)


def write_aimed_plan(folder: Path, file: Path, features: Sequence[str]) -> Path:
    """A plan for the processor that a bundle is for."""
    device = folder / "aimed.device.toml"
    device.write_text(
        'schema_version = 2\nextends = ["host"]\nname = "aimed"\nid = "aimed"\n'
        f'[units.cpu]\narchitecture = "x86-64"\nfeatures = {json.dumps(list(features))}\n'
    )
    plan = folder / "aimed.plan.toml"
    plan.write_text(
        f'schema_version = 3\nweights = "{file}"\ndevice = "./{device.name}"\n'
        "[threads]\ncompute = 2\n"
    )
    return plan


def test_a_bundle_s_gguf_file_is_verified(file_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(file_bundle, tmp_path / "copy"))
    assert start(copy, "--verify").returncode == 0
    weights = copy / "store/model.gguf"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    done = start(copy, "--verify")
    assert done.returncode == 2 and "P507" in done.stderr
    weights.unlink()
    done = start(copy, *GREEDY)
    assert done.returncode == 2 and "P676" in done.stderr


def test_a_gguf_file_can_be_copied_later(file: Path, tmp_path: Path) -> None:
    folder = build(
        tmp_path / "b", "--target", "aarch64-linux-android", "--without-store", plan=file
    )
    assert not (folder / "store/model.gguf").exists()
    assert (folder / "store/tokenizer.json").exists()
