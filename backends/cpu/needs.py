"""Memory that the cpu backend needs in the segment ``workspace``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.backends.executor import count_parts
from pi2.backends.kernels.isa import BLOCK_TOKENS, count_blocked_tile_bytes, count_blocks_bytes
from pi2.backends.kernels.mixing_layout import count_most_room
from pi2.backends.kernels.spec import BLOCK_ROOM, PANEL, PARTS, SPANS
from pi2.model.blocks import list_attention, list_turns
from pi2.model.ffn import count_stored_cutoff_rows
from pi2.model.states import describe_state
from pi2.plan.arithmetic.sizes import LOGIT_ROWS, count_chunk_tokens, count_stated_threads
from pi2.plan.arithmetic.units import KV_TOKENS, Need
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import ALIGNMENT, GROUP, fill_groups, round_up

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.documents.device import Device
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.model_mixing import Latent
    from pi2.plan.documents.plan import Plan

PANEL_FLOATS = PANEL + PARTS
"""Floats of scratch per token: FFN neurons that a dense layer computes at once, and their bits."""
THREAD_BYTES = 33 << 10
"""Scratch of a compute thread."""
SHARED_BYTES, SHARED_TOKEN_BYTES = 4 << 10, 2 * 4 * BLOCK_ROOM
"""Scratch of a compute thread for neurons that several tokens share, and for each of the tokens,
which lists slots and rows."""
UNPACKED_ROWS_BYTES = 10
"""Bytes of scratch for every thread and element of a row: eight rows with their scales, unpacked
for several tokens on cores with i8mm."""
SMALL_BYTES = 16 << 10
"""Alignment, counters, and the predictor's inner vector."""
UNKNOWN_THREADS = 64
"""Compute threads that are assumed where neither plan nor device states them."""


def need_workspace(resolved: ResolvedPlan) -> Need:
    """Bytes of activations, logits and tables; of a processor that may have AMX, with its tiles."""
    plan, model = resolved.plan, resolved.model
    shape, chunk = model.shape, count_chunk_tokens(plan)
    # Layers with other heads have room of their own.
    views = [own for own, _ in list_attention(model)]
    qkv = sum(own.projected for own in views)
    queries = sum(own.stored_query for own in views)

    group_bytes = _count_group_bytes(plan)
    inputs = (shape.stored_hidden + queries) * (4 + _count_planes(plan))
    inputs += (shape.stored_hidden + queries) // GROUP * group_bytes
    activations = chunk * (8 * shape.stored_hidden + inputs + 4 * qkv + 4 * PANEL_FLOATS + 4)
    state = describe_state(model)
    if state is not None:
        each = state.stored_width
        own = each * (4 + _count_planes(plan)) + each // GROUP * group_bytes
        activations += (chunk + 1) * (own + 4 * (state.entries + state.factors + state.ranks))
    if model.side_ffn is not None:
        each = fill_groups(model.side_width)
        own = each * (4 + _count_planes(plan)) + each // GROUP * group_bytes
        activations += (chunk + 1) * (own + 8 * model.side_width + 4 * shape.stored_hidden)
    activations += (chunk + 1) * _count_latent_experts(plan, model)
    if model.ffn.sub_norm:
        activations += 4 * chunk + ALIGNMENT
    if model.layer_embedding is not None:
        each = model.layer_embedding.stored_width
        own = each * (4 + _count_planes(plan)) + each // GROUP * group_bytes
        row = fill_groups(shape.layers * model.layer_embedding.width)
        activations += (chunk + 1) * (own + 4 * row)
        activations += chunk * _count_layer_inputs(model)
    if model.altup is not None:
        each = fill_groups(model.altup.laurel_rank)
        own = each * (4 + _count_planes(plan)) + each // GROUP * group_bytes
        activations += (chunk + 1) * own * len(views) + chunk * _count_streams(model)
        activations += min(chunk, LOGIT_ROWS) * _count_streams(model)
    if model.cut_layers:
        activations += 4 * chunk * (1 + count_stored_cutoff_rows(model)) + 2 * ALIGNMENT
    logits = 4 * min(chunk, LOGIT_ROWS) * shape.vocab
    turned = sum(width for _, width in list_turns(model))
    # Rows of scales of gathered neurons.
    rows = 8 * model.layer_neurons if resolved.bundle.scales_stride else 0
    latent = model.attention.latent
    tables = rows + 4 * plan.kv.context * turned + 32 * model.layer_neurons
    for view in views:
        summed = view.head_dim if latent is None else latent.rank
        tables += 4 * SPANS * view.heads * (summed + 2)
    if latent is not None:
        activations += (chunk + 1) * _need_latent(model, latent, _count_planes(plan), group_bytes)
    tables += (plan.decode.step_tokens - 1) * 8 * round_up(model.layer_neurons, KV_TOKENS)
    if model.attention.growth:
        tables += 4 * plan.kv.context * (1 + (model.attention.growth_layers is not None))
    if model.predictor is not None:
        rank = model.predictor.rank
        inner = rank * (4 + _count_planes(plan)) + rank // GROUP * group_bytes
        tables += (plan.decode.step_tokens - 1) * inner
    if _keeps_input(model):
        activations += chunk * 4 * shape.stored_hidden
    if model.moe is not None:
        activations += chunk * 4 * (model.expert_count + 1)
        tables += 4 * model.layer_neurons
    stated = count_stated_threads(resolved)
    threads = stated or UNKNOWN_THREADS
    scratch = THREAD_BYTES
    if latent is None:
        rooms = [count_most_room(view.heads // view.kv_heads, view.head_dim) for view in views]
        scratch = max(THREAD_BYTES, *rooms)
    parts = count_parts(threads) if model.moe is not None and model.is_smooth else 1
    sums = 4 * threads * model.stored_neuron_width
    tables += sums + max(0, (parts - 1) * sums - 4 * chunk * PANEL)
    tables += threads * scratch + SMALL_BYTES
    if model.ffn.sub_norm:
        tables += 4 * threads * (1 + plan.decode.step_tokens) + 2 * ALIGNMENT
    if plan.decode.step_tokens > 1 and not model.is_smooth:
        # What several tokens share: a sum for each of them, and lists of a block of neurons.
        each = 4 * model.stored_neuron_width + SHARED_TOKEN_BYTES
        tables += threads * (plan.decode.step_tokens * each + SHARED_BYTES)
    lengths, unpacked = _list_inputs(plan, model), [(0, 0)]
    if _may_pair_tokens(resolved.device):
        unpacked.append((chunk % 2 * inputs, threads * UNPACKED_ROWS_BYTES * sum(lengths)))
    if _may_use_tiles(resolved.device):
        # Of a machine of which nothing is known, a run uses as many threads as this has room for.
        counted = 1 if stated is None and len(unpacked) > 1 else threads
        blocks = round_up(chunk, BLOCK_TOKENS) // BLOCK_TOKENS
        tokens = sum(count_blocks_bytes(length, _count_planes(plan)) for length in lengths)
        tiles = sum(map(count_blocked_tile_bytes, lengths))
        unpacked.append((blocks * tokens, counted * tiles))
    of_tokens, of_rows = max(unpacked, key=sum)
    activations += of_tokens
    tables += of_rows
    return Need(
        activations + logits + tables,
        f"activations of {chunk} tokens {approximate_bytes(activations)}, logits "
        f"{approximate_bytes(logits)}, tables {approximate_bytes(tables)}",
    )


def _list_inputs(plan: Plan, model: Model) -> list[int]:
    shape, state, latent = model.shape, describe_state(model), model.attention.latent
    views = [own for own, _ in list_attention(model)]
    lengths = [shape.stored_hidden, *(own.stored_query for own in views)]
    if state is not None:
        lengths.append(state.stored_width)
    if model.side_ffn is not None:
        lengths.append(fill_groups(model.side_width))
    if _count_latent_experts(plan, model):
        lengths.append(model.stored_neuron_width)
    if latent is not None and latent.query_rank:
        lengths += [fill_groups(latent.query_rank)] * len(views)
    if model.layer_embedding is not None:
        lengths.append(model.layer_embedding.stored_width)
    if model.altup is not None:
        lengths += [fill_groups(model.altup.laurel_rank)] * len(views)
    return lengths


def _need_latent(model: Model, latent: Latent, planes: int, group_bytes: int) -> int:
    """Bytes of latent attention for each token: queries and their latents, the plain parts of
    heads, their queries of the KV latents, and the mixed latents."""
    heads, made = model.shape.heads, fill_groups(latent.query_rank or 0)
    vectors = made + heads * (fill_groups(latent.plain) + fill_groups(latent.rank))
    floats = heads * (latent.key + latent.kept)
    return vectors * (4 + planes) + vectors // GROUP * group_bytes + 4 * floats


def count_chunk_bytes(resolved: ResolvedPlan) -> int:
    """Bytes of the residual, the FFN sum and the input of projections of a chunk, d wide, of what
    routes experts, and of what layers have of their own."""
    plan, model = resolved.plan, resolved.model
    hidden = model.shape.stored_hidden
    own = hidden * (12 + _count_planes(plan)) + hidden // GROUP * _count_group_bytes(plan)
    if _keeps_input(model):
        own += 4 * hidden
    if model.moe is not None:
        own += 4 * model.expert_count
    own += 4 * model.ffn.sub_norm
    own += _count_layer_inputs(model)
    own += _count_latent_experts(plan, model)
    own += 0 if model.altup is None else _count_streams(model)
    own += 4 * (len(model.cut_layers) > 0)
    # Every array is rounded up.
    arrays = 9 + 4 * (_count_latent_experts(plan, model) > 0)
    return (count_chunk_tokens(plan) + 1) * own + arrays * ALIGNMENT


def _keeps_input(model: Model) -> bool:
    return model.residual == "parallel" or model.moe is not None or model.altup is not None


def _count_streams(model: Model) -> int:
    assert model.altup is not None
    return 4 * (model.altup.streams - 1) * model.shape.stored_hidden


def _count_latent_experts(plan: Plan, model: Model) -> int:
    if model.moe is None or model.moe.latent is None:
        return 0
    width = model.stored_neuron_width
    return width * (8 + _count_planes(plan)) + width // GROUP * _count_group_bytes(plan)


def _count_layer_inputs(model: Model) -> int:
    own = model.layer_embedding
    return 0 if own is None else 4 * model.shape.layers * own.stored_width


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
