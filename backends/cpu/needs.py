"""Memory that the cpu backend needs in the segment ``workspace``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.backends.blocks.contract import PLANES
from pi2.backends.blocks.counting import MOST_LANES, ProgramSize, count_program
from pi2.backends.blocks.instructions import Planes
from pi2.backends.blocks.operands import Extent
from pi2.backends.cpu.weights import StoreWeights, describe_stored
from pi2.backends.kernels.isa import BLOCK_TOKENS, count_blocked_tile_bytes, count_blocks_bytes
from pi2.backends.kernels.spec import BLOCK_ROOM, KEPT, PANEL, PARTS, UNPACKED
from pi2.model.ffn import count_stored_cutoff_rows
from pi2.plan.arithmetic.sizes import count_chunk_tokens, count_stated_threads
from pi2.plan.arithmetic.units import KV_TOKENS, Need
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import ALIGNMENT, GROUP, round_up

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.documents.device import Device
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import Plan

PANEL_FLOATS = PANEL + PARTS
"""Floats of scratch per token: FFN neurons that a dense layer computes at once, and their bits."""
DENSE_FLOATS = (UNPACKED + KEPT) * 128
"""Numbers that a thread of the dense FFN has room for, in the program's scratch."""
SHARED_BYTES, SHARED_TOKEN_BYTES = 4 << 10, 2 * 4 * BLOCK_ROOM
"""Scratch of a compute thread for neurons that several tokens share, and for each of the tokens,
which lists slots and rows."""
UNPACKED_ROWS_BYTES = 10
"""Bytes of scratch for every thread and element of a row: eight rows with their scales, unpacked
for several tokens on cores with i8mm."""
SMALL_BYTES = 16 << 10
"""Alignment, counters, and the predictor's inner vector."""
UNKNOWN_THREADS = 32
"""Compute threads that are assumed where neither plan nor device states them."""


def need_workspace(resolved: ResolvedPlan) -> Need:
    """Bytes of the program's arrays and of neurons'; of a processor that may have AMX, with its
    tiles."""
    stated = count_stated_threads(resolved)
    threads = stated or UNKNOWN_THREADS
    extent = describe_extent(resolved.plan, threads)
    program = count_stored(resolved.model, extent).segments["workspace"]
    neurons = _count_neurons(resolved, stated, threads)
    return Need(
        program + neurons,
        f"arrays of {count_chunk_tokens(resolved.plan)} tokens {approximate_bytes(program)}, "
        f"of neurons {approximate_bytes(neurons)}",
    )


def describe_extent(plan: Plan, threads: int) -> Extent:
    """What the program of a plan for a store computes at most."""
    own = plan.decode.batch_activations
    kinds = (plan.decode.activations, own or plan.decode.activations, plan.prefill.activations)
    return Extent(
        chunk=count_chunk_tokens(plan),
        step_tokens=plan.decode.step_tokens,
        context=plan.kv.context,
        sequences=plan.decode.batch,
        kv=plan.kv.type,
        threads=threads,
        planes=Planes(*(PLANES[kind] for kind in kinds)),
        predicts=True,
        outside=True,
        scratch_bytes=4 * DENSE_FLOATS,
    )


def count_stored(model: Model, extent: Extent, lanes: int = MOST_LANES) -> ProgramSize:
    """Size of the program that stops at FFNs, with all that it shares with neurons."""
    if (extent, lanes) not in model.derived:
        stored, tensors = describe_stored(model), {own.name: own for own in model.dense_tensors}
        found = count_program(stored, StoreWeights(stored, tensors), extent, lanes)
        model.derived[extent, lanes] = found
    known: ProgramSize = model.derived[extent, lanes]
    return known


def _count_neurons(resolved: ResolvedPlan, stated: int | None, threads: int) -> int:
    plan, model = resolved.plan, resolved.model
    chunk, width = count_chunk_tokens(plan), model.stored_neuron_width
    planes = _count_planes(plan)
    inputs = width * planes + width // GROUP * _count_group_bytes(plan)
    total = chunk * (inputs + 4 * width + 4 * PANEL_FLOATS + 4)
    if model.ffn.sub_norm:
        total += 4 * chunk + ALIGNMENT
    if model.cut_layers:
        total += 4 * chunk * (1 + count_stored_cutoff_rows(model)) + 2 * ALIGNMENT
    # Rows of scales of gathered neurons.
    total += 8 * model.layer_neurons if resolved.bundle.scales_stride else 0
    total += 32 * model.layer_neurons
    total += (plan.decode.step_tokens - 1) * 8 * round_up(model.layer_neurons, KV_TOKENS)
    if model.predictor is not None:
        rank = model.predictor.rank
        inner = rank * (4 + planes) + rank // GROUP * _count_group_bytes(plan)
        total += (plan.decode.step_tokens - 1) * inner
    if model.moe is not None:
        total += 4 * (chunk + model.layer_neurons)
    total += 4 * threads * width + SMALL_BYTES
    if model.ffn.sub_norm:
        total += 4 * threads * (1 + plan.decode.step_tokens) + 2 * ALIGNMENT
    if plan.decode.step_tokens > 1 and not model.is_smooth:
        # What several tokens share: a sum for each of them, and lists of a block of neurons.
        each = 4 * width + SHARED_TOKEN_BYTES
        total += threads * (plan.decode.step_tokens * each + SHARED_BYTES)
    unpacked = [0]
    if _may_pair_tokens(resolved.device):
        unpacked.append(chunk % 2 * (inputs + 4 * width) + threads * UNPACKED_ROWS_BYTES * width)
    if _may_use_tiles(resolved.device):
        # Of a machine of which nothing is known, a run uses as many threads as this has room for.
        counted = 1 if stated is None and len(unpacked) > 1 else threads
        blocks = round_up(chunk, BLOCK_TOKENS) // BLOCK_TOKENS
        own = blocks * count_blocks_bytes(width, planes)
        unpacked.append(own + counted * count_blocked_tile_bytes(width))
    return total + max(unpacked)


def count_chunk_bytes(resolved: ResolvedPlan) -> int:
    """Bytes of a chunk's content of the program's areas, and of its neurons' input and sum."""
    plan, model = resolved.plan, resolved.model
    width, own = model.stored_neuron_width, count_stored(model, describe_extent(plan, 1)).kept
    own += width * (8 + _count_planes(plan)) + width // GROUP * _count_group_bytes(plan)
    own += 4 * model.ffn.sub_norm + 4 * (len(model.cut_layers) > 0)
    if model.moe is not None:
        own += 4 * model.expert_count
    # Every array is rounded up.
    return (count_chunk_tokens(plan) + 1) * own + 16 * ALIGNMENT


def _count_group_bytes(plan: Plan) -> int:
    """Bytes of a group of 32 inputs in addition to its codes: a scale, and sums of the codes."""
    return 8 if plan.decode.batch_activations is None else 12


def _count_planes(plan: Plan) -> int:
    return 4 if "fp32" in (plan.decode.activations, plan.prefill.activations) else 2


def _may_pair_tokens(device: Device) -> bool:
    """Whether kernels multiply tokens in pairs: with i8mm, which unstated features may include."""
    cpus = [unit for unit in device.units.values() if unit.kind == "cpu"]
    return any(
        "i8mm" in unit.features if unit.features is not None else unit.architecture != "x86-64"
        for unit in cpus
    )


def _may_use_tiles(device: Device) -> bool:
    """Whether kernels multiply many tokens in tiles: with AMX, stated or not."""
    cpus = [unit for unit in device.units.values() if unit.kind == "cpu"]
    return any(
        "amx-int8" in unit.features
        if unit.features is not None
        else unit.architecture in (None, "x86-64")
        for unit in cpus
    )
