"""A model that is open, and documents that are read once."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pi2
from pi2.backends.executor import ExecutorObserver
from pi2.backends.host import load_host_loops
from pi2.orchestrator import load
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.preparing import watch_kernels
from tests.helpers.programs import start_python


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opened")
    return write_plan(folder, make_tiny(folder), {"backends": {"cpu": "cpu"}})


@pytest.mark.parametrize(
    "settings",
    [
        {"decode.predictor": "low-rank"},
        {"decode.predictor": "gate"},
        {"decode.predictor": "none", "decode.batch": 2, "kv.type": "int8"},
    ],
    ids=lambda settings: str(settings["decode.predictor"]),
)
def test_what_is_compiled_early_is_what_is_loaded(plan: Path, settings: dict[str, Any]) -> None:
    early, needed = watch_kernels(partial(pi2.load, plan, set=settings))
    assert early == [needed]


def test_an_observed_model_has_its_kernels_early(plan: Path) -> None:
    def observe(executor: object, request: object) -> ExecutorObserver | None:
        raise AssertionError("nothing is built")

    early, needed = watch_kernels(partial(load, plan, make_observer=observe))
    assert early == [needed]


def test_a_model_that_guesses_has_its_kernels_before_the_other_takes_memory(plan: Path) -> None:
    other = plan.with_name("other.plan.toml")
    other.write_text(plan.read_text())
    guessing = {"drafts": "plan", "plan": f"./{other.name}", "when": "always", "tokens": 3}
    chosen = {"decode.speculation": guessing, "memory.budget": "4 GiB"}
    chosen["decode.activations"] = "int8"
    early, needed = watch_kernels(partial(pi2.load, plan, set=chosen))
    assert early[1] == needed
    assert [spec.planes for spec in early] == [1, 2]


def test_loops_of_the_host_are_compiled_early(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def load_loops(*arguments: Any) -> object:
        order.append("loops")
        return load_host_loops(*arguments)

    def note(*_arguments: object) -> None:
        order.append("memory")
        raise KeyboardInterrupt

    monkeypatch.setattr("pi2.engine.assembly.load_host_loops", load_loops)
    monkeypatch.setattr("pi2.engine.loading.StoreWeights.complete_request", note)
    monkeypatch.setattr("pi2.backends.cpu.backend.prepare", lambda request: None)
    with pytest.raises(KeyboardInterrupt):
        pi2.load(plan)
    assert order == ["loops", "memory"]


ROOT = Path(__file__).parents[2]
COUNT = """
import collections, json, sys
opened = collections.Counter()
def note(event, arguments):
    name = str(arguments[0]).rpartition("/")[2] if event == "open" else ""
    if name.endswith((".plan.toml", ".device.toml", ".model.toml")):
        opened[name] += 1
sys.addaudithook(note)
from pi2.cli.main import run
for command in json.loads(sys.argv[1]):
    opened.clear()
    run(command)
    print(sorted(opened.items()), file=sys.stderr)
"""
PLAN = str(ROOT / "plans/demo-two-units.plan.toml")
DOCUMENTS = (
    "[('demo-two-units.plan.toml', 1), ('demo.plan.toml', 1), ('host-two-units.device.toml', 1), "
    "('host.device.toml', 1), ('pi2-demo.model.toml', 1)]"
)


def test_a_command_reads_each_document_once() -> None:
    given = ["run", PLAN, "--prompt", "def ", "--max-tokens", "2"]
    text = str(ROOT / "README.md")
    commands = [
        given,
        [*given, "--memory", "150 MiB"],
        [*given, "--set", "io.threads=2"],
        ["chat", PLAN],
        ["evaluate", PLAN, "--text", text, "--windows", "1", "--context", "32"],
    ]
    chosen = json.dumps([[*command, "--set", 'backends.cpu="reference"'] for command in commands])
    done = start_python("-c", COUNT, chosen, input="hello\n")
    said = [line for line in done.stderr.splitlines() if "plan.toml', " in line]
    assert said == [DOCUMENTS] * len(commands), done.stderr
