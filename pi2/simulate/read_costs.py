"""What single reads of a plan cost on its device's flash."""

from __future__ import annotations

from dataclasses import dataclass

from pi2.simulate.inputs import SimulationInput

_STREAM_BYTES = 512 * 1024
"""Block size of sequential streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """Seconds of one read among many, by block."""

    first_s: float
    """Time to read the gate, or the whole bundle."""
    rest_s: float
    """Time to read up and down."""
    sequential_byte_s: float
    """One byte of a long sequential read."""
    fault_byte_s: float
    """One byte of a mapped file, read ahead after page faults."""
    latency_s: float


def compute_read_costs(inputs: SimulationInput) -> ReadCosts:
    """Read costs of the plan's blocks within one expert's or layer's stretch of the file."""
    flash, choices, constants = inputs.machine.flash, inputs.choices, inputs.constants
    if flash is None:
        return ReadCosts(
            first_s=0.0, rest_s=0.0, sequential_byte_s=0.0, fault_byte_s=0.0, latency_s=0.0
        )
    extent = inputs.workload.ffn * choices.stride_bytes
    core = inputs.machine.io_core

    def time_block(size: int) -> float:
        if size == 0:
            return 0.0
        return flash.compute_read_s("random", size, range_bytes=extent, core=core)

    ahead = int(constants.readahead_bytes)
    long = max(_STREAM_BYTES, ahead)
    return ReadCosts(
        first_s=time_block(choices.gate_read_bytes),
        rest_s=time_block(choices.rest_read_bytes),
        sequential_byte_s=1.0 / flash.find_rate_bytes_s("sequential", long),
        # The kernel reads ahead while it maps the pages that have come: the slower one decides.
        fault_byte_s=max(
            1.0 / flash.find_rate_bytes_s("sequential", ahead), constants.page_fault_s / 4096
        ),
        latency_s=flash.latency_s,
    )
