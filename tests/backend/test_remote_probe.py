"""Kernels are timed on another machine through TVM's RPC: here a server of this machine."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.machine import detect_machine
from pi2.plan.checking.check import check_file
from pi2.plan.documents.device import Device
from pi2.probing import remote

NEEDED = ("tornado", "psutil", "cloudpickle")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on {port}")


@pytest.fixture
def tracker() -> Iterator[int]:
    """A tracker with one machine, ``phone``; returns its port."""
    port, other = find_port(), find_port()
    place = f"127.0.0.1:{port}"

    def start(program: str, own: int, *options: str) -> subprocess.Popen[bytes]:
        ports = ["--port", str(own), "--port-end", str(own + 1)]
        command = [sys.executable, "-m", f"tvm.exec.{program}", "--host", "127.0.0.1", *ports]
        # What they say would fill a pipe.
        return subprocess.Popen(
            [*command, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ,
            start_new_session=True,
        )

    with ExitStack() as cleanup:
        for program, own, options in (
            ("rpc_tracker", port, []),
            ("rpc_server", other, ["--tracker", place, "--key", "phone"]),
        ):
            process = start(program, own, *options)
            cleanup.callback(process.wait)
            cleanup.callback(process.kill)
            wait_for(own)
        yield port


@pytest.mark.slow
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


def test_a_tracker_that_is_not_there_is_a_finding() -> None:
    machine = remote.RemoteMachine(
        host="127.0.0.1",
        port=find_port(),
        key="phone",
        triple="x86_64-linux-gnu",
        architecture="x86-64",
        features=frozenset({"avx2"}),
        threads=1,
    )
    with pytest.raises(UserError, match="P342"):
        remote.connect(machine)
