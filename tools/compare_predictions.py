"""Compare the planner's expected numbers with the simulator's drawn ones over random plans.

    python tools/compare_predictions.py --cells 2000 --seed 1

Both take what steps cost from one description (`pi2.costs`).  The planner puts expected numbers of
neurons into it, the simulator numbers that it draws for each token and layer.  notes/planner.md has
the result of a large grid; a small one is part of the tests (tests/unit/test_one_cost_model.py).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pi2.costs.cost import cost_description, describe_plan
from pi2.diagnostics import UserError
from pi2.fitting.budget import Shortage, fit_plan
from pi2.fitting.check import check_file
from pi2.fitting.completion import resolve_values
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import round_up
from pi2.planning.wish import Wish, make_plan_values
from pi2.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
DEVICES = (
    *("oneplus-12", "oneplus-ace-2", "oneplus-ace-3", "galaxy-s24-ultra", "pixel-9"),
    *("cloud-vm-zen5", "x86-laptop", "raspberry-pi-5", "probed"),
)
MODELS = (
    *("bamboo-7b", "prosparse-llama-2-13b", "relullama-7b", "sparse-qwen2-7b"),
    *("mistral-7b", "qwen3-8b", "tinyllama-1.1b"),
    *("turbosparse-mixtral-47b", "mixtral-8x7b"),
)
PROMPTS = (32, 128, 512)
TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A plan out of the grid, by what it was made of."""

    device: str
    model: str
    predictor: str
    memory: float
    """Neurons in memory, as a share of all."""
    cache: float
    """Part of these that is a cache."""
    threads: int | None
    batch: int
    look_ahead: str
    policy: str
    dense: float
    """Part of the hot neurons that the NPU computes."""
    prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What both say of a cell."""

    cell: Cell
    predicted: float
    simulated: float

    @property
    def error(self) -> float:
        """Difference of generated tokens per second, in parts of the simulated ones."""
        return self.predicted / self.simulated - 1.0


def draw_cell(source: random.Random) -> Cell:
    """Any plan out of the grid."""
    name = source.choice(MODELS)
    model = read_model(name)
    modes = ["none"]
    if model.predictor is not None:
        modes += ["low-rank"] * 3
    if not model.is_smooth:
        modes += ["gate"]
    if model.moe is not None:
        modes += ["router"]
    device = source.choice(DEVICES)
    units = read_device(device).units
    dense = source.choice((0.0, 1.0, 0.6)) if "npu" in units and model.moe is None else 0.0
    predictor = source.choice(modes)
    return Cell(
        device=device,
        model=name,
        predictor=predictor,
        memory=source.choice((0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)),
        cache=source.choice((0.05, 0.1, 0.25, 0.5, 0.9)),
        threads=source.choice((None, None, 1, 2, 4, 5)),
        batch=source.choice((1, 1, 1, 2, 4)),
        look_ahead=source.choice(("none", "none", "attention", "layer"))
        if predictor in ("low-rank", "router")
        else "none",
        policy=source.choice(("lfu", "lru")),
        dense=dense,
        prompt=source.choice(PROMPTS),
    )


@lru_cache
def read_device(name: str) -> Device:
    """A shipped device, or the one of the tests that was probed."""
    path = ROOT / f"plans/devices/{name}.device.toml"
    if name == "probed":
        path = ROOT / "tests/unit/probed.device.toml"
    document = check_file(path).document
    assert isinstance(document, Device)
    return document


@lru_cache
def read_model(name: str) -> Model:
    """A shipped model."""
    document = check_file(ROOT / f"plans/models/{name}.model.toml").document
    assert isinstance(document, Model)
    return document


def make_plan(cell: Cell) -> ResolvedPlan:
    """The cell's plan, with as much memory as its shares need."""
    device, model = read_device(cell.device), read_model(cell.model)
    wish = Wish(device=device, model=model, context=1024, batch=cell.batch)
    block = device.storage.block_size or 4096
    bundle = model.lay_out_bundle(round_up(model.lay_out_bundle().used_bytes, block))
    values = make_plan_values(wish, predictor=cell.predictor, kv="fp16", chunk=128, bundle=bundle)
    hot = cell.memory * (1.0 - cell.cache) if cell.memory < 1.0 else 1.0
    hot = round(hot, 3)
    cpu = next(name for name, unit in device.units.items() if unit.kind == "cpu")
    values["layers"]["hot"] = hot
    if cell.dense > 0.0:
        share = round(min(cell.dense * hot, 0.7), 3)
        values["layers"]["split"] = {"npu": share, cpu: round(1.0 - share, 3)}
        values["prefill"]["unit"] = "npu"
        values["backends"] = {"cpu": "null", "npu": "null"}
    if cell.threads is not None:
        values["threads"] = {"compute": cell.threads}
    values["decode"]["look_ahead"] = cell.look_ahead
    values["cache"] = {"policy": cell.policy}
    values["memory"]["budget"] = "1 GiB"
    resolved = resolve_values(values, device, model)
    neurons = model.shape.layers * model.layer_neurons * bundle.stride
    cold = (
        0 if hot >= 1.0 else max(int(cell.memory * cell.cache * neurons), resolved.needs.cold.bytes)
    )
    return fit_plan(resolved, None, stated={"cold": cold})


def compare_cell(cell: Cell, tokens: int = TOKENS) -> Outcome | None:
    """What both say; None where the device states too little for such a plan."""
    try:
        resolved = make_plan(cell)
        position = 64 + tokens // 2
        description = describe_plan(resolved, position=position)
    except (UserError, Shortage):
        return None
    cost = cost_description(description, cell.prompt)
    found = simulate(description, prompt_tokens=cell.prompt, tokens=tokens)
    later = cell.prompt + (tokens - 1) / 2 - description.settings.position
    # Both at the same place of the context.
    moved = [kind.position_s * kind.count for kind in description.kinds]
    token_s = cost.token_s + later * sum(moved)
    return Outcome(cell=cell, predicted=cell.batch / token_s, simulated=found.tokens_s)


def run_grid(cells: int, seed: int, tokens: int = TOKENS) -> Iterator[Outcome]:
    """Outcomes of ``cells`` random plans."""
    source = random.Random(seed)
    count = 0
    while count < cells:
        outcome = compare_cell(draw_cell(source), tokens)
        if outcome is not None:
            count += 1
            yield outcome


def describe_errors(name: str, errors: Sequence[float]) -> str:
    """A row of the table."""
    sizes = sorted(abs(item) for item in errors)
    if not sizes:
        return f"| {name} | 0 | | | |"
    within = sum(item <= 0.1 for item in sizes) / len(sizes)
    mean = sum(sizes) / len(sizes)
    return f"| {name} | {len(sizes)} | {mean:.1%} | {within:.1%} | {sizes[-1]:.1%} |"


def main() -> None:
    """Print errors by kind of plan, and the worst cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--worst", type=int, default=5)
    arguments = parser.parse_args()
    found = list(run_grid(arguments.cells, arguments.seed, arguments.tokens))
    print("| cells | number | mean | within 10 % | worst |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print(describe_errors("generation, all", [item.error for item in found]))
    for field in ("device", "model", "predictor", "look_ahead", "batch", "threads"):
        values: dict[str, list[float]] = {}
        for item in found:
            values.setdefault(str(getattr(item.cell, field)), []).append(item.error)
        for value, errors in sorted(values.items()):
            print(describe_errors(f"{field} {value}", errors))
    for item in sorted(found, key=lambda item: -abs(item.error))[: arguments.worst]:
        print(
            f"{item.error:+.1%} {item.predicted:.4g} {item.simulated:.4g} {item.cell}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
