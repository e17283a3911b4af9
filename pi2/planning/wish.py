"""The wish that a plan is made for, and what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pi2.caches import is_gguf
from pi2.costs.activity import LOOK_AHEAD_MODES
from pi2.costs.cost import Cost, cost_plan
from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting.budget import MIB
from pi2.fitting.check import check_file
from pi2.fitting.completion import choose_backends
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Segments
from pi2.plan.documents.plan_units import write_selector
from pi2.plan.documents.quantities import (
    approximate_bytes,
    approximate_number,
    compare_bytes,
    format_bytes,
    round_size,
    write_least,
    write_most,
)
from pi2.plan.reading.references import DOCUMENTS, UnknownName, locate_document
from pi2.plan.reading.thresholds import Thresholds
from pi2.plan.toml.source import detect_kind
from pi2.plan.weights.layout import BundleLayout, round_up
from pi2.sharing.references import LockedReferences

if TYPE_CHECKING:
    from pi2.fitting.check import Report
    from pi2.plan.toml.source import Kind
    from pi2.planning.planner import PlannedPlan
    from pi2.planning.search import Choices, Problem

LEAST_DENSE = 0.02
"""Share of a layer that a unit is given which does not compute more for waiting for flash."""


def read_document(reference: str, kind: Kind) -> Report:
    """A sound device or model by path, short name or locked reference; UserError P014, P015."""
    folder = Path()
    resolver = LockedReferences(folder)
    if is_gguf(Path(reference)):
        raise UserError.of(
            "P014",
            f"`{reference}` is no {kind}, but a file of weights",
            help=f"`pi2 plan {reference} --memory SIZE -o NAME.plan.toml` writes its plan, and "
            f"`pi2 model new {reference}` its model document",
        )
    try:
        found = locate_document(reference, kind, folder, resolver=resolver, is_given=True)
    except UnknownName as error:
        raise UserError.of("P015", str(error), help=error.hint) from None
    other = detect_kind(found.path.name) not in (None, kind)  # its own errors would not help
    report = check_file(found.path, name=found.name, resolver=resolver, reference=found.reference)
    if other or not isinstance(report.document, DOCUMENTS[kind] | None):
        raise UserError.of("P014", f"`{reference}` is no {kind}", help=f"name a *.{kind}.toml")
    if not report.is_sound or report.document is None:
        raise report.make_error()
    return report


def find_cpu(device: Device) -> str:
    """The name of the device's processor; UserError P026 without one."""
    for name, unit in device.units.items():
        if unit.kind == "cpu":
            return name
    raise UserError.of(
        "P026",
        f"the device {device.id} has no CPU",
        help="add a unit of the kind cpu to the device",
    )


def make_plan_values(
    wish: Wish, *, predictor: str, kv: str, chunk: int, bundle: BundleLayout
) -> dict[str, Any]:
    """A plan without sizes; UserError P026 for a device without a CPU."""
    return {
        "schema_version": SCHEMA_VERSION,
        "device": wish.device.id,
        "model": wish.model.id,
        "weights": f"stores/{wish.model.id}",
        "memory": {"budget": "1 B", "segments": dict.fromkeys(Segments.model_fields, "0 B")},
        "bundle": {"stride": format_bytes(bundle.stride)}
        | ({} if bundle.scales == "inline" else {"scales": bundle.scales}),
        "layers": {"split": {find_cpu(wish.device): 1.0}, "hot": 0.0},
        "prefill": {"chunk": chunk},
        "decode": {"predictor": predictor, "batch": wish.batch},
        "kv": {"type": kv, "context": wish.context},
    }


Objective = Literal["speed", "memory", "energy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Limits, what to make the best of within them, and what the plan is for."""

    device: Device
    model: Model
    memory_bytes: int | None = None
    """Maximum resident set size of the process."""
    unit_memory: Mapping[str, int] = field(default_factory=dict)
    """Most bytes of units that have memory of their own, by name; else all that they have."""
    tokens_s: float | None = None
    """Lowest speed of generation, of all sequences together."""
    objective: Objective = "speed"
    context: int = 4096
    """Context length in tokens, prompt and answer together."""
    exact: bool = False
    """Only choices that keep results: all gates, fp16 KV cache, no look-ahead."""
    leave_out: float = 0.0
    """Share of the predictor's scores that a plan may leave out instead of reading neurons."""
    batch: int = 1
    """Sequences that generate at the same time."""
    store: Path | None = None
    """Neuron store whose activations count, if there is one."""
    thresholds: Thresholds | None = None
    """Thresholds for an MoE model's experts, which a plan may use where it is faster with them."""
    thresholds_file: str = ""
    """Their file, as the plan is to name it."""

    @property
    def saves_memory(self) -> bool:
        """Whether the smallest plan is the best: always where no memory is stated."""
        if self.objective == "energy":
            return False
        return self.memory_bytes is None or self.objective == "memory"

    def find_unit_memory(self, name: str) -> int | None:
        """Bytes of a unit's own memory that a plan may use; None where it uses main memory."""
        memory = self.device.units[name].memory
        return None if memory is None else self.unit_memory.get(name, memory.capacity or 0)

    def weigh(self, cost: Cost) -> float:
        """What a plan takes among plans with the same memory: joules, or seconds, of a token."""
        return (cost.token_j if self.objective == "energy" else None) or cost.token_s


def write_values(
    problem: Problem, choices: Choices, hots: Sequence[float], denses: Sequence[float]
) -> dict[str, Any]:
    """A plan of a search's choices, and of each layer's hot and dense shares, without sizes."""
    wish, unit, whole = problem.wish, problem.rates.dense, min(hots) >= 1.0
    values = make_plan_values(
        wish, predictor=choices.predictor, kv=choices.kv, chunk=choices.chunk, bundle=problem.bundle
    )
    if choices.embedding == "flash":
        values["memory"]["embedding"] = "flash"
    if choices.lends and not whole:
        values["kv"]["lend"] = True
    values["layers"] = _write_layers(problem, hots, denses)
    names = [find_cpu(wish.device)]
    if unit is not None and max(denses) > 0.0:
        names.append(unit.name)
        if unit.name in wish.unit_memory:
            size = round_size(wish.unit_memory[unit.name])
            values["memory"]["units"] = {unit.name: {"budget": format_bytes(size)}}
        if share := problem.rates.fair_share:
            # The unit has its part of everything but the FFN as well, and prompts.
            split = {unit.name: share, names[0]: round(1.0 - share, 2)}
            values["projections"] = {"attention": split, "head": split}
            if unit.ops_s is not None:
                values["prefill"]["unit"] = unit.name
    values["backends"] = choose_backends(wish.device.units[name].kind for name in names)
    values["io"] = problem.ios[0].write()
    # Where nothing is read there is nothing to look ahead for, or to leave out.
    looks = choices.predictor in LOOK_AHEAD_MODES and not whole
    values["decode"]["look_ahead"] = problem.look_aheads[-1] if looks else "none"
    if wish.leave_out > 0.0 and choices.predictor == "low-rank" and not whole:
        values["decode"]["leave_out"] = wish.leave_out
    return values


def _write_layers(
    problem: Problem, hots: Sequence[float], denses: Sequence[float]
) -> dict[str, Any]:
    """Values of ``[layers]``: the most frequent settings, and overrides for the others."""
    cpu, unit = find_cpu(problem.wish.device), problem.rates.dense

    def split(dense: float) -> dict[str, float]:
        if unit is None or dense <= 0.0:
            return {cpu: 1.0}
        return {unit.name: dense, cpu: round(1.0 - dense, 6)}

    kinds: dict[tuple[float, float], list[int]] = {}
    for layer, kind in enumerate(zip(hots, denses, strict=True)):
        kinds.setdefault(kind, []).append(layer)
    base = max(kinds, key=lambda kind: (len(kinds[kind]), kind))
    found: dict[str, Any] = {"split": split(base[1]), "hot": base[0]}
    overrides = []
    for kind, layers in kinds.items():
        if kind == base:
            continue
        values: dict[str, Any] = {"select": write_selector(layers)}
        if split(kind[1]) != split(base[1]):
            values["split"] = split(kind[1])
        if kind[0] != base[0]:
            values["hot"] = kind[0]
        overrides.append(values)
    if overrides:
        found["overrides"] = overrides
    return found


_CLOSE = 1 / 1024
"""Part of a memory that is not worth another plan."""
_MARGINS = (1.0, 0.9, 0.8, 0.65, 0.5)
"""Parts of the time of a token that the program may take for a plan of least energy."""

Planner = Callable[[Wish], "PlannedPlan"]
"""The best plan within a memory, however fast; UserError where there is none."""


def find_device_memory(device: Device) -> int | None:
    """Bytes that a process may have; None where the device leaves it to the machine."""
    memory = device.memory
    return memory.usable if memory.usable is not None else memory.capacity


def check_device_memory(wish: Wish) -> int | None:
    """The device's memory; UserError P350 where a wish is for more."""
    limit = find_device_memory(wish.device)
    if limit is not None and wish.memory_bytes is not None and wish.memory_bytes > limit:
        has, asked = compare_bytes(limit, wish.memory_bytes)
        raise UserError.of(
            "P350",
            f"the device {wish.device.id!r} has {has} of memory, {asked} are asked for",
            help=f"--memory '{write_most(limit)}' is the most",
        )
    return limit


def check_speed(resolved: ResolvedPlan) -> tuple[Diagnostic, ...]:
    """P354 where a plan is predicted to be slower than the ``speed`` that it states, a warning
    where its device has no figures for it."""
    wished = resolved.plan.speed or 0.0
    try:
        cost = cost_plan(resolved)
    except UserError as error:
        return tuple(replace(item, severity="warning") for item in error.diagnostics)
    found = cost.range_tokens_s
    if found.low >= wished:
        return ()
    name = resolved.path.name
    return UserError.of(
        "P354",
        f"speed = {approximate_number(wished, 9)} tok/s: {found.write()} tokens/s are predicted on "
        f"{resolved.device.id}, after {cost.settings.position} tokens of context, and the least is "
        "promised",
        help=f"`pi2 plan {name}` finds a faster plan, or says what can be reached; or write "
        f'speed = "{_round_down(found.low)} tok/s"',
        notes=[name_limit(cost, "this plan")],
    ).diagnostics


def reach_speed(wish: Wish, make_plan: Planner, bounds: tuple[int, int]) -> PlannedPlan:
    """The plan for a speed: fastest in a stated memory, else least memory or energy; P350."""
    assert wish.tokens_s is not None
    device_bytes = check_device_memory(wish)
    stated = [size for size in (wish.memory_bytes, device_bytes) if size is not None]
    limit = min(stated, default=bounds[1])

    def plan_at(size: int) -> PlannedPlan:
        return make_plan(replace(wish, memory_bytes=size, objective="speed"))

    def find_least(fastest: PlannedPlan) -> PlannedPlan:
        return _shrink(float(wish.tokens_s or 0.0), fastest, plan_at, bounds[0])

    fastest = plan_at(limit)
    if fastest.promised_tokens_s < wish.tokens_s:
        most = plan_at(bounds[1]) if limit < bounds[1] else fastest
        needed = find_least(most) if most.promised_tokens_s >= wish.tokens_s else None
        raise _explain(wish, fastest, needed)
    if wish.objective == "energy":
        found = [fastest]
        for margin in _MARGINS:
            own = replace(wish, memory_bytes=limit, tokens_s=wish.tokens_s / margin)
            with suppress(UserError):
                found.append(make_plan(own))
        fast = [item for item in found if item.promised_tokens_s >= wish.tokens_s]
        return min(fast, key=lambda item: wish.weigh(item.cost))
    if wish.memory_bytes is not None and wish.objective == "speed":
        return fastest
    return replace(find_least(fastest), wish=wish)


def _shrink(
    tokens_s: float, best: PlannedPlan, plan_at: Callable[[int], PlannedPlan], low: int
) -> PlannedPlan:
    """The plan with the least memory, from ``low`` to the memory of ``best``, that is so fast."""
    high = best.resolved.plan.memory.budget
    while high - low > max(MIB, high * _CLOSE):
        size = round_up((low + high) // 2, MIB)
        try:
            found = plan_at(size)
        except UserError:
            low = size
            continue
        if found.promised_tokens_s >= tokens_s:
            best, high = found, size
        else:
            low = size
    return best


def _explain(wish: Wish, fastest: PlannedPlan, needed: PlannedPlan | None) -> UserError:
    """P350: what limits the fastest plan, and the nearest wishes; ``needed`` has more memory."""
    assert wish.tokens_s is not None
    wished = approximate_number(wish.tokens_s, 9)
    nearest = [f"--speed {_round_down(fastest.promised_tokens_s)}tok/s"]
    where = "" if wish.memory_bytes is None else f" within {approximate_bytes(wish.memory_bytes)}"
    most = approximate_number(fastest.promised_tokens_s)
    message = f"{wished} tokens/s cannot be promised{where}: {most} are the most"
    if needed is not None:
        budget, room = needed.resolved.plan.memory.budget, find_device_memory(wish.device)
        if room is not None and budget > room:
            takes, has = compare_bytes(budget, room)
            message = (
                f"{wished} tokens/s take {takes} of memory, the device {wish.device.id!r} has "
                f"{has}: {most} are the most{where}"
            )
        else:
            nearest.append(f"--memory '{write_least(budget)}'")
    word = "wish is" if len(nearest) == 1 else "wishes are"
    return UserError.of(
        "P350",
        message,
        help=f"the nearest {word} {' and '.join(nearest)}",
        notes=[name_limit(fastest.cost)],
        exit_code=1,
    )


def _round_down(speed: float) -> str:
    digits = max(2 - floor(log10(speed)), 0)
    return approximate_number(floor(speed * 10**digits) / 10**digits, 9)


def name_limit(cost: Cost, plan: str = "the fastest plan") -> str:
    parts = {
        "attention": sum(x.attention_s for x in cost.layers),
        "finding active neurons": sum(x.predict_s + x.look_up_s for x in cost.layers),
        "computing neurons": sum(max(x.compute_s, x.dense_s) for x in cost.layers),
        "waiting for flash": sum(x.wait_s for x in cost.layers),
        "the head": cost.inputs.head_s,
        "the embedding": cost.embedding_s,
    }
    shown = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items())
    return f"a token of {plan}: {shown}"
