"""Kernels are timed on another machine through TVM's RPC: here a server of this machine."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.machine import detect_machine
from pi2.plan.documents.device import Device
from pi2.probing import remote
from tools.emulate_phone import TVM, start_emulated

pytestmark = pytest.mark.slow
NEEDED = ("tornado", "psutil", "cloudpickle")
SERVER = """
import sys
from tvm.rpc.server import PopenRPCServerState
own, tracker = map(int, sys.argv[1:])
place = ("127.0.0.1", tracker)
state = PopenRPCServerState("127.0.0.1", own, own + 1, tracker_addr=place, key="phone")
state.thread.join()
"""
"""``tvm.exec.rpc_server``'s other process, which an emulated program cannot start."""
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(3000):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on {port}")


def find_emulated_server() -> tuple[list[str], dict[str, str]]:
    """What starts a server in a Python for arm64, and its environment."""
    root = os.environ.get("PI2_ARM64_ROOT")
    if not root:
        pytest.skip("PI2_ARM64_ROOT names no folder of tools/emulate_phone.py")
    if not (Path(root) / TVM).is_dir():
        pytest.skip("tools/emulate_phone.py --rpc has not put TVM for arm64 there")
    folders = [str(Path(root) / name) for name in ("site", TVM)]
    begin = [*start_emulated(Path(root), "max"), "-c", SERVER]
    return begin, {"PYTHONPATH": os.pathsep.join(folders)}


@contextmanager
def open_tracker(server: Sequence[str], changes: Mapping[str, str]) -> Iterator[int]:
    """A tracker with one machine, ``phone``, whose ``server`` is started with its own port and the
    tracker's in an environment with ``changes``; gives the tracker's port."""
    tracker, own = find_port(), find_port()
    ports = ["--port", str(tracker), "--port-end", str(tracker + 1)]
    begin = [sys.executable, "-m", "tvm.exec.rpc_tracker", "--host", "127.0.0.1", *ports]
    with ExitStack() as cleanup:
        for port, command in ((tracker, begin), (own, [*server, str(own), str(tracker)])):
            # What they say would fill a pipe.
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | changes if port == own else os.environ,
                start_new_session=True,
            )
            cleanup.callback(process.wait)
            cleanup.callback(kill_group, process)
            wait_for(port)
        yield tracker


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def tracker() -> Iterator[int]:
    with open_tracker([sys.executable, "-c", SERVER], {}) as port:
        yield port


@pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
def test_a_machine_at_a_tracker_gets_a_device_file_with_times_of_its_kernels(
    tracker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = detect_machine()
    if machine.architecture != "x86-64" or "avx2" not in machine.features:
        pytest.skip("needs a processor with AVX2")
    monkeypatch.setattr(remote, "ROUNDS", 2)
    output = tmp_path / "far.device.toml"
    target = ["--target", "x86_64-linux-gnu", "--features", "avx2,fma,f16c", "--threads", "2"]
    assert run(["probe", "--rpc", f"127.0.0.1:{tracker}", "-o", str(output), *target]) == 0
    report = check_file(output)
    assert report.is_sound, report.diagnostics
    assert isinstance(report.document, Device)
    cpu = report.document.units["cpu"]
    found = {(item.kernel, item.size) for item in cpu.kernels}
    assert {("multiply", 4096), ("dense", 128), ("gather", 256), ("norm", 2048)} <= found
    assert all(item.time > 0 and "through RPC" in item.source for item in cpu.kernels)


@pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
def test_an_emulated_arm64_at_a_tracker_gets_a_device_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ROUNDS", 1)
    small = replace(remote.SHAPE, width=256, neurons=512, arena_neurons=512, vocab=1024)
    monkeypatch.setattr(remote.measure_remote, "__kwdefaults__", {"shape": small})
    output = tmp_path / "arm.device.toml"
    with open_tracker(*find_emulated_server()) as port:
        target = ["--features", "neon,dotprod,fp16", "--threads", "2"]
        assert run(["probe", "--rpc", f"127.0.0.1:{port}", "-o", str(output), *target]) == 0
    report = check_file(output)
    assert report.is_sound and isinstance(report.document, Device), report.diagnostics
    cpu = report.document.units["cpu"]
    assert cpu.architecture == "aarch64"
    assert {"multiply", "dense", "gather", "norm"} <= {item.kernel for item in cpu.kernels}


def test_a_tracker_that_is_not_there_is_a_finding() -> None:
    machine = remote.RemoteMachine(
        host="127.0.0.1", port=find_port(), key="phone", triple="x86_64-linux-gnu",
        architecture="x86-64", features=frozenset({"avx2"}), threads=1,
    )  # fmt: skip
    with pytest.raises(UserError, match="P342"):
        remote.connect(machine)
