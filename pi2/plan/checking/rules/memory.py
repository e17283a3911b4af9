"""Rules about memory and the sizes of bundles."""

from collections.abc import Iterator, Mapping

from pi2.plan.arithmetic.resolved import has_packable_shape, uses_main_memory
from pi2.plan.arithmetic.sizes import find_block_bytes
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.quantities import approximate_bytes, format_bytes, write_least, write_most
from pi2.plan.toml.text import KeyPath
from pi2.plan.weights.layout import round_up


@rule("P203", "error", "plan", "device")
def check_budget_fits_device(facts: Facts) -> Iterator[Finding]:
    budget, memory = facts.plan.memory.budget, facts.device.memory
    key = "usable" if memory.usable is not None else "capacity"
    limit = memory.usable if memory.usable is not None else memory.capacity
    if limit is None or budget <= limit:
        return
    yield Finding(
        ("memory", "budget"),
        f"the budget is {format_bytes(budget)}, the device `{facts.device.id}` has "
        f"{format_bytes(limit)}",
        f"lower the budget and its segments to {write_most(limit)} or less",
        origins=(Origin("device", ("memory", key), f'{key} = "{format_bytes(limit)}"'),),
    )


@rule("P201", "error", "plan", "device")
def check_segments_fit_budget(facts: Facts) -> Iterator[Finding]:
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
        ("memory", "budget"),
        f"the segments{_name_units(sizes)} add up to {format_bytes(total)}, "
        f"{approximate_bytes(excess)} more than the budget of {format_bytes(memory.budget)}",
        help_text,
        origins=(
            Origin(
                "plan",
                _find_key(largest),
                f"the largest is {largest} with {format_bytes(sizes[largest])}",
            ),
        ),
    )


def _name_units(sizes: Mapping[str, int]) -> str:
    return " and units" if any(name.startswith("units.") for name in sizes) else ""


def _find_key(name: str) -> KeyPath:
    unit = name.removeprefix("units.")
    return ("memory", "units", unit, "budget") if unit != name else ("memory", "segments", name)


@rule("P221", "error", "plan", "device", "model")
def check_stride_fits_blocks(facts: Facts) -> Iterator[Finding]:
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
        origins = (Origin("device", path, f'block_size = "{format_bytes(block)}"'),)
    yield Finding(
        ("bundle", "stride"),
        f"the stride of {stride} bytes is not a multiple of the device's block of {block} bytes",
        f'write stride = "{format_bytes(round_up(stride, block))}"',
        origins=origins,
    )


MOST_WASTE = 2
"""A stride may be this many times what blocks of 4 KiB make of the bundle."""
LARGE_BLOCK_BYTES = 4096


@rule("P220", "error", "plan", "device", "model")
def check_stride_holds_bundle(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    if not has_packable_shape(model):
        return
    used = model.lay_out_bundle(scales=facts.plan.bundle.scales).used_bytes
    block = find_block_bytes(facts.device)
    stride = facts.plan.bundle.stride
    fitting = round_up(used, block)
    origins = (
        Origin("model", ("shape", "hidden"), f"hidden = {model.shape.hidden}"),
        Origin("model", ("quantization", "ffn"), f'ffn weights are "{model.quantization.ffn}"'),
    )
    if stride < used:
        yield Finding(
            ("bundle", "stride"),
            f"a neuron takes {used} bytes, the stride is {stride}",
            f'write stride = "{format_bytes(fitting)}"',
            origins=origins,
        )
    elif stride > MOST_WASTE * round_up(used, max(block, LARGE_BLOCK_BYTES)):
        yield Finding(
            ("bundle", "stride"),
            f"a neuron takes {used} bytes, the stride is {stride}: "
            f"{1 - used / stride:.0%} of memory and reads would be empty",
            f'write stride = "{format_bytes(fitting)}"',
            origins=origins,
        )
