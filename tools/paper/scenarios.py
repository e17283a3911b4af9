"""Simulation inputs for the settings of the paper: shipped plans, and rivals as their variants.

Nothing here is a rate or a time: only what runs where, and how much memory it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.resolve import load_plan
from pi2.simulate.constants import Constants
from pi2.simulate.inputs import LayerChoice, SimulationInput
from pi2.simulate.reading import read_inputs

PLANS = Path(__file__).resolve().parents[2] / "plans"
GIGA = 10**9

LLMFLASH_READERS = 32
"""Reading threads of "LLM in a flash" (arXiv 2312.11514)."""
ABLATION_READERS = 5
"""Before the pipeline, the compute threads read what they miss."""
COLD_SHARE = 0.05
"""Cache for cold neurons, as a share of all neurons, where memory is counted as the paper does."""
LARGEST_DENSE_SHARE = 0.5
"""Share of a layer that the NPU computes at one sequence (7168 of 14336 neurons)."""

SAME_SHAPE = {"mistral-7b": "bamboo-7b"}
"""SiLU models run with the plan of a ReLU model of their shape."""
SILU_ACTIVE = 0.5
"""Neurons of a SiLU model that matter (PowerInfer-2, Table 6, after CATS and CHESS)."""

MIXTRAL = "turbosparse-mixtral-47b"
# The memory of TurboSparse-Mixtral-47B in the paper's text (sec 7.2.2), in bytes.
PAPER_FIXED = {"not FFN": 1.0e9, "predictors": 2.6e9, "scales": 2.7e9, "runtime": 0.3e9}
CONTEXT = 2048
"""Tokens that llama.cpp has room for."""
BAMBOO_VOCAB = 32000
PAPER_NEURON_BYTES = 6144
"""A cached neuron: three rows of 2 KB, their scales being always in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A system on a phone with a model."""

    system: str
    device: str
    model: str
    memory: str | float = "half"
    """``half`` or ``full``: FFN neurons in memory; a number: the whole budget in 1e9 bytes."""
    batch: int = 1
    """Sequences that generate at the same time."""


def read_scenario(scenario: Scenario, constants: Constants | None = None) -> SimulationInput:
    """Make the simulation's inputs; ``UserError`` names what the device lacks."""
    inputs = SYSTEMS[scenario.system](scenario, constants or Constants())
    inputs = replace(inputs, workload=replace(inputs.workload, batch=scenario.batch))
    return replace(inputs, name=f"{scenario.system}: {inputs.name}")


@lru_cache(maxsize=128)
def load_shipped(device: str, model: str, memory: str) -> ResolvedPlan:
    """The shipped plan of a model on a phone."""
    folder = PLANS / device
    names = {
        "half": (f"{model}-half.plan.toml", f"{model}.plan.toml"),
        "full": (f"{model}.plan.toml",),
    }[memory]
    path = next(folder / name for name in names if (folder / name).exists())
    return load_plan(path)


def _read(scenario: Scenario, constants: Constants) -> SimulationInput:
    memory = "half" if scenario.memory == "half" else "full"
    model = SAME_SHAPE.get(scenario.model, scenario.model)
    inputs = read_inputs(load_shipped(scenario.device, model, memory), constants)
    if model == scenario.model:
        return inputs
    smooth = replace(inputs.workload, active=SILU_ACTIVE, skew=constants.smooth_skew)
    return replace(inputs, name=f"{scenario.model} as {inputs.name}", workload=smooth)


def _change(inputs: SimulationInput, **settings: object) -> SimulationInput:
    return replace(inputs, choices=replace(inputs.choices, **settings))  # type: ignore[arg-type]


def _use_cpu_only(inputs: SimulationInput) -> SimulationInput:
    machine = inputs.machine
    layers = tuple(replace(layer, dense=0.0) for layer in inputs.choices.layers)
    return replace(
        _change(inputs, layers=layers),
        machine=replace(machine, dense_bytes_s=None, dense_ops_s=None, dense_power_w=None),
    )


def _keep(inputs: SimulationInput, *, dense: float, hot: float) -> tuple[LayerChoice, ...]:
    return (LayerChoice(dense=dense, hot=hot, count=inputs.workload.layers),)


def _count_neurons(inputs: SimulationInput) -> float:
    return float(inputs.workload.layers * inputs.workload.layer_neurons)


def make_powerinfer2(scenario: Scenario, constants: Constants) -> SimulationInput:
    """PowerInfer-2: the shipped plan; with a budget, memory as the paper counts it."""
    inputs = _change(_read(scenario, constants), phases=2, prefill_order="layers-first")
    budget = _find_budget(scenario, inputs)
    if budget is None:
        return inputs
    free = budget - sum(PAPER_FIXED.values())
    return _keep_share(inputs, max(free, 0.0) / PAPER_NEURON_BYTES / _count_neurons(inputs))


def _find_budget(scenario: Scenario, inputs: SimulationInput) -> float | None:
    """Bytes of memory where they are counted as the paper does; None where the plan says it.

    With half of the FFN in memory, scales included, the 47B takes 16.6 GB in all; Ace 2 has a
    quarter.
    """
    if not isinstance(scenario.memory, str):
        return scenario.memory * GIGA
    if scenario.memory == "full" or scenario.model != MIXTRAL:
        return None
    share = 0.25 if scenario.device == "oneplus-ace-2" else 0.5
    fixed = sum(PAPER_FIXED.values()) - PAPER_FIXED["scales"]
    return fixed + share * _count_neurons(inputs) * inputs.workload.neuron_bytes


def _keep_share(inputs: SimulationInput, share: float) -> SimulationInput:
    """Keep a share of all neurons: hot ones, and a small cache for the cold."""
    share = min(share, 1.0)
    hot = max(share - COLD_SHARE, share / 2)
    return _change(
        inputs,
        layers=_keep(inputs, dense=min(hot, LARGEST_DENSE_SHARE), hot=hot),
        cold_neurons=(share - hot) * _count_neurons(inputs),
    )


def make_powerinfer2_cpu(scenario: Scenario, constants: Constants) -> SimulationInput:
    """PowerInfer-2 without the NPU: version 1 of the paper, and the ablation's third step."""
    return _use_cpu_only(make_powerinfer2(scenario, constants))


def make_bundles_only(scenario: Scenario, constants: Constants) -> SimulationInput:
    """The ablation's first step: bundles are read for every active neuron, none is kept."""
    inputs = _use_cpu_only(_read(scenario, constants))
    return _change(
        inputs,
        policy="layer-barrier",
        phases=1,
        gate_read_bytes=inputs.choices.stride_bytes,
        rest_read_bytes=0,
        io_threads=ABLATION_READERS,
        layers=_keep(inputs, dense=0.0, hot=0.0),
        cold_neurons=0.0,
    )


def make_cache_only(scenario: Scenario, constants: Constants) -> SimulationInput:
    """The ablation's second step: the neuron cache, still waiting for every layer's reads."""
    bundles = make_bundles_only(scenario, constants)
    kept = make_powerinfer2_cpu(scenario, constants).choices
    return _change(bundles, layers=kept.layers, cold_neurons=kept.cold_neurons)


def make_llmflash(scenario: Scenario, constants: Constants) -> SimulationInput:
    """LLM in a flash: CPU, a window of recent neurons, bundles as they lie in the file.

    Its scales lie in the bundles and are cached with them.
    """
    bundles = make_bundles_only(scenario, constants)
    neurons, size = _count_neurons(bundles), bundles.workload.neuron_bytes
    budget = _find_budget(scenario, bundles)
    if budget is not None:
        cold = (budget - sum(PAPER_FIXED.values()) + PAPER_FIXED["scales"]) / size
    else:
        cold = neurons * {"half": 0.5, "full": 1.0}[str(scenario.memory)]
    return _change(bundles, cold_neurons=cold, io_threads=LLMFLASH_READERS)


def make_llama_cpp(scenario: Scenario, constants: Constants) -> SimulationInput:
    """llama.cpp: dense, on the CPU, weights mapped."""
    inputs = _use_cpu_only(_read(scenario, constants))
    workload = replace(inputs.workload, active=1.0, predictor_bytes=0.0)
    dense = workload.layers * workload.attention_bytes + workload.head_bytes
    ffn = _count_neurons(inputs) * workload.neuron_bytes
    if isinstance(scenario.memory, str):
        quarter = scenario.model == MIXTRAL and scenario.device == "oneplus-ace-2"
        share = {"half": 0.25 if quarter else 0.5, "full": 1.0}[scenario.memory]
        pages = dense + share * ffn
    else:
        kv = workload.layers * workload.kv_token_bytes * CONTEXT
        pages = scenario.memory * GIGA - PAPER_FIXED["runtime"] - kv
    return _change(
        replace(inputs, workload=workload),
        policy="mmap",
        predicted=False,
        page_cache_bytes=pages + 1,
    )


def make_qnn(scenario: Scenario, constants: Constants) -> SimulationInput:
    """QNN: dense, on the NPU, layer after layer."""
    inputs = _read(scenario, constants)
    workload = replace(inputs.workload, active=1.0, predictor_bytes=0.0)
    hot = 1.0 if scenario.memory == "full" else 0.5
    return _change(
        replace(inputs, workload=workload),
        policy="layer-barrier",
        phases=1,
        prefill_order="layers-first",
        predicted=False,
        layers=_keep(inputs, dense=1.0, hot=hot),
        cold_neurons=0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseShape:
    """Sizes of a dense model that is no document of its own."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


DENSE_SHAPES: Mapping[str, DenseShape] = {
    "llama-3.1-8b": DenseShape(
        layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
    ),
    "llama-3.2-1b": DenseShape(
        layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256
    ),
    "qwen2.5-3b": DenseShape(
        layers=36, hidden=2048, ffn=11008, heads=16, kv_heads=2, head_dim=128, vocab=151936
    ),
    "qwen2-0.5b": DenseShape(
        layers=24, hidden=896, ffn=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936
    ),
}


def make_powerserve(scenario: Scenario, constants: Constants) -> SimulationInput:
    """PowerServe: dense, on the NPU, all layers in one graph, which is started once a token."""
    shape = DENSE_SHAPES[scenario.model]
    inputs = make_qnn(replace(scenario, model="bamboo-7b"), constants)
    old = inputs.workload
    weights = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    workload = replace(
        old,
        layers=shape.layers,
        hidden=shape.hidden,
        ffn=shape.ffn,
        attention_bytes=old.attention_bytes * weights / old.attention_weights,
        attention_weights=weights,
        kv_token_bytes=4 * shape.kv_heads * shape.head_dim,
        head_bytes=old.head_bytes * shape.vocab * shape.hidden / (BAMBOO_VOCAB * old.hidden),
        neuron_bytes=old.neuron_bytes * shape.hidden / old.hidden,
        dense_neuron_bytes=old.dense_neuron_bytes * shape.hidden / old.hidden,
    )
    once = replace(constants, dense_launch_s=constants.dense_launch_s / shape.layers)
    inputs = replace(inputs, name=scenario.model, workload=workload, constants=once)
    return _change(inputs, layers=_keep(inputs, dense=1.0, hot=1.0))


SYSTEMS: Mapping[str, Callable[[Scenario, Constants], SimulationInput]] = {
    "PowerInfer-2": make_powerinfer2,
    "PowerInfer-2, CPU only": make_powerinfer2_cpu,
    "bundles": make_bundles_only,
    "bundles and cache": make_cache_only,
    "LLMFlash": make_llmflash,
    "llama.cpp": make_llama_cpp,
    "QNN": make_qnn,
    "PowerServe": make_powerserve,
}
