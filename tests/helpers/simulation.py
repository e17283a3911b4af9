"""A description of an invented phone and model, with round numbers."""

from __future__ import annotations

from math import inf
from typing import Any

from pi2.costs.activations import Hotness
from pi2.costs.activity import LayerActivity, make_hotness, unite_activity
from pi2.costs.constants import Constants, Flash, FlashPoint
from pi2.costs.description import Description, LayerKind
from pi2.costs.kernel_times import Linear
from pi2.costs.prompts import PromptSettings
from pi2.costs.rates import DenseUnit, Rates
from pi2.costs.reads import Phases, find_reads
from pi2.costs.settings import Settings, Stream
from pi2.costs.sizes import Sizes

KIB, MIB = 1024, 1024**2
STRIDE = 8 * KIB
MACHINE: dict[str, Any] = {
    "cpu_bytes_s": 40e9,
    "dense_bytes_s": 50e9,
    "shared_bytes_s": 60e9,
    "dense_ops_s": 1e13,
    "flash": None,
    "cpu_power_w": 4.0,
    "power_w": 5.0,
}
WORKLOAD: dict[str, Any] = {
    "layers": 8,
    "ffn": 14336,
    "experts": 1,
    "active_experts": 1,
    "kv_token_bytes": 4096,
    "predictor_bytes": 13_000_000,
    "active": 0.15,
    "skew": 0.4,
    "batch": 1,
}
CHOICES: dict[str, Any] = {
    "phases": 2,
    "cluster": 64,
    "reads_all": True,
    "together": 512,
    "compute_threads": 5,
    "cold_neurons": None,
    "predictor": "low-rank",
    "look_ahead": "none",
    "cache": "lru",
}


def make_flash(random_mb_s: float = 1000.0, sequential_mb_s: float = 4000.0) -> Flash:
    return Flash(
        points=(
            FlashPoint(
                pattern="random",
                block_bytes=4 * KIB,
                rate_bytes_s=random_mb_s * 1e6,
                range_bytes=128 * MIB,
            ),
            FlashPoint(
                pattern="random",
                block_bytes=4 * KIB,
                rate_bytes_s=random_mb_s * 0.8e6,
                range_bytes=512 * MIB,
            ),
            FlashPoint(pattern="random", block_bytes=512 * KIB, rate_bytes_s=random_mb_s * 3.5e6),
            FlashPoint(
                pattern="sequential", block_bytes=4 * KIB, rate_bytes_s=sequential_mb_s * 1.1e5
            ),
            FlashPoint(
                pattern="sequential", block_bytes=512 * KIB, rate_bytes_s=sequential_mb_s * 1e6
            ),
        ),
        latency_s=70e-6,
        reader_penalty=0.4,
        block_bytes=4 * KIB,
    )


def make_inputs(
    *,
    machine: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    choices: dict[str, Any] | None = None,
    hot: float = 0.4,
    dense: float | None = None,
    constants: Constants | None = None,
) -> Description:
    """A 7B-like model of 8 layers; half of its neurons are in memory.  Names of ``machine``,
    ``workload`` and ``choices`` are those above, which they replace."""
    chosen = constants or Constants()
    rates = make_rates(MACHINE | (machine or {}), chosen)
    work, settings = WORKLOAD | (workload or {}), CHOICES | (choices or {})
    neurons, share = work["ffn"] * work["experts"], work["active_experts"] / work["experts"]
    sizes = make_sizes(work)
    cold = settings["cold_neurons"]
    cold = 0.1 * work["layers"] * 14336 if cold is None else cold
    activity = LayerActivity(
        named=make_hotness(work["active"], work["skew"]), chosen=share, neurons=neurons
    )
    kind = LayerKind(
        activity=unite_activity(activity, work["batch"]),
        hot=hot,
        cold=min(cold / work["layers"] / neurons, 1.0 - hot),
        dense=(min(hot, 0.5) if dense is None else dense) if rates.dense is not None else 0.0,
        layers=tuple(range(work["layers"])),
        routing=LayerActivity(named=Hotness(active=share, spread=0.0), chosen=1.0, neurons=neurons)
        if share < 1.0
        else None,
    )
    return Description(
        name="test",
        digest="0" * 64,
        rates=rates,
        sizes=sizes,
        settings=make_settings(work, settings, rates, hot),
        prompts=make_prompts(settings, rates, work, hot),
        kinds=(kind,),
    )


def make_rates(machine: dict[str, Any], constants: Constants) -> Rates:
    """Rates of a device whose kernels nobody measured."""
    cpu, barrier_s = machine["cpu_bytes_s"], constants.barrier_s
    plain = Linear(call_s=barrier_s, bytes_s=cpu)
    gather = Linear(call_s=barrier_s, bytes_s=cpu * constants.gather_efficiency)
    dense = None
    if machine["dense_bytes_s"] is not None:
        dense = DenseUnit(
            name="npu",
            bytes_s=machine["dense_bytes_s"],
            launch_s=constants.dense_launch_s,
            ops_s=machine["dense_ops_s"],
        )
    return Rates(
        measured=False,
        cores=8,
        bandwidth_bytes_s=cpu,
        multiply=plain,
        project=plain,
        attend=Linear(call_s=0.0, bytes_s=cpu),
        predict=plain,
        gather=gather,
        gate=plain,
        open=gather,
        norm_s=barrier_s,
        route_s=0.0,
        python_s=0.0,
        token_s=0.0,
        look_up=Linear(call_s=barrier_s, bytes_s=inf),
        place_s=0.0,
        room_s=constants.place_s,
        touch_s=0.0,
        find_s=0.0,
        find_hot_s=0.0,
        wake_s=0.0,
        dense_many=None,
        project_many=None,
        few_ops_s=None,
        shared_bytes_s=machine["shared_bytes_s"],
        dense=dense,
        flash=machine["flash"] or make_flash(),
        power_w=machine["cpu_power_w"],
        both_w=machine["power_w"],
        constants=constants,
    )


def make_sizes(work: dict[str, Any]) -> Sizes:
    """Sizes of a layer 4096 wide, in int4 with scales for groups of 32."""
    return Sizes(
        projections=24_000_000,
        kv_token=work["kv_token_bytes"],
        predictor=work["predictor_bytes"],
        predictors=1,
        experts=work["experts"] if work["experts"] > 1 else 0,
        neuron=6912,
        whole_neuron=6912,
        dense_neuron=6144,
        stride=STRIDE,
        head=70_000_000,
        head_weights=32000 * 4096,
        predictor_weights=0,
        neuron_weights=3 * 4096,
        projection_weights=42_000_000,
        hidden=4096,
        is_gated=True,
    )


def make_settings(
    work: dict[str, Any], choices: dict[str, Any], rates: Rates, hot: float
) -> Settings:
    """Settings of a plan with two reads of each neuron, half of it each."""
    reads = stream = None
    assert rates.flash is not None
    extent = work["ffn"] * STRIDE
    if choices["predictor"] == "none":
        stream = Stream(byte_s=2.5e-10, overlap=1.0, neurons=512, stride=STRIDE)
    elif hot < 1.0:
        half = Phases(gate_bytes=STRIDE // 2, open_share=rates.constants.up_down_share)
        reads = find_reads(
            rates.flash,
            STRIDE,
            extent,
            engine="io_uring",
            threads=1,
            depth=128,
            cluster=choices["cluster"],
            overlap=1.0,
            place_s=rates.room_s,
            phases=half if choices["phases"] == 2 else None,
            streams=True,
        )
    return Settings(
        predictor=choices["predictor"],
        kv="fp16",
        threads=choices["compute_threads"],
        look_ahead="none" if reads is None else choices["look_ahead"],
        policy=choices["cache"],
        reads=reads,
        stream=stream,
        position=0,
        attention_share=0.5 if rates.dense is not None else 0.0,
        head_share=0.5 if rates.dense is not None else 0.0,
        batch=work["batch"],
    )


def make_prompts(
    choices: dict[str, Any], rates: Rates, work: dict[str, Any], hot: float
) -> PromptSettings:
    """Prompts that the dense unit computes, in chunks of 128."""
    dense, constants = rates.dense, rates.constants
    ops_s = None if dense is None else dense.ops_s
    rate = None if ops_s is None else (0.0, 2.0 / ops_s)
    stream = Stream(byte_s=2.5e-10, overlap=1.0, neurons=work["ffn"] * work["experts"], stride=6912)
    return PromptSettings(
        unit="cpu" if dense is None else dense.name,
        chunk=128,
        together=choices["together"],
        context=4096,
        ffn=rate,
        project=rate,
        bytes_s=rates.bandwidth_bytes_s if dense is None else dense.bytes_s,
        launch_s=0.0 if dense is None else dense.launch_s,
        skips=False,
        reads_all=choices["reads_all"],
        stream=stream if hot < 1.0 else None,
        slowed=constants.streaming_compute_share,
        neuron_bytes=6912 if dense is None else 6144,
    )
