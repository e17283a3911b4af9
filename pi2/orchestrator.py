"""From a plan's path to a model that runs: load -> resolve -> validate -> open -> build -> run; and
to another memory budget while it runs.

For that its parts are made anew between two tokens: fewer or more slots and resident weights.
Weights of a file that are resident before and after stay in their places.  The KV cache and states
of its sequences move over, and the text stays the same."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from pi2 import pause_collection
from pi2.backends.faults.shortage import STALL_S, MemoryWatch
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.opening import Wish, load_parts
from pi2.fitting import find_backend
from pi2.logging import get_logger
from pi2.machine.memory import count_own_bytes, detect_memory
from pi2.memory.matrix_pool import MatrixPool
from pi2.plan.documents.quantities import (
    approximate_bytes,
    format_bytes,
    parse_size,
    read_percent,
    write_least,
    write_most,
)
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.engine.opening import MakeObserver
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.reading.thresholds import GivenThresholds
    from pi2.refit import FittedPlan


def load(
    path: str | Path | FittedPlan,
    *,
    set: Mapping[str, object] | None = None,
    progress: Progress | None = None,
    make_observer: MakeObserver | None = None,
    thresholds: GivenThresholds = None,
    pool: MatrixPool | None = None,
) -> LoadedModel:
    """Load the model of the plan at ``path``, or of one that was read; ``pool`` has the matrices of
    other models.  The rest is `pi2.load`'s."""
    # A bundle has none of it: its plan was resolved where it was built.
    from pi2.refit import read_plan

    start = time.perf_counter()
    if isinstance(path, str | Path):
        found = read_plan(Path(path), overrides=set, thresholds=thresholds)
    else:
        found = path
    if found.resolved.model.is_mtp:
        raise UserError.of(
            "P284",
            f"{found.resolved.path} runs an MTP head, which only drafts for its model",
            help='write decode.speculation = { drafts = "plan", plan = "..." } into the plan of '
            "that model, and name this plan there",
            file=str(found.resolved.path),
        )
    if found.changes:
        get_logger().info("plan fitted", changes=found.changes)
    wish = Wish(
        progress=progress or ignore_progress,
        start=start,
        pool=pool or MatrixPool(),
        make_observer=make_observer,
    )
    model = build(found.resolved, wish)
    model.changes, model.origin = found.changes, found.origin
    return model


@pause_collection()
def build(resolved: ResolvedPlan, wish: Wish) -> LoadedModel:
    """Instantiate what ``resolved`` names, and watch that memory is enough for progress, now and
    while the model runs: UserError P696."""
    name = resolved.name_backend(resolved.sparse_unit)
    if resolved.source.gives_text:
        raise UserError.of(
            "P678",
            f"backend {name!r} of `{resolved.sparse_unit}` gives text and no logits, which this"
            " needs",
            help="`pi2 run PLAN --prompt TEXT` works with it; else name another backend",
        )
    # A watch is a compiled function, as kernels are.
    if not find_backend(name).NATIVE:
        return LoadedModel(load_parts(resolved, wish))
    watch = MemoryWatch(partial(describe_shortage, resolved.plan.memory.budget))

    def report(label: str, share: float) -> None:
        watch.check()
        wish.progress(label, share)

    try:
        with watch.work():
            model = LoadedModel(load_parts(resolved, replace(wish, progress=report)))
    except BaseException:
        watch.close()
        raise
    model.watch_memory(watch)
    return model


ROOM = 1.125
"""Memory that a budget needs, with the system's own tables and caches of it, by the budget."""


def describe_shortage(budget_bytes: int) -> UserError:
    """P696, with what this machine or its group has and what a plan's budget needs."""
    limit = detect_memory().limit_bytes
    needed = int(budget_bytes * ROOM)
    fitting = write_most(int(min(budget_bytes, limit) / ROOM**2))
    return UserError.of(
        "P696",
        f"memory is short: for {STALL_S} s the run made no progress, and pages of files "
        f"went out as they came in. It may have {approximate_bytes(limit)}, and a budget of "
        f"{approximate_bytes(budget_bytes)} needs about {approximate_bytes(needed)}",
        help=f"--memory '{fitting}' leaves more room; or give it '{write_least(needed)}', or end "
        "what else runs in its group",
    )


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
    same = {key: attrgetter(key)(resolved.plan) for key in _KEPT}
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
    if any(attrgetter(key)(plan) != value for key, value in same.items()):
        raise UserError.of(
            "P745",
            f"the budget cannot become {format_bytes(budget_bytes)}: the KV cache would not fit",
            help="load the plan with another kv.context",
        )
    return fitted


def _change(model: LoadedModel, fitted: FittedPlan) -> None:
    from pi2.engine.file_loading import list_resident

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
