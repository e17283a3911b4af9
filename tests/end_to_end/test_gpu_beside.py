"""The demo plan with a GPU beside the CPU: what the CPU alone computes, through every API that has
a device here.  PoCL and lavapipe are the processor in disguise: results count, times do not."""

import json
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.backends.gpu.kernels.specification import Api
from tests.helpers.gpu import require_launcher
from tests.helpers.programs import start_pi2
from tests.helpers.slow import GPU_APIS, mark_slow

ROOT = Path(__file__).parents[2]
ALONE = ROOT / "plans" / "demo.plan.toml"
BESIDE = ROOT / "plans" / "demo-opencl-beside.plan.toml"
EXACT = {
    "decode.activations": "fp32", "prefill.activations": "fp32", "kv.type": "fp32",
    "memory.segments.kv": "8 MiB", "memory.budget": "1 GiB",
}  # fmt: skip
"""Nothing is rounded, so that it does not matter which unit computes a neuron."""
TOKENS = 60
Mode = Literal["decode", "prefill"]
Result = tuple[F32, tuple[int, ...]]


@pytest.fixture(params=GPU_APIS)
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    api: Api = request.param
    require_launcher(api)
    plan = tmp_path / "beside.plan.toml"
    plan.write_text(
        f'extends = ["{os.path.relpath(BESIDE, tmp_path)}"]\nschema_version = 3\nname = "Beside"\n'
        f'device = "host-{api}"\nmodel = "pi2-demo"\n'
    )
    return plan


def compute(plan: Path, mode: Mode, settings: dict[str, Any]) -> Result:
    with pi2.load(plan, set=EXACT | settings) as model:
        logits = model.logits(model.encode(ALONE.read_text("utf-8"))[:TOKENS], mode=mode).copy()
        text = model.generate(
            "def read_lines(path):\n", max_tokens=24, temperature=0.0, ignore_eos=True
        )
        return logits, text.result.token_ids


@pytest.mark.parametrize(
    ("mode", "predictor", "prompts"),
    [
        ("decode", "gate", "gpu"),
        *map(mark_slow, [("prefill", "gate", "gpu"), ("prefill", "none", "cpu")]),
    ],
)
def test_both_compute_what_one_does(plan: Path, mode: Mode, predictor: str, prompts: str) -> None:
    settings = {"decode.predictor": predictor}
    alone, text = compute(ALONE, mode, settings)
    found, own = compute(plan, mode, settings | {"prefill.unit": prompts})
    errors = np.linalg.norm(found - alone, axis=1) / np.linalg.norm(alone, axis=1)
    assert errors.max() < 1e-4
    assert own == text


@pytest.mark.slow
def test_rows_of_projections_and_of_the_head_may_be_the_gpus(plan: Path) -> None:
    settings: dict[str, Any] = {"decode.predictor": "gate", "decode.batch": 2}
    settings["memory.segments.kv"] = "16 MiB"
    alone, text = compute(ALONE, "decode", settings)
    rows = {"gpu": 0.4, "cpu": 0.6}
    divided = {"projections.attention": rows, "projections.head": rows}
    found, own = compute(plan, "decode", settings | divided | {"units.gpu.on_failure": "stop"})
    errors = np.linalg.norm(found - alone, axis=1) / np.linalg.norm(alone, axis=1)
    assert errors.max() < 1e-4
    assert own == text


def test_a_run_tells_what_the_gpu_did_and_stays_within_its_budget(plan: Path) -> None:
    arguments = ["--prompt", "def ", "--json", "--max-tokens", "16", "--ignore-eos"]
    done = start_pi2("run", plan, *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["token_ids"]) == 16
    assert 0 < found["peak_rss_bytes"] <= found["budget_bytes"]
    gpu = found["units"]["gpu"]
    assert gpu["owned_share"] == 0.3 and gpu["busy_s"] > 0
    assert gpu["lost"] is None
