"""A planned plan as TOML that an author can edit: every choice with its reason."""

import copy
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from pi2.authoring.drafting import describe_budget, explain_backends, recommend_sampling
from pi2.authoring.writing import write_tables
from pi2.costs.cost import Cost, cost_plan
from pi2.costs.cost_layer import LayerCost
from pi2.costs.settings import read_stored
from pi2.diagnostics import UserError
from pi2.engine.run_report import describe_expected
from pi2.fitting import count_unit_needs, find_backend
from pi2.fitting.completion import StoreOrigin, complete_plan, resolve_values
from pi2.memory.arena import MEAN_TOKENS, count_lent_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_ffn_bytes, reads_embedding
from pi2.plan.arithmetic.sources import FileFacts
from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.plan_units import write_selector
from pi2.plan.documents.quantities import (
    TOKEN_UNITS,
    approximate_bytes,
    approximate_number,
    approximate_share,
    format_quantity,
    write_table,
)
from pi2.plan.toml.text import KeyPath
from pi2.plan.weights.layout import scale_bytes, weight_bytes
from pi2.planning.planner import PlannedPlan
from pi2.planning.refinement import describe_layout
from pi2.tracing import add_legend, make_figure, save_figure

_MOST_OTHERS = 60
"""Letters that tell what other settings would make."""
_TABLES = (
    "bundle",
    "layers",
    "projections",
    "io",
    "pipeline",
    "threads",
    "prefill",
    "decode",
    "sparsity",
    "kv",
)


def write_planned(planned: PlannedPlan, *, device: str, model: str, store: str, name: str) -> str:
    """The document's text; equal wishes and documents give equal texts."""
    values, resolved = planned.values, planned.resolved
    sampling, recommended = recommend_sampling(resolved.model)
    wished = planned.wish.tokens_s
    document = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "weights": store,
        **({} if wished is None else {"speed": format_quantity(wished, TOKEN_UNITS)}),
        "device": device,
        "model": model,
        "backends": values["backends"],
        "memory": values["memory"],
        **{key: values[key] for key in _TABLES if key in values},
        **sampling,
    }
    document = _shorten(document, planned)
    what = resolved.source.hot_part
    remarks: dict[KeyPath, str | None] = {
        **recommended,
        ("weights",): "relative to this file",
        ("backends",): explain_backends(resolved.plan.backends),
        ("memory", "budget"): describe_budget(resolved.device),
        ("memory", "embedding"): "rows are read when their tokens come",
        ("bundle", "stride"): f"{resolved.bundle.used_bytes} bytes are used",
        ("bundle", "scales"): "in memory",
        ("layers", "hot"): "share of neurons that stay in memory",
        ("kv", "lend"): "cold neurons use it until the context does",
        **{("memory", "units", unit, "budget"): what for unit in resolved.plan.memory.units},
    }
    head = [f"# {line}" if line else "#" for line in describe_choices(planned)]
    return "\n".join([*head, *write_tables(Plan, (), document, remarks.get)]) + "\n"


def _shorten(document: dict[str, Any], planned: PlannedPlan) -> dict[str, Any]:
    """The document without what the fitter derives as the planner has chosen it."""
    wish, wanted = planned.wish, planned.resolved.plan
    tables = [key for key in (*_TABLES, "backends") if key in document]
    paths = [("memory", "segments"), *((key,) for key in reversed(tables))]
    paths += [(key, name) for key in tables for name in document[key]]
    short = copy.deepcopy(document)
    for path in paths:
        trial = copy.deepcopy(short)
        table = trial if len(path) == 1 else trial.get(path[0], {})
        if table.pop(path[-1], None) is None:
            continue
        try:
            values = complete_plan(trial, wish.device, StoreOrigin(wish.model)).values
            found = resolve_values(values, wish.device, wish.model).plan
        except (UserError, ValidationError):  # a required key, or one that others need
            continue
        # The cache has what the budget leaves: a size that is stated would only be older.
        memory = found.memory.model_copy(update={"segments": wanted.memory.segments})
        named = wanted.model_copy(update={key: getattr(found, key) for key in _NAMES})
        if found.model_copy(update={"memory": memory}) == named:
            short = trial
    return short


_NAMES = ("name", "weights", "device", "model", "speed", "sampling")


def describe_choices(planned: PlannedPlan) -> Iterator[str]:
    cost, resolved = planned.cost, planned.resolved
    plan, segments = resolved.plan, resolved.plan.memory.segments
    yield f"Planned by `pi2 plan` for {planned.wish.model.id} on {planned.wish.device.id}."
    if (batch := plan.decode.batch) > 1:
        yield (f"For {batch} sequences at a time: what any of them uses is read and kept for all.")
    yield from describe_cost(cost)
    for name in sorted((resolved.sparse_unit, *resolved.dense_units)):
        backend = resolved.name_backend(name)
        if find_backend(backend).ONLY_EMULATED and not resolved.device.units[name].kernels:
            yield (
                f"{name} is counted with the device's figures, not with pi2's programs: the "
                f"backend {backend!r} has run only on emulated units, and none was timed."
            )
    if planned.full_tokens_s is not None:
        yield (
            f"These figures are for {min(MEAN_TOKENS, plan.kv.context)} tokens of context; once "
            f"the context of {plan.kv.context} is full, "
            f"{approximate_number(planned.full_tokens_s)} tokens/s."
        )
    whole = count_ffn_bytes(resolved)
    for name, need in count_unit_needs(resolved).items():
        if not resolved.shares_main_memory(name):
            what = resolved.source.own_part
            yield f"{name} has {approximate_bytes(need.bytes)} of {what}, in its own memory."
    if all(layer.hot_neurons == resolved.model.layer_neurons for layer in resolved.layers):
        yield resolved.source.describe_all(whole)
    else:
        hot = sum(layer.hot_neurons for layer in resolved.layers) * resolved.bundle.stride
        rest = "" if hot + segments.cold >= whole else "; the others are read when used"
        yield (
            f"Of {approximate_bytes(whole)} of neurons, {approximate_bytes(hot)} stay; "
            f"{approximate_bytes(segments.cold)} are a cache{rest}."
        )
        missing = sum(layer.missing for layer in cost.layers)
        read_s = sum(layer.read_s for layer in cost.layers)
        if missing > 0:
            io, each_s = plan.io, read_s / missing
            how = f"{io.threads} thread{'s' * (io.threads > 1)}"
            how = f"{io.depth} in flight" if io.engine == "io_uring" else how
            time = f"{each_s * 1e6:.1f} us a neuron"
            if cost.grain > 1:
                time = f"{each_s * cost.grain * 1e3:.2f} ms an expert of {cost.grain} neurons"
            yield f"Reads: {io.engine}, {how}: {time}."
    if planned.others is not None:
        yield from describe_layout(planned, read_stored(planned.wish.store))
    yield from planned.left_out
    for decision in planned.decisions:
        others = [item for item in decision.tokens_s if item[0] != decision.chosen][:3]
        shown = ""
        for name, speed in others:
            longer = f"{shown}{', ' * bool(shown)}{approximate_number(speed)} with {name}"
            shown = longer if len(longer) <= _MOST_OTHERS else shown
        if shown:
            yield f"{decision.key}: {decision.chosen}; tokens/s would be {shown}."
    if len({layer.hot for layer in resolved.layers}) > 1:
        yield "Layers whose activity is spread more widely keep more neurons."
    if plan.sparsity is not None:
        yield "Active neurons: the chosen experts' neurons that reach their thresholds."
    else:
        named = {
            "none": "every neuron is computed",
            "gate": "all gates are computed first, which is exact",
            "low-rank": "trained predictors name them",
            "router": "all neurons of the chosen experts, which is exact",
        }
        yield f"Active neurons: {named[plan.decode.predictor]}."
    if plan.decode.leave_out is not None:
        yield (
            f"At most {plan.decode.leave_out:.3g} of the predictor's scores are left out instead "
            "of read."
        )
    if plan.decode.look_ahead != "none":
        yield "Reads begin a layer ahead, hidden behind more work."
        if not any(unit.kernels for unit in planned.resolved.device.units.values()):
            tried = {item.key: dict(item.tokens_s) for item in planned.decisions}
            without = tried.get("decode.look_ahead", {}).get("none")
            slower = f"without it {approximate_number(without)} tokens/s; " if without else ""
            yield (
                f"That decides here: {slower}no published figure shows it on such a device "
                "(decode.look_ahead)."
            )
    yield from _describe_memory(planned)
    if plan.kv.type == "int8":
        yield "The KV cache takes 8 bits: half of the memory and of attention's reads."


def describe_file_plan(resolved: ResolvedPlan, file: FileFacts) -> Iterator[str]:
    """What the plan of a GGUF file that runs as it is keeps and reads, and its expected speed."""
    plan = resolved.plan
    yield f"Planned by `pi2 plan`: {file.path.name} runs as it is on {resolved.device.id}."
    missing = file.describe_missing() or f"all stay in memory, {plan.memory.weights}"
    budget = approximate_bytes(plan.memory.budget)
    yield f"Memory: {budget}, {describe_budget(resolved.device)}."
    yield f"Weights: {approximate_bytes(file.matrix_bytes)}, {missing}."
    contexts = f"{plan.kv.context} tokens"
    if plan.decode.batch > 1:
        contexts = f"{plan.decode.batch} sequences of {contexts}"
    yield f"KV cache: {approximate_bytes(plan.memory.segments.kv)} for {contexts}."
    drafts = plan.decode.speculation
    yield f"Drafts: {'none' if drafts is None else f'{drafts.tokens} tokens a step at most'}."
    try:
        cost = cost_plan(resolved)
    except UserError as error:
        yield f"expected: unknown, {error.diagnostics[0].message}."
        return
    is_timed = any(unit.kernels for unit in resolved.device.units.values())
    bound = "computing" if is_timed else "memory bandwidth"
    if 2 * sum(layer.wait_s for layer in cost.layers) > cost.token_s:
        bound = "the disk"
    yield describe_expected(cost.range_tokens_s.write(), bound)


def _describe_memory(planned: PlannedPlan) -> Iterator[str]:
    cost, resolved = planned.cost, planned.resolved
    if reads_embedding(resolved.plan, resolved.model):
        whole = sum(
            size(resolved.model.shape.stored_hidden, resolved.model.quantization.embedding)
            for size in (weight_bytes, scale_bytes)
        )
        room = approximate_bytes(whole * resolved.model.shape.vocab)
        yield (
            f"Rows of the embedding are read when their tokens come: {room} more for neurons, and "
            f"{approximate_number(cost.embedding_s * 1e3, 2)} ms a token."
        )
    lent = count_lent_bytes(resolved)
    if lent:
        yield (
            "Cached neurons use the free part of the context: "
            f"{approximate_bytes(lent)} after {min(MEAN_TOKENS, resolved.plan.kv.context)} tokens; "
            "they are evicted as it grows."
        )


def write_batches(plans: Sequence[PlannedPlan]) -> Iterator[str]:
    rows = []
    for item in plans:
        cost, resolved, batch = item.cost, item.resolved, item.wish.batch
        layers, segments = resolved.layers, resolved.plan.memory.segments
        neurons = resolved.model.layer_neurons * len(layers)
        used = sum(layer.used for layer in cost.layers) / neurons
        dense = sum(layer.find_dense_share(batch) for layer in layers) / len(layers)
        speeds = map(approximate_number, (cost.tokens_s, cost.tokens_s / batch))
        sizes = map(approximate_bytes, (segments.hot, segments.cold))
        shares = f"{dense:.0%}", f"{cost.hit_rate:.1%}"
        rows.append((batch, *speeds, f"{used:.1%}", *sizes, *shares))
    titles = "sequences | tokens/s | of each | used | hot | cold | dense | in memory"
    return write_table(titles, rows)


def describe_cost(cost: Cost) -> Iterator[str]:
    waits = sum(layer.wait_s for layer in cost.layers)
    inputs, settings = cost.inputs, cost.settings
    together = "" if settings.batch == 1 else f" of {settings.batch} sequences together"
    what = "a token" if settings.batch == 1 else "between two of each"
    yield (
        f"Predicted: {cost.range_tokens_s.write()} tokens/s{together} after "
        f"{settings.position} tokens of context; "
        f"{cost.token_s * 1e3:.1f} ms {what}, "
        f"{waits * 1e3:.1f} ms waiting for flash."
    )
    if cost.token_j is not None:
        energy = approximate_number(cost.token_j)
        yield f"Energy: {energy} J a token, from the device's power figures."
    prompts = f"Prompts of {cost.prompt} tokens"
    unit = inputs.prompts.unit
    told = f"unknown: {unit} computes them, and the device states no units.{unit}.compute"
    if inputs.rates.whole_unit is not None:
        told = f"unknown: not measured: {inputs.rates.whole_unit}'s kernels"
    if (found := cost.range_prefill_tokens_s) is not None:
        told = f"{found.write()} tokens/s"
    yield (
        f"{prompts}: {told}; {approximate_bytes(cost.memory_bytes)} of memory, "
        f"{cost.hit_rate:.1%} of the neurons used are in it."
    )
    yield f"Activity of neurons: {inputs.activity_source}."


_FFN = ("predict", "look_up", "python", "compute", "dense", "read", "wait")
_TERMS = ("attention", "norm", *_FFN, "total")
_SEEN = 1e-3
"""Part of a layer's time below which a term cannot be seen in a picture."""
_STACKED = ("attention", "norm", "predict", "look_up", "python", "busy", "wait")


def write_cost(cost: Cost) -> Iterator[str]:
    """Microseconds of every term, layers with the same settings together, and their sources."""
    yield from describe_cost(cost)
    yield ""
    yield "Microseconds of a token in a layer; read is hidden behind the others, all but wait:"
    yield ""
    groups = groupby(enumerate(cost.layers), key=lambda item: item[1])
    rows = []
    for layer, group in groups:
        name = write_selector(number for number, _ in group)
        times = (f"{_find_term(layer, term) * 1e6:.0f}" for term in _TERMS)
        counts = f"{layer.used:.0f}", f"{layer.missing:.1f}"
        rows.append([name, approximate_bytes(layer.hot_bytes), *counts, *times])
    names = {term: term.replace("_", " ") for term in _TERMS}
    yield from write_table(" | ".join(("layers", "hot", "used", "missing", *names.values())), rows)
    total = {term: sum(_find_term(layer, term) for layer in cost.layers) * 1e3 for term in _TERMS}
    shown = ", ".join(f"{names[term]} {ms:.1f}" for term, ms in total.items())
    yield ""
    shown += f", head {cost.inputs.head_s * 1e3:.1f}"
    if cost.embedding_s:
        shown += f", embedding {cost.embedding_s * 1e3:.1f}"
    yield f"Milliseconds of a token: {shown}."
    yield from (f"Assumed: {text}." for text in cost.inputs.assumptions)
    yield "Sources of the rates:"
    for item in sorted(cost.inputs.figures, key=lambda item: item.name):
        yield f"  {item.name}: {item.status}: {item.source}"


def _find_term(layer: LayerCost, name: str) -> float:
    return float(getattr(layer, f"{name}_s"))


def draw_cost(cost: Cost, form: str, title: str = "") -> bytes:
    """Terms of every layer, stacked; UserError P632 without matplotlib, P633."""
    figure = make_figure(9.0, 4.0)
    axes = figure.add_subplot()
    places = range(len(cost.layers))
    base = [0.0] * len(cost.layers)
    most_ms = max((layer.total_s for layer in cost.layers), default=0.0) * 1e3
    for number, name in enumerate(_STACKED):
        values = [_find_term(layer, name) * 1e3 for layer in cost.layers]
        if max(values, default=0.0) < _SEEN * most_ms:
            continue
        label = {"busy": "compute", "wait": "wait for flash"}.get(name, name.replace("_", " "))
        axes.bar(places, values, bottom=base, label=label, color=f"C{number}")
        base = [a + b for a, b in zip(base, values, strict=True)]
    axes.set_xlabel("layer")
    axes.set_ylabel("milliseconds of a token, predicted")
    speed = f"{cost.range_tokens_s.write()} tokens/s, predicted"
    axes.set_title(f"{title}: {speed}".removeprefix(": "))
    axes.set_xlim(-0.7, len(cost.layers) - 0.3)
    add_legend(axes, reverse=True)  # in the order of the bars
    return save_figure(figure, form)


def describe_curve(plans: Sequence[PlannedPlan]) -> Iterator[str]:
    rows = []
    for item in plans:
        plan, cost = item.resolved.plan, item.cost
        waits = sum(layer.wait_s for layer in cost.layers) / cost.token_s
        io, reads = plan.io, "none"
        if cost.hit_rate < 1.0:
            queue = io.engine == "io_uring"
            reads = f"io_uring, {io.depth} deep" if queue else f"pread, {io.threads} threads"
        figures = approximate_bytes(plan.memory.budget), cost.range_tokens_s.write()
        shares = f"{cost.hit_rate:.1%}", approximate_share(waits)
        rows.append((*figures, *shares, plan.decode.predictor, plan.kv.type, reads))
    titles = "memory | tokens/s | in memory | waiting | predictor | KV cache | reads"
    return write_table(titles, rows)


def draw_curve(plans: Sequence[PlannedPlan], form: str) -> bytes:
    """The picture's bytes; UserError P632 without matplotlib, P633 for an unknown type."""
    wish = plans[0].wish
    figure = make_figure(7.0, 4.0)
    axes = figure.add_subplot()
    memories = [item.resolved.plan.memory.budget / 2**30 for item in plans]
    ranges = [item.cost.range_tokens_s for item in plans]
    axes.fill_between(memories, [x.low for x in ranges], [x.high for x in ranges], alpha=0.2)
    axes.plot(memories, [x.expected for x in ranges], marker="o")
    axes.set_xlabel("memory of the process (GiB)")
    axes.set_ylabel("tokens per second, predicted")
    axes.set_title(f"{wish.model.name or wish.model.id} on {wish.device.name or wish.device.id}")
    axes.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3)
    return save_figure(figure, form)
