"""The demo plan with an emulated NPU as a user runs it."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pi2
from pi2.engine.loaded_model import LoadedModel
from tests.helpers.hexagon import require_emulator
from tests.helpers.programs import Ask, start_pi2
from tests.helpers.slow import keep_quick

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "plans" / "demo-npu.plan.toml"
ALONE = ROOT / "plans" / "demo.plan.toml"
BATCHES: Mapping[str, object] = {
    "decode.batch": 2,
    "layers.batches": [{"sequences": 2, "split": {"npu": 0.5, "cpu": 0.5}}],
    "layers.hot": 0.5,
    "kv.context": 256,
}


@pytest.fixture(autouse=True)
def emulator() -> None:
    require_emulator()


@pytest.mark.parametrize("form", keep_quick(["text", "json"], ["text"]))
def test_a_run_says_that_the_npu_is_emulated_and_how_much_was_padding(form: str, ask: Ask) -> None:
    arguments = ["run", str(PLAN), "--prompt", "def read_lines(path):", "--max-tokens", "4"]
    if form == "text":
        said = ask(arguments).err
        assert "npu (emulated) owns 30% of the neurons" in said
        assert "of its work was padding" in said
    else:
        found: dict[str, Any] = json.loads(ask([*arguments, "--json"]).out)
        assert found["units"]["npu"]["emulated"] is True
        assert 0 < found["units"]["npu"]["padding"] < 0.9


@pytest.mark.slow
def test_its_arithmetic_hardly_changes_the_perplexity(tmp_path: Path) -> None:
    """Within 0.5 % of the CPU's, every neuron of the text computed by the NPU."""
    dense = tmp_path / "dense.plan.toml"
    dense.write_text(
        f'extends = ["{os.path.relpath(PLAN, tmp_path)}"]\nschema_version = 3\n'
        'name = "Dense"\ndevice = "host-npu"\nmodel = "pi2-demo"\n[decode]\npredictor = "none"\n'
    )
    text = ROOT / "plans" / "stores" / "pi2-demo" / "heldout.txt"
    arguments = ["evaluate", str(ALONE), "--text", str(text), "--windows", "2", "--json"]
    arguments += ["--context", "256"]
    done = start_pi2(*arguments, "--set", 'decode.predictor="none"', "--against", str(dense))
    assert done.returncode == 0, done.stderr
    alone, npu = json.loads(done.stdout)["runs"]
    assert npu["name"] == "dense.plan.toml" and npu["perplexity"] != alone["perplexity"]
    assert abs(npu["perplexity"] / alone["perplexity"] - 1) < 0.005


def find_worker(model: LoadedModel) -> subprocess.Popen[bytes]:
    unit: Any = model._parts.feed_forward.shares.units["npu"].unit
    worker: subprocess.Popen[bytes] = unit._session.process
    return worker


def test_another_batch_takes_other_graphs_and_loads_nothing() -> None:
    """A step of two sequences computes half of each layer on the NPU, a step of one 30 %."""
    settings = {"memory.units.npu.budget": "16 MiB", "memory.budget": "192 MiB"}
    settings |= {"memory.segments.workspace": "8 MiB", "memory.segments.hot": "2 MiB"}
    seen: list[str] = []
    with pi2.load(PLAN, set={**BATCHES, **settings}) as model:
        worker = find_worker(model)
        unit: Any = model._parts.feed_forward.shares.units["npu"].unit
        list(model.generate("def ", max_tokens=2, temperature=0.0))
        unit.observe(lambda name, start_s, end_s: seen.append(name))
        read_bytes = model.stats.flash_read_bytes
        list(model.generate("def ", max_tokens=3, temperature=0.0))
        one = set(seen)
        seen.clear()
        list(model.generate_batch(["def ", "class "], max_tokens=3, temperature=0.0))
        assert find_worker(model) is worker
        assert worker.poll() is None
        assert model.stats.flash_read_bytes - read_bytes < 32 << 20
    assert any("307 kept neurons (ffn_1x320" in name for name in one)
    assert any("512 kept neurons (ffn_" in name for name in seen)
    assert not any("(ffn_1x320" in name and "512 kept" in name for name in seen)


def test_a_run_goes_on_without_a_lost_npu_and_says_so() -> None:
    with pi2.load(PLAN) as model:
        generation = model.generate("def ", max_tokens=12, temperature=0.0)
        next(iter(generation))
        os.kill(find_worker(model).pid, signal.SIGKILL)
        list(generation)
        assert "process has ended" in model.lost_units["npu"]
        assert generation.result.finish_reason == "length"


def test_without_the_emulator_it_says_what_to_install(tmp_path: Path) -> None:
    """A folder with what the kernels' linking needs, and nothing else."""
    if (program := shutil.which("ld.lld")) is not None:
        (tmp_path / "ld.lld").symlink_to(program)
    environment = os.environ | {"PATH": str(tmp_path)}
    done = start_pi2("run", PLAN, "--prompt", "x", "--max-tokens", "1", env=environment)
    assert done.returncode == 2 and "P320" in done.stderr
    assert "apt install qemu-user" in done.stderr
