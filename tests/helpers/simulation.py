"""Simulation inputs of an invented phone and model, with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pi2.simulate.constants import Constants
from pi2.simulate.flash import Flash, FlashPoint
from pi2.simulate.inputs import Choices, LayerChoice, Machine, SimulationInput, Workload

KIB, MIB = 1024, 1024**2


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
) -> SimulationInput:
    """A 7B-like model of 8 layers; half of its neurons are in memory."""
    layers = 8
    base = SimulationInput(
        name="test",
        digest="0" * 64,
        machine=Machine(
            cpu_bytes_s=40e9,
            dense_bytes_s=50e9,
            shared_bytes_s=60e9,
            cpu_ops_s=1e11,
            dense_ops_s=1e13,
            flash=make_flash(),
            io_core=None,
            cpu_power_w=4.0,
            dense_power_w=5.0,
            power_w=5.0,
        ),
        workload=Workload(
            layers=layers,
            hidden=4096,
            ffn=14336,
            experts=1,
            active_experts=1,
            attention_bytes=24e6,
            kv_token_bytes=4096,
            predictor_bytes=13e6,
            head_bytes=70e6,
            neuron_bytes=6912,
            dense_neuron_bytes=6144,
            attention_weights=42e6,
            active=0.15,
            skew=0.4,
        ),
        choices=Choices(
            policy="neuron-cluster",
            phases=2,
            cluster=64,
            prefill_order="layers-first",
            chunk=128,
            compute_threads=5,
            io_threads=1,
            cold_neurons=0.1 * layers * 14336,
            predicted=True,
            stride_bytes=8192,
            gate_read_bytes=4096,
            rest_read_bytes=4096,
            page_cache_bytes=1e9,
            layers=(
                LayerChoice(dense=min(hot, 0.5) if dense is None else dense, hot=hot, count=layers),
            ),
        ),
        constants=constants or Constants(),
    )
    return replace(
        base,
        machine=replace(base.machine, **(machine or {})),
        workload=replace(base.workload, **(workload or {})),
        choices=replace(base.choices, **(choices or {})),
    )
