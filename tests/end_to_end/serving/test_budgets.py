"""Memory budgets that change while a server answers; models that are unloaded and loaded again."""

import asyncio
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

import pi2
from pi2.cli.main import run
from pi2.cli.serve import list_plans
from pi2.diagnostics import UserError
from pi2.machine.memory import count_own_bytes
from pi2.orchestrator import change_budget
from pi2.plan.documents.quantities import parse_size
from pi2.serving.hosts import Hosts, count_bytes
from pi2.serving.housekeeping import GROW_LOOKS, SHRINK_LOOKS, Yielding, read_stalls
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.models import MIXTURE, make_tiny
from tests.helpers.patience import PATIENCE_S
from tests.helpers.plans import write_plan
from tests.helpers.programs import Ask
from tests.helpers.servers import get, post, serve

SHAPE = {"hidden": 256, "ffn": 4096, "layers": 4, "context": 256}
PROMPTS = ("a", "the sky", "one two", "def f")
PLAIN: dict[str, object] = {"sampling.temperature": 0.0, "sampling.end_repeats": False}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gguf(tmp_path_factory.mktemp("dense"), SHAPE)


def make_source(kind: str, folder: Path, file: Path) -> Path:
    if kind == "store":
        tiny = make_tiny(folder, {"shape": {"context": 256}})
        return write_plan(folder, tiny, {"kv": {"context": 256}})
    if kind == "experts":
        changes = {**MIXTURE, "moe": {"experts": 16, "active_experts": 3}}
        return write_random_gguf(folder, {**SHAPE, "ffn": 768}, changes)
    return file


@pytest.mark.parametrize("kind", ["dense", "experts", "store"])
def test_text_is_the_same_while_the_budget_changes(kind: str, tmp_path: Path, file: Path) -> None:
    path, first = make_source(kind, tmp_path, file), "200 MiB"
    settings = {"decode.batch": 2, "kv.context": 256, **PLAIN}
    with pi2.load(path, memory=first, set=settings) as model:
        with pytest.raises(UserError, match="P745") as caught:
            change_budget(model, 20 << 20)
        least = read_least(str(caught.value))
        wanted = [model.generate(prompt, max_tokens=60, ignore_eos=True) for prompt in PROMPTS[:2]]
        whole = ["".join(one) for one in wanted]
        streams = [model.generate(prompt, max_tokens=60, ignore_eos=True) for prompt in PROMPTS[:2]]
        texts = ["", ""]
        for step in range(200):
            for number, stream in enumerate(streams):
                texts[number] += next(stream, "")
            if step in (4, 20):
                size = least if step == 4 else first
                change_budget(model, parse_size(size))
                assert model.plan.plan.memory.budget == parse_size(size)
                if kind != "store":
                    assert model.plan.file is not None
                    assert bool(model.plan.file.missing_bytes) == (step == 4)
        assert texts == whole
        assert "".join(model.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)) == whole[0]
    with pytest.raises(UserError, match="P615"):
        change_budget(model, 64 << 20)


def read_least(text: str) -> str:
    """The smallest budget that an error states."""
    found = re.search(r"at least (\d+ MiB)", text)
    assert found is not None, text
    return found[1]


def test_a_served_budget_changes_while_clients_stream(file: Path, tmp_path: Path) -> None:
    overrides = {"decode.batch": 4, "kv.context": 256, **PLAIN}
    plans = list_plans((file,), overrides, 200 << 20)

    def ask(number: int) -> str:
        body = {"model": "model", "prompt": PROMPTS[number], "max_tokens": 100, "ignore_eos": True}
        reply = post(f"{address}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    with serve(plans, memory_bytes=200 << 20) as address:
        whole = [ask(number) for number in range(4)]
        refused = post(f"{address}/api/budget", json={"memory": "20 MiB"})
        assert refused.status_code == 400
        least = read_least(refused.text)
        found: dict[int, str] = {}
        threads = [threading.Thread(target=lambda n=n: found.update({n: ask(n)})) for n in range(4)]
        for thread in threads:
            thread.start()
        for memory in (least, "200 MiB", least):
            reply = post(f"{address}/api/budget", json={"memory": memory})
            assert reply.status_code == 200, reply.text
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(4)] == whole
        (state,) = get(f"{address}/api/state").json()["models"]
        assert state["budget_bytes"] == parse_size(least)
        assert state["bound_by"] is not None
        for body, status in (
            ({"memory": "much"}, 400), ({}, 400),
            ({"memory": "1 GiB", "model": "none"}, 404),
        ):  # fmt: skip
            assert post(f"{address}/api/budget", json=body).status_code == status
        assert run(["top", address, "-n", "1"]) == 0
        asked = {"prompt": "a", "max_tokens": 250, "end_repeats": True, "logit_bias": {"5": 100.0}}
        reply = post(f"{address}/v1/completions", json={"model": "model", **asked})
        (choice,) = reply.json()["choices"]
        assert (choice["finish_reason"], choice["finish_details"]) == ("stop", {"type": "repeats"})
    assert run(["top", address, "-n", "1"]) == 2


def test_plans_of_a_file_share_its_weights(tmp_path: Path) -> None:
    file = write_random_gguf(tmp_path, {**SHAPE, "ffn": 12288})
    settings: dict[str, object] = {"memory.weights": "loaded", "kv.context": 256, **PLAIN}
    for name, budget in (("long", 300), ("short", 280), ("small", 130)):
        (tmp_path / f"{name}.plan.toml").write_text(
            f'schema_version = 3\nweights = "{file.name}"\n[memory]\nbudget = "{budget} MiB"\n'
            f'[serve]\nload = "{"request" if name == "short" else "start"}"\n'
        )
    plans = list_plans(tuple(sorted(tmp_path.glob("*.plan.toml"))), settings)
    long, short, small = (sum(plan.matrices.values()) for plan in plans)
    assert 0 < small < long == short
    limit = count_bytes(plans)
    assert limit == (710 << 20) - small - short
    with serve(plans, memory_bytes=limit) as address:

        def ask(name: str) -> str:
            body = {"model": name, "prompt": "def f", "max_tokens": 12, "ignore_eos": True}
            return str(post(f"{address}/v1/completions", json=body).json()["choices"][0]["text"])

        def list_loaded() -> list[str]:
            states = get(f"{address}/api/state").json()["models"]
            return [state["name"] for state in states if state["loaded"]]

        assert list_loaded() == ["long", "small"]
        wanted, before = ask("long"), count_own_bytes()
        assert ask("short") == ask("small") == wanted
        assert list_loaded() == ["long", "short", "small"]
        assert count_own_bytes() - before < short // 2
        post(f"{address}/api/budget", json={"memory": "500 MiB"})
        assert list_loaded() == ["short", "small"]
        assert ask("short") == ask("small") == wanted


def wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_presets_are_served_unloaded_and_loaded_again(file: Path, tmp_path: Path, ask: Ask) -> None:
    presets = tmp_path / "presets.ini"
    presets.write_text(
        "version = 1\n\n; for all\n[*]\nc = 128\ntemp = 0\nn-gpu-layers = 99\n\n"
        f"[quick]\nmodel = {file}\nload-on-startup = true\nsleep-idle-seconds = 1\n"
        f"[late]\nLLAMA_ARG_MODEL = {file}\nctx-size = 64\ntop-k = 5\nload-on-startup = false\n"
    )
    from pi2.serving.presets import read_presets

    found = read_presets(presets)
    assert [preset.ignored for preset in found] == [("n-gpu-layers",)] * 2
    plans = list_plans((), {}, presets=found)
    assert [(plan.name, plan.load, plan.idle_s) for plan in plans] == [
        ("quick", "start", 1.0), ("late", "request", None)
    ]  # fmt: skip
    with serve(plans) as address:

        def is_loaded(name: str) -> bool:
            states = get(f"{address}/api/state").json()["models"]
            return {state["name"]: bool(state["loaded"]) for state in states}[name]

        assert is_loaded("quick") and not is_loaded("late")
        body = {"prompt": "a", "max_tokens": 2}
        for name in ("late", "quick"):
            reply = post(f"{address}/v1/completions", json={"model": name, **body})
            assert reply.status_code == 200
            assert is_loaded(name)
        wait_for(lambda: not is_loaded("quick"))
        assert is_loaded("late")
        post(f"{address}/v1/completions", json={"model": "quick", **body})
        assert is_loaded("quick")
        contexts = {s["name"]: s["context"] for s in get(f"{address}/api/state").json()["models"]}
        assert contexts == {"quick": 128, "late": 64}
    plan = tmp_path / "late.plan.toml"
    plan.write_text(
        f'schema_version = 3\nweights = "{file}"\n[kv]\ncontext = 64\n[sampling]\ntop_k = 5\n'
        'temperature = 0.5\n[serve]\nidle = "2 min"\nload = "start"\n'
    )
    written = tmp_path / "written.ini"
    written.write_text(ask(["new", "presets", str(plan)]).out)
    (back,) = read_presets(written)
    assert back.name == "late" and back.path == file
    assert back.overrides == {
        "kv.context": 64, "kv.type": "fp16", "sampling.top_k": 5, "sampling.temperature": 0.5,
        "serve.idle": "120 s", "serve.load": "start",
    }  # fmt: skip
    for text in ("[a]\nctx-size = 4\n", "[a]\nmodel = x\ntop-k = many\n", "", "[a\n"):
        presets.write_text(text)
        assert "P744" in ask(["serve", "--models-preset", str(presets)], 2).err


def test_memory_is_yielded_and_comes_back(tmp_path: Path) -> None:
    own = Yielding()
    parts = [own.look(50.0) for _ in range(3 * SHRINK_LOOKS)]
    assert [part for part in parts if part] == [0.8, pytest.approx(0.64), pytest.approx(0.512)]
    assert all(own.look(5.0) is None for _ in range(2 * GROW_LOOKS))
    parts = [own.look(0.0) for _ in range(3 * GROW_LOOKS)]
    assert [part for part in parts if part][-1] == 1.0
    for _ in range(100 * SHRINK_LOOKS):
        own.look(50.0)
    assert own.part == 0.2
    assert read_stalls(tmp_path) == 0.0
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/pressure/memory").write_text("some avg10=12.50 avg60=1.00 avg300=0 total=9\n")
    assert read_stalls(tmp_path) == 12.5


def test_a_model_under_pressure_gets_smaller(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pi2.serving import housekeeping

    failures = [RuntimeError("a look that fails is not the last one")]

    def read() -> float:
        if failures:
            raise failures.pop()
        return 50.0

    monkeypatch.setattr(housekeeping, "read_stalls", read)
    monkeypatch.setattr(housekeeping, "PERIOD_S", 0.01)
    monkeypatch.setattr(housekeeping, "PAUSE_S", 0.01)
    plans = list_plans((file,), {"memory.pressure": "yield", "kv.context": 64}, 200 << 20)

    async def live() -> int:
        hosts = Hosts(plans)
        await hosts.start()
        host = hosts.hosts["model"]
        while host.plan.budget_bytes == 200 << 20:
            await asyncio.sleep(0.05)
        assert host.is_loaded
        await hosts.stop()
        return host.plan.budget_bytes

    assert asyncio.run(asyncio.wait_for(live(), PATIENCE_S)) == (200 << 20) * 8 // 10
