"""Rules about memory and the sizes of bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from pi2.formats import find_packing
from pi2.plan.arithmetic.costs import count_absent
from pi2.plan.arithmetic.resolved import ResolvedPlan, has_packable_shape, uses_main_memory
from pi2.plan.arithmetic.sizes import find_block_bytes
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.quantities import (
    approximate_bytes,
    compare_bytes,
    format_bytes,
    write_least,
    write_most,
)
from pi2.plan.toml.text import KeyPath
from pi2.plan.weights.layout import round_up


@rule("P203", "error", "plan", "device")
def check_budget_fits_device(facts: Facts) -> Iterator[Finding]:
    """The budget fits into the device's memory.

    Why: a plan for more memory than the device has, or than its system leaves to one process, ends
    in swapping or in the process being killed.

    Example: ``budget = "12 GiB"`` for a device with ``usable = "10 GiB"``.

    Fix: lower ``memory.budget`` and its segments.  Where a device states no memory, the machine is
    asked when the plan runs.
    """
    budget, memory = facts.plan.memory.budget, facts.device.memory
    key = "usable" if memory.usable is not None else "capacity"
    limit = memory.usable if memory.usable is not None else memory.capacity
    if limit is None or budget <= limit:
        return
    yield Finding(
        path=("memory", "budget"),
        message=f"the budget is {format_bytes(budget)}, the device `{facts.device.id}` has "
        f"{format_bytes(limit)}",
        help=f"lower the budget and its segments to {write_most(limit)} or less",
        origins=(
            Origin(
                document="device", path=("memory", key), text=f'{key} = "{format_bytes(limit)}"'
            ),
        ),
    )


@rule("P201", "error", "plan", "device")
def check_segments_fit_budget(facts: Facts) -> Iterator[Finding]:
    """Segments, and units that use main memory, add up to no more than the budget.

    Why: the budget is a promise about the whole process; memory that no segment accounts for cannot
    be kept.

    Example: ``budget = "32 MiB"`` with segments of 20 MiB and 16 MiB.

    Fix: raise ``memory.budget``, or lower the segment that can give: usually ``cold``, the cache.
    """
    memory = facts.plan.memory
    sizes = {name: int(size) for name, size in memory.segments}
    cold = sizes["cold"]
    for name, unit in memory.units.items():
        if name in facts.device.units and uses_main_memory(facts.plan, facts.device, name):
            sizes[f"units.{name}"] = int(unit.budget)
    total = sum(sizes.values())
    excess = total - memory.budget
    if excess <= 0:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    help_text = f"raise the budget to {write_least(total)}"
    if cold > excess:
        help_text += f", or lower cold to {write_most(cold - excess)}"
    yield Finding(
        path=("memory", "budget"),
        message=f"the segments{_name_units(sizes)} add up to {format_bytes(total)}, "
        f"{approximate_bytes(excess)} more than the budget of {format_bytes(memory.budget)}",
        help=help_text,
        origins=(
            Origin(
                document="plan",
                path=_find_key(largest),
                text=f"the largest is {largest} with {format_bytes(sizes[largest])}",
            ),
        ),
    )


def _name_units(sizes: Mapping[str, int]) -> str:
    return " and units" if any(name.startswith("units.") for name in sizes) else ""


def _find_key(name: str) -> KeyPath:
    unit = name.removeprefix("units.")
    return ("memory", "units", unit, "budget") if unit != name else ("memory", "segments", name)


_REMEDIES = {
    "kv": "lower kv.context",
    "hot": "lower layers.hot",
    "workspace": "lower prefill.chunk",
}


@rule("P202", "error", "resolved")
def check_segments_hold_needs(facts: Facts) -> Iterator[Finding]:
    """Every segment is as large as what it has to hold.

    Why: sizes follow from the model's shape and quantisation and the plan's settings
    (`pi2.plan.arithmetic.sizes` has the formulas), so a plan that cannot work is known before
    anything is read: ``attention`` holds the dense weights, ``kv`` the context, ``predictor`` what
    finds the active neurons, ``hot`` the resident neurons, ``cold`` at least what one layer
    activates for a token, ``workspace`` the activations of a prefill chunk, logits and staging
    buffers.

    Example: ``kv = "1 MiB"`` for a context of 1024 tokens that takes 4 MiB.

    Fix: raise the segment, or lower what it is for: ``kv.context``, ``layers.hot``,
    ``prefill.chunk``, the precision of the model.
    """
    resolved = facts.resolved
    for name, need in resolved.needs.items():
        size = getattr(resolved.plan.memory.segments, name)
        if size >= need.bytes:
            continue
        help_text = f'write {name} = "{write_least(need.bytes)}"'
        if name in _REMEDIES:
            help_text += f", or {_REMEDIES[name]}"
        has, needs = compare_bytes(size, need.bytes)
        yield Finding(
            path=("memory", "segments", name),
            message=f"segment {name} has {has} and needs {needs}: {need.explanation}",
            help=help_text,
            origins=_find_origins(resolved, name),
        )


def _find_origins(resolved: ResolvedPlan, segment: str) -> tuple[Origin, ...]:
    shape = resolved.model.shape
    if segment == "kv":
        context = resolved.plan.kv.context
        return (
            Origin(document="plan", path=("kv", "context"), text=f"context = {context}"),
            Origin(
                document="model", path=("shape", "kv_heads"), text=f"kv_heads = {shape.kv_heads}"
            ),
        )
    if segment == "predictor":
        mode = resolved.plan.decode.predictor
        return (
            Origin(document="plan", path=("decode", "predictor"), text=f'predictor = "{mode}"'),
        )
    if segment == "hot":
        settings = {layer.hot_path: layer.hot for layer in resolved.layers}
        return tuple(
            Origin(document="plan", path=path, text=f"hot = {hot}")
            for path, hot in sorted(settings.items(), key=lambda item: -item[1])
        )
    if segment == "workspace":
        chunk = resolved.plan.prefill.chunk
        return (Origin(document="plan", path=("prefill", "chunk"), text=f"chunk = {chunk}"),)
    if segment == "attention":
        return (Origin(document="model", path=("shape",), text="the model's shape"),)
    return (Origin(document="model", path=("shape", "ffn"), text=f"ffn = {shape.ffn}"),)


ENOUGH = {"lru": 1.0, "lfu": 0.25}
"""Part of a token's neurons that the cache has to hold, by its policy."""


@rule("P204", "warning", "resolved")
def check_cold_holds_a_token(facts: Facts) -> Iterator[Finding]:
    """The cold segment holds the neurons that one token uses beyond the hot ones.

    Why: a cache that is smaller than what one token brings in has lost the first layers' neurons
    when the next token comes back to them, so that little of it is used twice.  One that keeps what
    is used often (``cache.policy = "lfu"``) works with a quarter of it, but for a mixture whose
    router names whole experts (``decode.predictor = "router"``).  The number of neurons is an
    estimate from the model's ``sparsity`` and ``predictor``, or what the router chooses in every
    layer.

    Example: ``cold = "40 MiB"`` where a token uses 200 MiB of neurons that are not hot.

    Fix: raise ``memory.segments.cold``; where the budget has no room, lower ``kv.context``, or take
    a part of ``hot``: fewer hot neurons and a cache that works can be faster.
    """
    resolved = facts.resolved
    stride = resolved.bundle.stride
    layers = [resolved.layers[number] for number in resolved.named_layers]
    counts = [count_absent(resolved, number) for number in resolved.named_layers]
    wanted_bytes = round(sum(count or 0.0 for count in counts)) * stride
    neurons = resolved.model.layer_neurons
    absent_bytes = sum(neurons - layer.hot_neurons for layer in layers) * stride
    wanted_bytes = min(wanted_bytes, absent_bytes)
    size = resolved.plan.memory.segments.cold
    policy = resolved.plan.cache.policy
    is_routed = resolved.model.moe is not None and resolved.plan.decode.predictor == "router"
    least_bytes = round((1.0 if is_routed else ENOUGH[policy]) * wanted_bytes)
    if size >= least_bytes or size < resolved.needs.cold.bytes:  # P202 speaks of the latter
        return
    yield Finding(
        path=("memory", "segments", "cold"),
        message=f"segment cold has {format_bytes(size)}, and one token uses about "
        f"{approximate_bytes(wanted_bytes)} of neurons that are not hot"
        + (_explain_experts(resolved) if is_routed else ""),
        help=f'write cold = "{write_least(least_bytes)}", or lower layers.hot to make room',
        origins=(Origin(document="plan", path=("cache", "policy"), text=f'policy = "{policy}"'),),
    )


def _explain_experts(resolved: ResolvedPlan) -> str:
    model = resolved.model
    size = approximate_bytes(model.shape.ffn * resolved.bundle.stride)
    counts = Counter(
        model.count_active(number)
        for number, layer in enumerate(resolved.layers)
        if layer.hot_neurons < model.layer_neurons
    )
    products = (f"{layers} layers x {experts} experts" for experts, layers in counts.items())
    return f" ({', '.join(products)} of {size})"


_LEAST_BYTES = 1 << 20


@rule("P205", "warning", "resolved")
def check_cold_is_used(facts: Facts) -> Iterator[Finding]:
    """A plan that computes every neuron has no cache of cold ones.

    Why: with ``decode.predictor = "none"`` what is not hot streams by for every token, and nothing
    of it is kept: memory of the segment ``cold`` stays empty.  As hot neurons it would save reads.

    Example: ``cold = "1000 MiB"`` with ``predictor = "none"``.

    Fix: give the segment's memory to ``hot``, and raise ``layers.hot``; `pi2 run --memory` does
    both.
    """
    resolved = facts.resolved
    plan, size = resolved.plan, resolved.plan.memory.segments.cold
    if plan.decode.predictor != "none" or resolved.file is not None:  # a ring of what streams by
        return
    wasted = size - resolved.needs.cold.bytes
    whole_in_memory = all(layer.hot >= 1.0 for layer in resolved.layers)
    if whole_in_memory or wasted <= _LEAST_BYTES:
        return
    whole = resolved.model.shape.layers * resolved.model.layer_neurons * resolved.bundle.stride
    hot = sum(layer.hot for layer in resolved.layers) / len(resolved.layers)
    more = min(hot + wasted / whole, 1.0)
    yield Finding(
        path=("memory", "segments", "cold"),
        message=f"{approximate_bytes(wasted)} of the segment cold stay empty: where every neuron "
        "is computed, what is not hot streams by",
        help=f"add them to memory.segments.hot, and write layers.hot = {int(more * 1000) / 1000:g}",
        origins=(Origin(document="plan", path=("decode", "predictor"), text='predictor = "none"'),),
    )


@rule("P223", "error", "plan", "model")
def check_scales_exist(facts: Facts) -> Iterator[Finding]:
    """Scales are resident only where weights have scales.

    Why: int4 and int8 have a scale for every 32 weights; fp16 weights stand for themselves, so that
    there is nothing that could lie elsewhere.

    Example: ``scales = "resident"`` for a model with ``quantization.ffn = "fp16"``.

    Fix: leave ``bundle.scales`` out, or quantise the neurons.
    """
    precision = facts.model.quantization.ffn
    if facts.plan.bundle.scales == "resident" and not find_packing(precision).has_scales:
        path = ("quantization", "ffn")
        yield Finding(
            path=("bundle", "scales"),
            message=f"neurons of {precision} have no scales that could be resident",
            help='write scales = "inline"',
            origins=(Origin(document="model", path=path, text=f'ffn = "{precision}"'),),
        )


@rule("P221", "error", "plan", "device", "model")
def check_stride_fits_blocks(facts: Facts) -> Iterator[Finding]:
    """The bundle's stride is a multiple of the device's block.

    Why: direct reads begin and end at blocks, so only then is a neuron one read into its place.

    Example: ``stride = "448 B"`` for a device with blocks of 512 bytes.

    Fix: round up to the next multiple.  Where a device states no block, it is 512 bytes.
    """
    stride, block = facts.plan.bundle.stride, find_block_bytes(facts.device)
    model = facts.model
    if not has_packable_shape(model):
        return
    used = model.lay_out_bundle(scales=facts.plan.bundle.scales).used_bytes
    if stride < used or stride % block == 0:  # P220 speaks of a stride that is too small
        return
    origins: tuple[Origin, ...] = ()
    if facts.device.storage.block_size is not None:
        path = ("storage", "block_size")
        origins = (
            Origin(document="device", path=path, text=f'block_size = "{format_bytes(block)}"'),
        )
    yield Finding(
        path=("bundle", "stride"),
        message=f"the stride of {stride} bytes is not a multiple of the device's block of "
        f"{block} bytes",
        help=f'write stride = "{format_bytes(round_up(stride, block))}"',
        origins=origins,
    )


MOST_WASTE = 2
"""A stride may be this many times what blocks of 4 KiB make of the bundle."""
LARGE_BLOCK_BYTES = 4096


@rule("P220", "error", "plan", "device", "model")
def check_stride_holds_bundle(facts: Facts) -> Iterator[Finding]:
    """The bundle's stride holds a bundle.

    Why: a bundle is the gate row, the up row and the down column of a neuron, each with its scales;
    its size follows from the model's width and the precision of its FFN.  A stride that is too
    small would let neurons overlap, one that is far too large would fill memory and reads with
    nothing.

    Example: ``stride = "256 B"`` for neurons of 432 bytes.

    Fix: the smallest multiple of the device's block that is not below the size.
    """
    model = facts.model
    if not has_packable_shape(model):
        return
    used = model.lay_out_bundle(scales=facts.plan.bundle.scales).used_bytes
    block = find_block_bytes(facts.device)
    stride = facts.plan.bundle.stride
    fitting = round_up(used, block)
    origins = (
        Origin(document="model", path=("shape", "hidden"), text=f"hidden = {model.shape.hidden}"),
        Origin(
            document="model",
            path=("quantization", "ffn"),
            text=f'ffn weights are "{model.quantization.ffn}"',
        ),
    )
    if stride < used:
        yield Finding(
            path=("bundle", "stride"),
            message=f"a neuron takes {used} bytes, the stride is {stride}",
            help=f'write stride = "{format_bytes(fitting)}"',
            origins=origins,
        )
    elif stride > MOST_WASTE * round_up(used, max(block, LARGE_BLOCK_BYTES)):
        yield Finding(
            path=("bundle", "stride"),
            message=f"a neuron takes {used} bytes, the stride is {stride}: "
            f"{1 - used / stride:.0%} of memory and reads would be empty",
            help=f'write stride = "{format_bytes(fitting)}"',
            origins=origins,
        )


@rule("P278", "warning", "plan")
def check_prefix_cache_is_used(facts: Facts) -> Iterator[Finding]:
    """Prefixes that are kept in files are looked for.

    Why: with ``serve.prefixes = "none"`` every prompt is read from its beginning, and nothing is
    kept.

    Example: ``serve.prefixes = "none"`` with ``serve.prefix_cache = "4 GiB"``.

    Fix: remove ``serve.prefix_cache``, or ``serve.prefixes``.
    """
    serve = facts.plan.serve
    if serve.prefix_cache is None or serve.prefixes != "none":
        return
    yield Finding(
        path=("serve", "prefix_cache"),
        message="nothing is kept in files: prompts are read from their beginning",
        help="remove it, or serve.prefixes",
        origins=(Origin(document="plan", path=("serve", "prefixes"), text='prefixes = "none"'),),
    )
