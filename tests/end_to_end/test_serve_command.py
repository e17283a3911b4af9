"""The command `pi2 serve`, from its first line to its last."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

pytest.importorskip("uvicorn", reason="needs the extra serve")

import pi2.cli
from pi2.cli.main import run
from pi2.weights.file_reading import FileFiller
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.patience import PATIENCE_S
from tests.helpers.programs import Ask

COMMAND = [sys.executable, "-m", "pi2", "serve"]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_interrupted(end: signal.Signals) -> None:
    environment = {**os.environ, "PI2_API_KEY": "secret"}
    with subprocess.Popen(
        [*COMMAND, "demo", "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while not (
            found := re.search(r"pi2 serves demo on (http://127\.0\.0\.1:\d+)", "".join(lines))
        ):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        body = {"model": "demo", "prompt": "def ", "max_tokens": 4}
        url = f"{found[1]}/v1/completions"
        assert httpx2.post(url, json=body, timeout=PATIENCE_S).status_code == 401
        answer = httpx2.post(url, json=body, headers={"x-api-key": "secret"}, timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 4
        process.send_signal(end)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_S) in (130, -end)
    assert "Traceback" not in rest
    # One line for each request, and nothing that was said.
    assert rest.count('"path": "/v1/completions"') + "".join(lines).count("/v1/completions") == 2
    assert "def " not in rest


@pytest.fixture
def quiet_again() -> Iterator[None]:
    """The command logs every request; tests that follow do not want that."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("quiet_again")
def test_server_looks_for_garbage_as_often_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, seen = pi2.cli._USUAL, []
    monkeypatch.setattr("pi2.cli.serve.run_server", lambda *_: seen.append(gc.get_threshold()))
    before = gc.get_threshold()
    try:
        pi2.cli.put_off_collection()
        assert gc.get_threshold() > usual
        assert run(["serve", "demo"]) == 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    assert seen == [usual]


@pytest.mark.usefixtures("quiet_again")
def test_what_cannot_be_served_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["serve", "demo", "--port", str(taken.getsockname()[1])]) == 2
    assert "P681" in capsys.readouterr().err
    assert "P682" in ask(["serve", "demo", "demo"], 2).err
    assert "Traceback" not in ask(["serve", str(tmp_path / "none.plan.toml")], 2).err
    assert "P611" in ask(["serve", "demo", "--memory", "1 MiB"], 2).err
    assert "P612" in ask(["serve", "demo", "--max-body", "3"], 2).err
    assert "--on ray" in ask(["serve", "demo", "--replicas", "2"], 2).err
    assert "1:4" in ask(["serve", "demo", "--on", "ray", "--autoscale", "4:1"], 2).err


@pytest.mark.usefixtures("quiet_again")
@pytest.mark.parametrize("memory_mib", [100, 300])
def test_plans_are_fitted_to_the_memory_of_the_process(
    memory_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("pi2.cli.serve.run_server", lambda *given: seen.append(given[1].hosts))
    assert "demo: budget" in ask(["serve", "demo", "--memory", f"{memory_mib} MiB"]).err
    assert seen[0]["demo"].plan.budget_bytes == memory_mib << 20
    resolved = seen[0]["demo"].read_plan().plan
    assert resolved.memory.budget == memory_mib << 20
    assert sum(dict(resolved.memory.segments).values()) <= memory_mib << 20
    monkeypatch.setattr(FileFiller, "find_memory", lambda self: (8 << 30, 1 << 20))
    file = str(write_random_gguf(tmp_path, {}))
    assert "a budget of 1 MiB" in ask(["serve", file], 1).err
    assert "P026" not in ask(["serve", file, "--memory", f"{memory_mib} MiB"]).err


@pytest.mark.usefixtures("quiet_again")
def test_of_several_plans_only_those_that_have_more_are_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.servers import make_chat_plan

    large = make_chat_plan(tmp_path / "large", context=64)
    seen: list[Any] = []
    monkeypatch.setattr("pi2.cli.serve.run_server", lambda *given: seen.append(given[1].hosts))
    assert run(["serve", "demo", str(large), "--memory", "150 MiB"]) == 0
    assert [host.plan.budget_bytes >> 20 for host in seen[0].values()] == [128, 150]
