"""Run the demo's bundles for aarch64 under qemu, and compare their texts with those of x86-64.

``python tools/emulate_phone.py --root FOLDER`` prepares FOLDER once (Python out of Debian's arm64
packages, numpy's wheel: about 120 MB; needs apt-get, dpkg-deb, pip and a network, no root), builds
bundles of the demo plan and of that with an NPU, which qemu-hexagon plays, and runs them.  Exit
status 0 if the texts are equal and a processor without dotprod is refused, 1 if not, 77 where
something is missing, with the reason.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLANS = (ROOT / "plans/demo.plan.toml", ROOT / "plans/demo-npu.plan.toml")
PACKAGES = ("python3-minimal", "python3", "libpython3-stdlib", "libstdc++6")
RPC_PACKAGES = (
    *("apache-tvm", "apache-tvm-ffi", "ml_dtypes", "typing_extensions"),
    *("cloudpickle", "psutil", "tornado"),
)
TVM = "tvm"
"""Folder of what a server of TVM's RPC needs, below the root."""
TAGS = (
    *("manylinux_2_28_aarch64", "manylinux_2_27_aarch64"),
    *("manylinux2014_aarch64", "manylinux_2_17_aarch64"),
)
SKIPPED = 77


def main() -> int:
    """Prepare, build, run and compare."""
    parser = argparse.ArgumentParser(description="Run the demo's bundle under qemu-aarch64.")
    parser.add_argument("--root", type=Path, required=True, help="folder for arm64 packages")
    parser.add_argument("--plan", type=Path, action="append", help="instead of the demo's two")
    parser.add_argument(
        "--rpc", action="store_true", help="only prepare the folder, and put TVM's RPC there"
    )
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    problem = find_missing() or prepare(options.root)
    if options.rpc:
        problem = problem or fetch_tvm(options.root)
    if problem is not None:
        print(f"skipped: {problem}")
        return SKIPPED
    if options.rpc:
        return 0
    asked = ["--prompt", options.prompt, "--max-tokens", str(options.max_tokens)]
    problems = [compare(options.root, plan, asked) for plan in options.plan or PLANS]
    return int(any(problems))


def compare(root: Path, plan: Path, asked: list[str]) -> bool:
    """Build a plan's bundles, run them, and say what differs; whether anything does."""
    with tempfile.TemporaryDirectory() as scratch:
        here = build(plan, "x86_64-linux-gnu", Path(scratch) / "x86-64")
        there = build(plan, "aarch64-linux-gnu", Path(scratch) / "aarch64")
        expected = run_here(here, asked)
        found = run_emulated(root, there, asked, "max")
        old = run_emulated(root, there, asked, "cortex-a53")
    print(found.stdout + found.stderr)
    if found.returncode != 0 or found.stdout != expected.stdout:
        print(f"NOT EQUAL: x86-64 gives\n{expected.stdout}{expected.stderr}")
        return True
    if old.returncode != 2 or "P302" not in old.stderr:
        print(f"NOT REFUSED by a cortex-a53 ({old.returncode}):\n{old.stderr}")
        return True
    print(f"{plan.name}: equal to the text on x86-64; a cortex-a53 is refused (P302)")
    return False


def find_missing() -> str | None:
    """What this machine lacks; None if nothing."""
    if platform.machine() != "x86_64":
        return f"a bundle for x86-64 is compared with, this is {platform.machine()}"
    for program in ("qemu-aarch64", "qemu-hexagon", "apt-get", "dpkg-deb", "ld.lld"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def prepare(root: Path) -> str | None:
    """Fill ``root`` unless it was filled before; return why it cannot be."""
    done = root / "done"
    if done.exists():
        return None
    for folder in ("lists/partial", "cache/archives/partial", "tree", "site"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "status").touch()
    options = [
        *("-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"),
        *(
            "-o",
            f"Dir::State::Lists={root / 'lists'}",
            "-o",
            f"Dir::State::status={root / 'status'}",
        ),
        *("-o", f"Dir::Cache={root / 'cache'}", "-o", "Debug::NoLocking=true"),
    ]
    install = ["install", "-y", "--no-install-recommends", "--download-only", *PACKAGES]
    for arguments in (["update"], install):
        problem = call("apt-get", *options, *arguments)
        if problem is not None:
            return f"arm64 packages cannot be fetched: {problem}"
    for package in sorted((root / "cache/archives").glob("*.deb")):
        problem = call("dpkg-deb", "-x", str(package), str(root / "tree"))
        if problem is not None:
            return problem
    problem = fetch_wheels(root, "site", "numpy")
    if problem is None:
        done.touch()
    return problem


def fetch_tvm(root: Path) -> str | None:
    """Put what a server of TVM's RPC needs into ``root``; return why it cannot be."""
    if (root / TVM).exists():
        return None
    names = [
        f"{name}=={version(name)}" if name.startswith("apache") else name for name in RPC_PACKAGES
    ]
    return fetch_wheels(root, TVM, *names)


def fetch_wheels(root: Path, place: str, *names: str) -> str | None:
    """Unpack wheels for the emulated Python into a folder of ``root``, which appears whole; return
    why it cannot be."""
    python = find_python(root).name.removeprefix("python")
    tags = [part for tag in TAGS for part in ("--platform", tag)]
    fetch = ["-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *tags]
    with tempfile.TemporaryDirectory(dir=root) as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site"
        problem = call(
            sys.executable, *fetch, "--python-version", python, "-d", str(wheels), *names
        )
        if problem is not None:
            return f"wheels of {', '.join(names)} cannot be fetched: {problem}"
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        shutil.rmtree(root / place, ignore_errors=True)
        site.rename(root / place)
    return None


def find_python(root: Path) -> Path:
    """The emulated Python."""
    return next(iter(sorted((root / "tree/usr/bin").glob("python3.[0-9]*[0-9]"))))


def call(*command: str) -> str | None:
    """Run a program; return the last line of what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return None if done.returncode == 0 else f"{command[0]}: {lines[-1] if lines else 'failed'}"


def build(plan: Path, target: str, folder: Path) -> Path:
    """Build a bundle of two threads."""
    command = [sys.executable, "-m", "pi2", "build", str(plan), "--target", target]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--threads", "2", "-o", str(folder)], env=environment, check=True)
    return folder


def run_here(bundle: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a bundle on this machine."""
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        [str(bundle / "run.sh"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def start_emulated(root: Path, processor: str) -> list[str]:
    """What starts the emulated Python."""
    emulator = ["qemu-aarch64", "-cpu", processor, "-L", str(root / "tree")]
    return [*emulator, str(find_python(root))]


def run_emulated(
    root: Path, bundle: Path, arguments: list[str], processor: str
) -> subprocess.CompletedProcess[str]:
    """Run a bundle on an emulated processor."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join((str(bundle), str(root / "site"))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [*start_emulated(root, processor), "-m", "pi2_phone", str(bundle), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
