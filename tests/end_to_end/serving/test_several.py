"""Many clients at once, and several models."""

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from pi2.engine.sequences import Sequences
from pi2.serving.calls import Limits
from tests.helpers.patience import PATIENCE_S
from tests.helpers.servers import describe_plan, get, make_chat_plan, post, serve


def test_many_clients_get_what_each_would_get_alone(client: Any) -> None:
    def ask(number: int) -> str:
        answer = client.completions.create(
            model="tiny", prompt=f"number {number}", max_tokens=10, temperature=1, seed=number
        )
        return str(answer.choices[0].text)

    alone = [ask(number) for number in range(6)]
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(ask, [number % 6 for number in range(18)]))
    assert found == alone * 3


def test_models_are_loaded_when_they_are_asked_for(tmp_path: Path) -> None:
    plans = []
    for name in ("one", "two"):
        plans.append(describe_plan(make_chat_plan(tmp_path / name, context=64), name))
    with serve(plans, memory_bytes=3 << 30) as address:

        def list_loaded() -> list[str]:
            found = get(f"{address}/v1/models").json()["data"]
            return [item["id"] for item in found if item["loaded"]]

        assert list_loaded() == ["one"]
        for name in ("two", "one"):
            body = {"model": name, "prompt": "a", "max_tokens": 2}
            assert post(f"{address}/v1/completions", json=body).is_success
            assert list_loaded() == [name]


def test_whoever_wants_another_model_waits_his_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_step, step = threading.Event(), Sequences.step

    def step_when_all_have_asked(self: Sequences, *arguments: Any) -> Any:
        assert may_step.wait(PATIENCE_S)
        return step(self, *arguments)

    monkeypatch.setattr(Sequences, "step", step_when_all_have_asked)
    plans = [
        describe_plan(make_chat_plan(tmp_path / name, context=1024), name)
        for name in ("one", "two")
    ]
    memory = max(plan.budget_bytes for plan in plans)
    limits = Limits(waiting=1, time_s=600)
    with serve(plans, memory_bytes=memory, limits=limits) as address, ThreadPoolExecutor() as pool:
        url = f"{address}/v1/completions"

        def ask(name: str) -> tuple[int, float]:
            body = {"model": name, "prompt": "a", "max_tokens": 2}
            answer = post(url, json={**body, "ignore_eos": True})
            assert "retry-after" in answer.headers or answer.is_success, answer.text
            return answer.status_code, time.monotonic()

        def wait_for(number: int, key: str, value: int) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                state = get(f"{address}/api/state").json()["models"][number]
                if state.get(key) == value:
                    return
                time.sleep(0.005)
            raise AssertionError(f"{key} is not {value}")

        first = pool.submit(ask, "one")
        wait_for(0, "running", 1)
        # Whoever hangs up while he waits gives his place in line up.
        gone = http.client.HTTPConnection(address.removeprefix("http://"))
        gone.request("POST", "/v1/completions", json.dumps({"model": "two", "prompt": "a"}))
        wait_for(1, "waiting", 1)
        gone.close()
        wait_for(1, "waiting", 0)
        other = pool.submit(ask, "two")
        wait_for(1, "waiting", 1)
        assert ask("two")[0] == 429
        late = pool.submit(ask, "one")
        wait_for(0, "waiting", 1)
        may_step.set()
        found = [future.result() for future in (first, other, late)]
        assert [status for status, _ in found] == [200] * 3
        assert [at for _, at in found] == sorted(at for _, at in found)
