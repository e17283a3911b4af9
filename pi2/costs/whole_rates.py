"""Rates of a unit that has the whole model in its own memory, as a GPU's that computes alone.

The unit takes the processor's place in the description: attention, predictors, neurons and head
read its memory, nothing is looked up, and Python waits for one submission a token.  What a step
takes is the bytes that it reads at the rate of the unit's memory, and a fixed time for every
kernel: a chain of small kernels, recorded once and replayed.

Prompts have no rate: what device documents state is the arithmetic of matrix units, which pi2's
kernels do not use.
"""

from __future__ import annotations

from pi2.costs.constants import Constants
from pi2.costs.figures import Figure
from pi2.costs.kernel_times import Linear
from pi2.costs.rates import MISSING_FIGURE, Rates
from pi2.diagnostics import UserError
from pi2.plan.documents.device import Device, Unit

ATTENTION_KERNELS = 6
"""Norm, projections of queries, keys and values, keeping keys, scores, mixing, output."""
FFN_KERNELS = 3
"""Activations of all neurons, sums of parts, and their join."""
NAMED_KERNELS = 4
"""The same for neurons that a predictor names, and the list of their places."""
ROUTER_KERNELS = 8
"""Scores, softmax, choice, weights, their sum and scale, gathering, and adding up."""
LAST_KERNELS = 2
"""Norm and head; with the embedding, three a token."""


def read_whole_rates(device: Device, name: str, constants: Constants | None = None) -> Rates:
    """Collect what the device states of the unit ``name``; ``UserError`` P351 without the rate of
    its memory."""
    constants = constants or Constants()
    unit = device.units[name]
    bytes_s, figures, source = _find_memory_rate(device, name, unit, constants)
    is_metal = unit.architecture == "metal"
    kernel_s = constants.metal_kernel_s if is_metal else constants.recorded_kernel_s
    linear = Linear(call_s=kernel_s, bytes_s=bytes_s)
    gather = Linear(
        call_s=NAMED_KERNELS * kernel_s, bytes_s=constants.whole_gather_efficiency * bytes_s
    )
    return Rates(
        measured=False,
        whole_unit=name,
        cores=1,
        bandwidth_bytes_s=bytes_s,
        multiply=Linear(call_s=LAST_KERNELS * kernel_s, bytes_s=bytes_s),
        project=Linear(call_s=ATTENTION_KERNELS * kernel_s, bytes_s=bytes_s),
        attend=Linear(call_s=0.0, bytes_s=bytes_s),
        predict=linear,
        gather=gather,
        gate=linear,
        open=gather,
        norm_s=kernel_s,
        route_s=ROUTER_KERNELS * kernel_s,
        token_s=constants.submit_s + kernel_s,
        shared_bytes_s=bytes_s,
        power_w=None if unit.power is None else float(unit.power.value),
        both_w=None if unit.power is None else float(unit.power.value),
        sources={f"{name} bandwidth": source},
        figures=tuple(figures),
        constants=constants,
    )


def _find_memory_rate(
    device: Device, name: str, unit: Unit, constants: Constants
) -> tuple[float, list[Figure], str]:
    """Bytes per second that the unit reads of its memory, or of main memory where it has none."""
    own, where = unit.memory, f"units.{name}.memory"
    measured = own.read_bandwidth if own is not None else unit.read_bandwidth
    peak = own.peak_bandwidth if own is not None else device.memory.peak_bandwidth
    if measured is not None:
        figure = Figure(
            name=f"{where}.read_bandwidth" if own is not None else f"units.{name}.read_bandwidth",
            status=measured.status,
            source=measured.source,
        )
        return float(measured.value), [figure], f"{measured.status}: {measured.source}"
    if peak is None:
        raise UserError.of(
            MISSING_FIGURE,
            f"the device {device.id!r} has no figure {where}.read_bandwidth",
            help="measure it with `pi2 probe`, or state its peak_bandwidth, from which it is "
            "estimated",
        )
    share = constants.dense_of_peak if own is None else constants.card_of_peak
    origin = f"{share:.0%} of its memory's peak"
    figure = Figure(name=f"{where}.peak_bandwidth", status="estimated", source=origin)
    return share * float(peak.value), [figure], f"estimated: {origin}"
