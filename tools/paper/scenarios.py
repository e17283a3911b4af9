"""Simulation inputs for the settings of the paper: shipped plans, and rivals as their variants.

Nothing here is a rate or a time: only what runs where, and how much memory it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pi2.costs.activations import Hotness
from pi2.costs.activity import LayerActivity, unite_activity
from pi2.costs.constants import Constants
from pi2.costs.description import Description, LayerKind
from pi2.costs.flash import Flash
from pi2.costs.paging import find_page_faults
from pi2.costs.reads import block_reads
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.resolve import load_plan
from pi2.simulate import read_inputs

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


def read_scenario(scenario: Scenario, constants: Constants | None = None) -> Description:
    """Describe a scenario; ``UserError`` names what the device lacks."""
    found = SYSTEMS[scenario.system](scenario, constants or Constants())
    if scenario.batch > 1:
        kinds = tuple(
            replace(kind, activity=unite_activity(kind.activity, scenario.batch))
            for kind in found.kinds
        )
        settings = replace(found.settings, batch=scenario.batch)
        found = replace(found, kinds=kinds, settings=settings)
    return replace(found, name=f"{scenario.system}: {found.name}")


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


def _read(scenario: Scenario, constants: Constants) -> Description:
    memory = "half" if scenario.memory == "half" else "full"
    model = SAME_SHAPE.get(scenario.model, scenario.model)
    found = read_inputs(load_shipped(scenario.device, model, memory), constants=constants)
    if model == scenario.model:
        return found
    found = replace(found, name=f"{scenario.model} as {found.name}", is_smooth=True)
    return _activate(found, Hotness(active=SILU_ACTIVE, spread=constants.smooth_spread))


def _activate(found: Description, named: Hotness) -> Description:
    """The same with other neurons that a token computes."""
    kinds = (
        replace(kind, activity=replace(kind.activity, named=named, opened=1.0, fired=1.0))
        for kind in found.kinds
    )
    return replace(found, kinds=tuple(kinds))


def _compute_all(found: Description) -> Description:
    """No predictor: every neuron is computed."""
    sizes = replace(found.sizes, predictor=0.0, predictors=0, predictor_weights=0)
    settings = replace(found.settings, predictor="none", reads=None)
    named = Hotness(active=1.0, spread=0.0)
    return replace(_activate(found, named), sizes=sizes, settings=settings)


def _use_cpu_only(found: Description) -> Description:
    kinds = tuple(replace(kind, dense=0.0) for kind in found.kinds)
    settings = replace(found.settings, attention_share=0.0, head_share=0.0)
    rates = replace(found.rates, dense=None)
    return replace(found, rates=rates, settings=settings, kinds=kinds)


def _keep(found: Description, *, dense: float, hot: float, cold: float) -> Description:
    kinds = (replace(kind, dense=dense, hot=hot, cold=cold) for kind in found.kinds)
    return replace(found, kinds=tuple(kinds))


def _find_flash(found: Description) -> Flash:
    assert found.rates.flash is not None
    return found.rates.flash


def _find_activity(found: Description) -> LayerActivity:
    (kind,) = found.kinds
    return kind.activity


def _count_neurons(found: Description) -> float:
    return float(found.layers * _find_activity(found).neurons)


def make_powerinfer2(scenario: Scenario, constants: Constants) -> Description:
    """PowerInfer-2: the shipped plan; with a budget, memory as the paper counts it."""
    found = _read(scenario, constants)
    budget = _find_budget(scenario, found)
    if budget is None:
        return found
    free = budget - sum(PAPER_FIXED.values())
    return _keep_share(found, max(free, 0.0) / PAPER_NEURON_BYTES / _count_neurons(found))


def _find_budget(scenario: Scenario, found: Description) -> float | None:
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
    return fixed + share * _count_neurons(found) * found.sizes.whole_neuron


def _keep_share(found: Description, share: float) -> Description:
    """Keep a share of all neurons: hot ones, and a small cache for the cold."""
    share = min(share, 1.0)
    hot = max(share - COLD_SHARE, share / 2)
    return _keep(found, dense=min(hot, LARGEST_DENSE_SHARE), hot=hot, cold=share - hot)


def make_powerinfer2_cpu(scenario: Scenario, constants: Constants) -> Description:
    """PowerInfer-2 without the NPU: version 1 of the paper, and the ablation's third step."""
    return _use_cpu_only(make_powerinfer2(scenario, constants))


def _block(found: Description, threads: int) -> Description:
    """Read all that a layer misses, then compute."""
    size = found.sizes.stride
    experts = max(found.sizes.experts, 1)
    blocking = block_reads(
        _find_flash(found),
        size,
        _find_activity(found).neurons // experts * size,
        threads,
        found.rates.constants,
        kept=any(kind.cold > 0.0 for kind in found.kinds),
    )
    settings = replace(
        found.settings, pipeline="layer-barrier", blocking=blocking, reads=None, policy="lru"
    )
    return replace(found, settings=settings)


def make_bundles_only(scenario: Scenario, constants: Constants) -> Description:
    """The ablation's first step: bundles are read for every active neuron, none is kept."""
    found = _use_cpu_only(_read(scenario, constants))
    return _block(_keep(found, dense=0.0, hot=0.0, cold=0.0), ABLATION_READERS)


def make_cache_only(scenario: Scenario, constants: Constants) -> Description:
    """The ablation's second step: the neuron cache, still waiting for every layer's reads."""
    return _block(make_powerinfer2_cpu(scenario, constants), ABLATION_READERS)


def make_llmflash(scenario: Scenario, constants: Constants) -> Description:
    """LLM in a flash: CPU, a window of recent neurons, bundles as they lie in the file.

    Its scales lie in the bundles and are cached with them.
    """
    found = _use_cpu_only(_read(scenario, constants))
    neurons, size = _count_neurons(found), found.sizes.whole_neuron
    budget = _find_budget(scenario, found)
    if budget is not None:
        cold = (budget - sum(PAPER_FIXED.values()) + PAPER_FIXED["scales"]) / size / neurons
    else:
        cold = {"half": 0.5, "full": 1.0}[str(scenario.memory)]
    return _block(_keep(found, dense=0.0, hot=0.0, cold=min(cold, 1.0)), LLMFLASH_READERS)


def make_llama_cpp(scenario: Scenario, constants: Constants) -> Description:
    """llama.cpp: dense, on the CPU, weights mapped."""
    found = _compute_all(_use_cpu_only(_read(scenario, constants)))
    sizes, activity = found.sizes, _find_activity(found)
    dense = found.layers * sizes.projections + sizes.head
    ffn = _count_neurons(found) * sizes.whole_neuron
    if isinstance(scenario.memory, str):
        quarter = scenario.model == MIXTRAL and scenario.device == "oneplus-ace-2"
        share = {"half": 0.25 if quarter else 0.5, "full": 1.0}[scenario.memory]
        pages = dense + share * ffn
    else:
        kv = found.layers * sizes.kv_token * CONTEXT
        pages = scenario.memory * GIGA - PAPER_FIXED["runtime"] - kv
    faults = find_page_faults(
        _find_flash(found),
        sizes,
        constants,
        layers=found.layers,
        neurons=activity.neurons,
        chosen=activity.chosen,
        capacity_bytes=pages + 1,
    )
    return replace(found, settings=replace(found.settings, pipeline="mmap", faults=faults))


def make_qnn(scenario: Scenario, constants: Constants) -> Description:
    """QNN: dense, on the NPU, layer after layer."""
    found = _compute_all(_read(scenario, constants))
    hot = 1.0 if scenario.memory == "full" else 0.5
    found = _keep(found, dense=1.0, hot=hot, cold=0.0)
    prompts = replace(found.prompts, reads_all=True, attention_too=True)
    if prompts.stream is not None:
        prompts = replace(
            prompts,
            stream=replace(prompts.stream, overlap=0.0),
            blocking_s=1.0 / constants.copy_bytes_s,
        )
    return replace(_block(found, 1), prompts=prompts)


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


def make_powerserve(scenario: Scenario, constants: Constants) -> Description:
    """PowerServe: dense, on the NPU, all layers in one graph, which is started once a token."""
    shape = DENSE_SHAPES[scenario.model]
    once = replace(constants, dense_launch_s=constants.dense_launch_s / shape.layers)
    found = make_qnn(replace(scenario, model="bamboo-7b"), once)
    old = found.sizes
    weights = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    sizes = replace(
        old,
        projections=round(old.projections * weights / old.projection_weights),
        projection_weights=weights,
        kv_token=4 * shape.kv_heads * shape.head_dim,
        head=round(old.head * shape.vocab * shape.hidden / (BAMBOO_VOCAB * old.hidden)),
        neuron=round(old.neuron * shape.hidden / old.hidden),
        whole_neuron=round(old.whole_neuron * shape.hidden / old.hidden),
        dense_neuron=round(old.dense_neuron * shape.hidden / old.hidden),
        neuron_weights=3 * shape.hidden,
        hidden=shape.hidden,
    )
    activity = replace(_find_activity(found), neurons=shape.ffn)
    kind = LayerKind(
        activity=activity, hot=1.0, cold=0.0, dense=1.0, layers=tuple(range(shape.layers))
    )
    prompts = replace(found.prompts, neuron_bytes=sizes.dense_neuron)
    return replace(found, name=scenario.model, sizes=sizes, kinds=(kind,), prompts=prompts)


SYSTEMS: Mapping[str, Callable[[Scenario, Constants], Description]] = {
    "PowerInfer-2": make_powerinfer2,
    "PowerInfer-2, CPU only": make_powerinfer2_cpu,
    "bundles": make_bundles_only,
    "bundles and cache": make_cache_only,
    "LLMFlash": make_llmflash,
    "llama.cpp": make_llama_cpp,
    "QNN": make_qnn,
    "PowerServe": make_powerserve,
}
