"""Rules about backends: the plans that they can compute, and their memory."""

from collections.abc import Iterator
from functools import cache
from operator import attrgetter

from pi2.fitting import (
    count_unit_needs,
    describe_unit,
    find_backend,
    find_executor_backend,
    find_graph_backend,
    find_unit_backend,
    read_fixed,
)
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_absent, find_memory_rate, find_read_rate
from pi2.plan.arithmetic.units import count_mixer_bytes
from pi2.plan.checking import Facts, Finding, Origin, Rule, rule
from pi2.plan.checking.rules import load_rules
from pi2.plan.documents.common import list_backend_names
from pi2.plan.documents.quantities import (
    approximate_bytes,
    approximate_number,
    compare_bytes,
    format_bytes,
    write_least,
)
from pi2.plan.toml.text import KeyPath, write_value


@cache
def list_rules() -> tuple[Rule, ...]:
    """All rules, of documents and of backends, in the order of their codes."""
    own = (value for value in globals().values() if isinstance(value, Rule))
    return tuple(sorted((*load_rules(), *own), key=lambda rule: rule.code))


_REMEDIES = {
    "kv": "lower kv.context",
    "hot": "lower layers.hot",
    "workspace": "lower prefill.chunk",
}


@rule("P202", "error", "resolved")
def check_segments_hold_needs(facts: Facts) -> Iterator[Finding]:
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
            ("memory", "segments", name),
            f"segment {name} has {has} and needs {needs}: {need.explanation}",
            help_text,
            origins=_find_origins(resolved, name),
        )


def _find_origins(resolved: ResolvedPlan, segment: str) -> tuple[Origin, ...]:
    shape = resolved.model.shape
    if segment == "kv":
        context = resolved.plan.kv.context
        return (
            Origin("plan", ("kv", "context"), f"context = {context}"),
            Origin("model", ("shape", "kv_heads"), f"kv_heads = {shape.kv_heads}"),
        )
    if segment == "predictor":
        mode = resolved.plan.decode.predictor
        return (Origin("plan", ("decode", "predictor"), f'predictor = "{mode}"'),)
    if segment == "hot":
        settings = {layer.hot_path: layer.hot for layer in resolved.layers}
        return tuple(
            Origin("plan", path, f"hot = {hot}")
            for path, hot in sorted(settings.items(), key=lambda item: -item[1])
        )
    if segment == "workspace":
        chunk = resolved.plan.prefill.chunk
        return (Origin("plan", ("prefill", "chunk"), f"chunk = {chunk}"),)
    if segment == "attention":
        return (Origin("model", ("shape",), "the model's shape"),)
    return (Origin("model", ("shape", "ffn"), f"ffn = {shape.ffn}"),)


ENOUGH = {"lru": 1.0, "lfu": 0.25}
"""Part of a token's neurons that the cache has to hold, by its policy."""


@rule("P204", "warning", "resolved")
def check_cold_holds_a_token(facts: Facts) -> Iterator[Finding]:
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
    least_bytes = round(ENOUGH[policy] * wanted_bytes)
    if size >= least_bytes or size < resolved.needs.cold.bytes:  # P202 speaks of the latter
        return
    yield Finding(
        ("memory", "segments", "cold"),
        f"segment cold has {format_bytes(size)}, and one token uses about "
        f"{approximate_bytes(wanted_bytes)} of neurons that are not hot",
        f'write cold = "{write_least(least_bytes)}", or lower layers.hot to make room',
        origins=(Origin("plan", ("cache", "policy"), f'policy = "{policy}"'),),
    )


_LEAST_BYTES = 1 << 20


@rule("P205", "warning", "resolved")
def check_cold_is_used(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    wasted = resolved.source.count_wasted(resolved)
    whole_in_memory = all(layer.hot >= 1.0 for layer in resolved.layers)
    if whole_in_memory or wasted <= _LEAST_BYTES:
        return
    whole = resolved.model.shape.layers * resolved.model.layer_neurons * resolved.bundle.stride
    hot = sum(layer.hot for layer in resolved.layers) / len(resolved.layers)
    more = min(hot + wasted / whole, 1.0)
    yield Finding(
        ("memory", "segments", "cold"),
        f"{approximate_bytes(wasted)} of the segment cold stay empty: cold neurons are not "
        "cached if every neuron is computed",
        f"add them to memory.segments.hot, and write layers.hot = {int(more * 1000) / 1000:g}",
        origins=(Origin("plan", ("decode", "predictor"), 'predictor = "none"'),),
    )


PATIENCE = 2.0
"""Reads may take this many times as long as attention: estimates are rough."""


@rule("P237", "warning", "resolved")
def check_look_ahead_hides(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    memory_rate, read_rate = find_memory_rate(facts.device), find_read_rate(facts.device)
    if resolved.plan.decode.look_ahead != "attention" or not memory_rate or not read_rate:
        return
    attention_s = _count_attention_bytes(resolved) / memory_rate
    read_s = _count_read_bytes(resolved) / read_rate
    if read_s <= PATIENCE * attention_s:
        return
    yield Finding(
        ("decode", "look_ahead"),
        "a layer's attention takes about "
        f"{approximate_number(attention_s * 1e3, 2)} ms and its reads "
        f"{approximate_number(read_s * 1e3, 2)} ms: attention cannot hide them",
        'write look_ahead = "layer", or give hot and cold more memory',
        origins=(
            Origin(
                "device", ("storage", "reads"), f"{approximate_number(read_rate / 1e6, 4)} MB/s"
            ),
        ),
    )


def _count_read_bytes(resolved: ResolvedPlan) -> float:
    stride, neurons = resolved.bundle.stride, resolved.model.layer_neurons
    absent = sum(neurons - layer.hot_neurons for layer in resolved.layers)
    if absent == 0:
        return 0.0
    cached = min(1.0, resolved.plan.memory.segments.cold / stride / absent)
    wanted = sum(count_absent(resolved, layer) or 0.0 for layer in range(len(resolved.layers)))
    return wanted * (1 - cached) * stride / len(resolved.layers)


def _count_attention_bytes(resolved: ResolvedPlan) -> int:
    """Bytes that a layer's attention reads for a token when the context is full."""
    needs, layers = resolved.needs, resolved.model.shape.layers
    return count_mixer_bytes(resolved.model) + (needs.kv.bytes + needs.state.bytes) // layers


@rule("P265", "error", "resolved")
def check_backends_can_compute(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    names = (resolved.sparse_unit, *resolved.dense_units)
    backends = {unit: own for unit in names if (own := resolved.find_backend(unit)) is not None}
    for unit, name in backends.items():
        judge = find_backend(resolved.source.choose_judge(name))
        is_sparse = unit == resolved.sparse_unit
        if not resolved.source.can_compute(resolved, unit):
            find = find_executor_backend if is_sparse else find_unit_backend
            able = [other for other in list_backend_names() if find(other)]
            lack = (
                f"computes no whole model, and `{unit}` computes what no other unit does"
                if is_sparse
                else f"serves no unit next to `{resolved.sparse_unit}`, such as `{unit}`"
            )
            yield Finding(
                _find_path(facts, unit),
                f"backend `{name}` {lack}",
                f"backends that do: {', '.join(f'`{other}`' for other in able)}",
            )
            continue
        for limit in judge.find_limits(describe_unit(resolved, unit)):
            yield Finding(
                _find_path(facts, unit),
                f"backend `{name}` of `{unit}` {limit}",
                f"name another backend for `{unit}`, or give its share to another unit",
            )


@rule("P269", "error", "resolved")
def check_settings_are_followed(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    unit = resolved.sparse_unit
    if resolved.find_backend(unit) is None:  # another rule names it
        return
    name = resolved.source.choose_judge(resolved.name_backend(unit))
    for key, values in read_fixed(name).items():
        path: KeyPath = tuple(key.split("."))
        stated = attrgetter(key)(resolved.plan)
        said = resolved.source.said.get(key)
        if stated in values or stated == said or path in resolved.derived:
            continue
        yield Finding(
            path,
            f"backend `{name}` of `{unit}` does not follow `{key}{_show(stated)}`",
            "leave it out" if values[0] is None else f"write {path[-1]} = {write_value(values[0])}",
        )


def _show(stated: object) -> str:
    return f" = {write_value(stated)}" if isinstance(stated, str | int | float) else ""


def _find_path(facts: Facts, unit: str) -> KeyPath:
    settings = facts.resolved.plan.units.get(unit)
    if settings is not None and settings.backend is not None:
        return ("units", unit, "backend")
    return ("backends", facts.resolved.device.units[unit].kind)


@rule("P277", "warning", "resolved")
def check_graphs_fit_own_memory(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    for name in resolved.dense_units:
        settings, hexagon = resolved.plan.units.get(name), resolved.device.units[name].hexagon
        own = None if hexagon is None else hexagon.own_memory
        backend = find_graph_backend(resolved.name_backend(name))
        if own is None or settings is None or settings.graphs is None:
            continue
        if backend is None:
            continue
        largest = max(
            backend.list_graphs(describe_unit(resolved, name)), key=lambda graph: graph.own_bytes
        )
        if largest.own_bytes > own:
            yield Finding(
                ("units", name, "graphs"),
                f"a graph of {largest.tokens} tokens and {largest.neurons} neurons keeps "
                f"{approximate_bytes(largest.own_bytes)}, and `{name}` has "
                f"{approximate_bytes(own)} of its own",
                "name smaller shares or fewer tokens: larger jobs run several graphs",
                at="key",
            )


@rule("P264", "error", "resolved")
def check_units_hold_needs(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    for name, need in count_unit_needs(resolved).items():
        memory = resolved.plan.memory.units.get(name)
        wanted = write_least(need.bytes)
        if memory is None and resolved.shares_main_memory(name):
            continue
        if memory is None:
            yield Finding(
                ("memory",),
                f"`{name}` has no memory, and needs {approximate_bytes(need.bytes)}: "
                f"{need.explanation}",
                f'write units.{name}.budget = "{wanted}" into [memory]',
                at="key",
            )
        elif memory.budget < need.bytes:
            has, needs = compare_bytes(memory.budget, need.bytes)
            yield Finding(
                ("memory", "units", name, "budget"),
                f"`{name}` has {has} and needs {needs}: {need.explanation}",
                f'write budget = "{wanted}", or lower the share of `{name}`',
            )
    for name, memory in resolved.plan.memory.units.items():
        unit = resolved.device.units.get(name)
        own = None if unit is None else unit.memory
        if memory.shares_main_memory and own is not None:
            yield Finding(
                ("memory", "units", name, "shares_main_memory"),
                f"the device says that `{name}` has memory of its own",
                "take the key out",
            )
        elif own is not None and own.capacity is not None and memory.budget > own.capacity:
            yield Finding(
                ("memory", "units", name, "budget"),
                f"`{name}` has {format_bytes(own.capacity)} of memory, less than "
                f"{format_bytes(memory.budget)}",
                f'write budget = "{format_bytes(own.capacity)}" at most',
            )
