"""Another memory budget for a model while it runs.

Between two tokens its parts are made anew for the other budget: fewer or more slots and resident
weights.  Weights of a file that are resident before and after stay in their places.  The KV cache
and states of its sequences move over, and the text stays the same."""

from __future__ import annotations

import ctypes
import gc
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.diagnostics import UserError
from pi2.logging import get_logger
from pi2.machine.memory import count_own_bytes, detect_memory
from pi2.plan.documents.quantities import approximate_bytes, format_bytes, parse_size, read_percent

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel
    from pi2.refit import FittedPlan

_KEPT = ("kv.context", "kv.type", "decode.batch", "prefill.chunk")
"""Keys on which the sequences under way depend, and the rounding of their next tokens."""


def change_budget(model: LoadedModel, budget_bytes: int) -> None:
    """Fit a loaded model to another budget; sequences under way go on.

    UserError P745 if no such plan runs, or the backend cannot give its KV cache out: the model goes
    on unchanged.  If the weights cannot be loaded again, it is closed."""
    model.scheduler.check_open()
    if budget_bytes == model.plan.plan.memory.budget:
        return
    if not model.scheduler.can_move:
        raise UserError.of("P745", "this backend cannot give its KV cache out")
    fitted = _fit(model, budget_bytes)
    model.scheduler.call_between(lambda: _change(model, fitted))


def _fit(model: LoadedModel, budget_bytes: int) -> FittedPlan:
    from pi2.refit import read_plan

    resolved = model.plan
    path, overrides = model.origin or (resolved.path, {})
    same = {key: _read(resolved.plan, key) for key in _KEPT}
    try:
        fitted = read_plan(path, overrides={**overrides, **same}, memory_bytes=budget_bytes)
        plan = fitted.resolved.plan
    except UserError as error:
        found = error.diagnostics[0]
        raise UserError.of(
            "P745",
            f"the budget cannot become {approximate_bytes(budget_bytes)}: {found.message}",
            help=found.help,
        ) from None
    if any(_read(plan, key) != value for key, value in same.items()):
        raise UserError.of(
            "P745",
            f"the budget cannot become {format_bytes(budget_bytes)}: the KV cache would not fit",
            help="load the plan with another kv.context",
        )
    return fitted


def _read(document: object, key: str) -> object:
    for name in key.split("."):
        document = getattr(document, name)
    return document


def _change(model: LoadedModel, fitted: FittedPlan) -> None:
    from pi2.engine.file_loading import list_resident
    from pi2.orchestrator import load

    before, pool = model.plan.plan.memory.budget, model.pool
    kept = model.scheduler.take_contexts()
    with ExitStack() as staying:
        pool.share(list_resident(fitted.resolved), staying)
        # The old parts go first: at no time are both in memory.
        model.release_parts()
        gc.collect()
        give_memory_back()
        try:
            model.take_parts(load(fitted, pool=pool))
        except BaseException:
            model.close()
            raise
    model.scheduler.put_contexts(kept)
    get_logger().info(
        "budget changed",
        before=approximate_bytes(before),
        now=approximate_bytes(model.plan.plan.memory.budget),
    )


def read_memory(text: str) -> int:
    """Bytes of a size such as ``"3 GiB"``, or of a share such as ``"60 %"`` of the memory that is
    free or this process's; UserError P612."""
    share = read_percent(text)
    if share is None:
        return parse_size(text)
    available = detect_memory().available_bytes + count_own_bytes()
    return int(available * share[0])


def give_memory_back() -> None:
    """Return memory that the allocator keeps to the system; the process's peak begins anew."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")
