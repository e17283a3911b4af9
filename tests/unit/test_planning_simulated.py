"""A machine that was probed, simulated: its own figures stand in for constants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pi2.costs.cost import cost_resolved
from pi2.costs.rates import read_rates
from pi2.fitting.check import load_plan
from pi2.fitting.completion import resolve_values
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.planning.wish import Wish, read_document
from pi2.simulate import read_inputs, simulate

MIB = 1 << 20
HALF = Path(__file__).parents[2] / "plans/oneplus-12/bamboo-7b-half.plan.toml"
ORIGIN = {"status": "estimated", "source": "a test"}


def make_device(overlap: float, read_s: float = 20e-6) -> Device:
    """Two cores at 20 GB/s, with kernels a bit below, and reads of 8 KiB."""

    def kernel(name: str, size: int, time_us: float, size_bytes: int | None = None) -> Any:
        found = {"kernel": name, "size": size, "time": f"{time_us} us", **ORIGIN}
        return found if size_bytes is None else {**found, "bytes": f"{size_bytes} B"}

    def rate(**settings: Any) -> Any:
        return {"overlap": overlap, **settings, **ORIGIN}

    cpu = {
        "kind": "cpu",
        "clusters": [{"id": "cores", "cores": 2}],
        "read_bandwidth": {"value": "20 GB/s", **ORIGIN},
        "kernels": [
            kernel("multiply", 32000, 7000, 136 << 20),
            kernel("project", 10240, 1200, 23 << 20),
            kernel("attend", 2048, 450, 8 << 20),
            kernel("predict", 14336, 560, 10 << 20),
            kernel("gather", 64, 50, 64 * 6912),
            kernel("gather", 2048, 1020, 2048 * 6912),
            kernel("norm", 4096, 12),
            kernel("look-up", 0, 60),
            kernel("look-up", 128, 140),
        ],
    }
    reads = [
        rate(pattern="sequential", block="4 MiB", rate="1 GB/s", threads=1),
        rate(
            pattern="random",
            block="8 KiB",
            rate=f"{round(8192 / read_s)} B/s",
            depth=128,
            threads=1,
        ),
    ]
    values = {
        "schema_version": 2,
        "id": "box",
        "units": {"cpu": cpu},
        "storage": {"block_size": "512 B", "latency": "70 us", "reads": reads},
    }
    return Device.model_validate_json(json.dumps(values))


def predict(device: Device) -> tuple[float, float]:
    """Tokens per second by the cost model and by the simulator."""
    model = read_document("bamboo-7b", "model").document
    assert isinstance(model, Model)
    segments = {"runtime": 160, "attention": 1000, "kv": 128, "predictor": 420, "workspace": 64}
    values = {
        "schema_version": 2,
        "device": "box",
        "model": "bamboo-7b",
        "store": "stores/none",
        "memory": {
            "budget": "4 GiB",
            "segments": {key: f"{size} MiB" for key, size in segments.items()}
            | {"hot": "1280 MiB", "cold": "400 MiB"},
        },
        "bundle": {"stride": "7168 B"},
        "layers": {"split": {"cpu": 1.0}, "hot": 0.4},
        "cache": {"policy": "lru"},  # what the simulator knows where nobody counted
        "kv": {"context": 1024},
    }
    resolved = resolve_values(values, device, model)
    unstored = replace(resolved, path=Path("none/box.plan.toml"))
    simulated = simulate(read_inputs(unstored), prompt_tokens=256, tokens=16)
    return cost_resolved(resolved, read_rates(device)).tokens_s, simulated.tokens_s


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_the_simulator_and_the_cost_model_agree_about_a_measured_machine(overlap: float) -> None:
    cost, simulated = predict(make_device(overlap))
    assert simulated == pytest.approx(cost, rel=0.15)


def test_what_reading_costs_the_cores_and_slower_reads_slow_a_machine_down() -> None:
    usual = predict(make_device(1.0))
    for worse in (predict(make_device(0.0)), predict(make_device(1.0, read_s=40e-6))):
        assert worse[0] < 0.95 * usual[0] and worse[1] < 0.95 * usual[1]


def test_a_phone_is_simulated_with_the_plans_cache() -> None:
    lfu, lru = (
        read_inputs(load_plan(HALF, overrides={"cache.policy": policy}))
        for policy in ("lfu", "lru")
    )
    assert (lfu.settings.policy, lru.settings.policy) == ("lfu", "lru")
    (kept,), (recent,) = lfu.kinds, lru.kinds
    assert kept.cold == recent.cold > 0.0
    missing = [
        kind.activity.count_missing(kind.hot, kind.cold, policy)
        for kind, policy in ((kept, lfu.settings.policy), (recent, lru.settings.policy))
    ]
    assert missing[0] < missing[1]
    speeds = [simulate(item, tokens=48).tokens_s for item in (lru, lfu)]
    assert speeds[0] < speeds[1] < 1.3 * speeds[0]


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("bamboo-7b", 3),
        ("bamboo-7b", 4),
        ("turbosparse-mixtral-47b", 7),
        ("turbosparse-mixtral-47b", 14),
    ],
)
def test_planner_and_simulator_agree_about_a_phone(name: str, memory: int) -> None:
    """Both take reads to fall into an expert's stretch of a layer's file, and the thread that reads
    to find room for what comes."""
    from pi2.planning.planner import plan

    device, model = (
        read_document(reference, kind).document  # type: ignore[arg-type]
        for reference, kind in (("oneplus-12", "device"), (name, "model"))
    )
    assert isinstance(device, Device) and isinstance(model, Model)
    planned = plan(Wish(device=device, model=model, memory_bytes=memory << 30))
    resolved = replace(planned.resolved, path=Path("none/a.plan.toml"))
    simulated = simulate(read_inputs(resolved), tokens=64).tokens_s
    assert simulated == pytest.approx(planned.cost.tokens_s, rel=0.1)
