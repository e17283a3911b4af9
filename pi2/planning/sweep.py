"""Plan and simulate a grid of devices, models and memories, in several processes.

Every finished cell is a line of a file beside the results, written at once: a sweep that was
killed goes on where it was.  At the end all cells become one Parquet file.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError
from pi2.plan.device import Device
from pi2.plan.model import Model
from pi2.plan.quantities import approximate_bytes
from pi2.plan.resolved import Resolved, ResolvedPlan
from pi2.sharing.files import write_atomically

ATTEMPTS = 3
"""Times that cells are started again after a process was lost."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid; documents as JSON, so that processes can be given them."""

    device: str
    model: str
    memory_bytes: int
    context: int
    tokens: int

    @property
    def key(self) -> str:
        """Digest of everything that the result depends on."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out of a cell; None where there is no plan."""

    key: str
    device: str
    model: str
    memory_bytes: int
    code: str | None
    """Finding that says why there is no plan, such as P350."""
    reason: str | None
    predicted_tokens_s: float | None = None
    """Of the cost model."""
    simulated_tokens_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    hit_rate: float | None = None
    prefill_tokens_s: float | None = None
    hot_share: float | None = None
    predictor: str | None = None
    kv: str | None = None


def list_cells(
    devices: Sequence[Device],
    models: Sequence[Model],
    memories: Sequence[int],
    *,
    context: int,
    tokens: int,
) -> list[Cell]:
    """The grid, devices outermost; memories that a device does not have are left out."""
    cells = []
    for device in devices:
        room = device.memory.usable or device.memory.capacity
        for model in models:
            for memory in memories:
                if room is None or memory <= room:
                    cells.append(
                        Cell(
                            device=device.model_dump_json(exclude_none=True),
                            model=model.model_dump_json(exclude_none=True),
                            memory_bytes=memory,
                            context=min(context, model.shape.context),
                            tokens=tokens,
                        )
                    )
    return cells


def run_sweep(
    cells: Sequence[Cell], output: Path, *, jobs: int, progress: Progress
) -> list[Outcome]:
    """Run what is not done yet, write ``output`` (Parquet), and return all outcomes in order.

    Raises `UserError` P353 where processes are lost again and again; what was done is kept.
    """
    journal = output.with_name(f"{output.name}.cells")
    known = read_journal(journal)
    waiting = [cell for cell in cells if cell.key not in known]
    output.parent.mkdir(parents=True, exist_ok=True)
    attempts = 0
    with journal.open("a", encoding="utf-8") as file:
        if file.tell():
            file.write("\n")  # the last line of a sweep that was killed may be cut off
        while waiting:
            try:
                for outcome in _run_cells(waiting, jobs):
                    known[outcome.key] = outcome
                    file.write(json.dumps(asdict(outcome)) + "\n")
                    file.flush()
                    progress(
                        "planning and simulating", sum(c.key in known for c in cells) / len(cells)
                    )
            except BrokenProcessPool:
                attempts += 1
                if attempts >= ATTEMPTS:
                    raise UserError.of(
                        "P353",
                        "processes of the sweep were lost again and again",
                        help="the same command goes on from here; --jobs 1 takes less memory",
                    ) from None
            waiting = [cell for cell in cells if cell.key not in known]
    found = [known[cell.key] for cell in cells]
    write_parquet(output, found)
    journal.unlink(missing_ok=True)
    return found


def _run_cells(cells: Sequence[Cell], jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(run_cell, cells)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for job in as_completed([pool.submit(run_cell, cell) for cell in cells]):
            yield job.result()


def run_cell(cell: Cell) -> Outcome:
    """Plan and simulate one cell; what cannot be planned is an outcome, too."""
    from pi2.planning.planner import plan
    from pi2.planning.wish import Wish

    device = Device.model_validate_json(cell.device)
    model = Model.model_validate_json(cell.model)
    wish = Wish(device=device, model=model, memory_bytes=cell.memory_bytes, context=cell.context)
    names: dict[str, Any] = {
        "key": cell.key,
        "device": device.id,
        "model": model.id,
        "memory_bytes": cell.memory_bytes,
    }
    try:
        planned = plan(wish)
        simulated = _simulate(planned.resolved, cell)
    except UserError as error:
        finding = error.diagnostics[0]
        return Outcome(**names, code=finding.code, reason=finding.message)
    found = planned.resolved.plan
    layers = planned.resolved.layers
    return Outcome(
        **names,
        code=None,
        reason=None,
        predicted_tokens_s=planned.cost.tokens_s,
        hit_rate=planned.cost.hit_rate,
        prefill_tokens_s=planned.cost.prefill_tokens_s,
        hot_share=sum(layer.hot for layer in layers) / len(layers),
        predictor=found.decode.predictor,
        kv=found.kv.type,
        **simulated,
    )


def _simulate(resolved: Resolved, cell: Cell) -> dict[str, Any]:
    """Simulated speed and times between tokens."""
    from pi2.simulate import read_inputs, simulate

    plan = ResolvedPlan(
        plan=resolved.plan,
        device=resolved.device,
        model=resolved.model,
        layers=resolved.layers,
        bundle=resolved.bundle,
        path=Path("sweep.plan.toml"),
        store_path=Path("sweep"),
    )
    result = simulate(read_inputs(plan), tokens=cell.tokens)
    decode = result.describe()["decode"]
    return {
        "simulated_tokens_s": float(decode["tokens_s"]),
        "p50_ms": float(decode["p50_ms"]),
        "p99_ms": float(decode["p99_ms"]),
    }


def read_journal(path: Path) -> dict[str, Outcome]:
    """Outcomes by key; a line that was cut off is no outcome."""
    found = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            outcome = Outcome(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[outcome.key] = outcome
    return found


def write_parquet(path: Path, outcomes: Sequence[Outcome]) -> None:
    """A row per cell, written whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number = pa.string(), pa.float64()
    kinds = {"memory_bytes": pa.int64()} | dict.fromkeys(
        ("key", "device", "model", "code", "reason", "predictor", "kv"), text
    )
    names = list(Outcome.__dataclass_fields__)
    schema = pa.schema([(name, kinds.get(name, number)) for name in names])
    table = pa.Table.from_pylist([asdict(item) for item in outcomes], schema=schema)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_atomically(path, sink.getvalue().to_pybytes())


def write_summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A Markdown table: simulated tokens per second by device and model over memory."""
    memories = sorted({item.memory_bytes for item in outcomes})
    yield "Simulated tokens/s, not measured; `-`: no plan fits."
    yield ""
    yield "| device | model | " + " | ".join(approximate_bytes(size) for size in memories) + " |"
    yield "|" + " --- |" * (len(memories) + 2)
    rows: dict[tuple[str, str], dict[int, Outcome]] = {}
    for item in outcomes:
        rows.setdefault((item.device, item.model), {})[item.memory_bytes] = item
    for (device, model), cells in rows.items():
        shown = [_show(cells.get(size)) for size in memories]
        yield f"| {device} | {model} | " + " | ".join(shown) + " |"
    reasons = {item.code: item.reason for item in outcomes if item.code not in (None, "P350")}
    for code, reason in reasons.items():
        yield f"{code}: {reason}"


def _show(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.simulated_tokens_s is None:
        return "-" if outcome.code == "P350" else outcome.code or "-"
    return f"{outcome.simulated_tokens_s:.3g}"


def draw_summary(outcomes: Sequence[Outcome], form: str) -> bytes:
    """Speed over memory, a picture per device; UserError P632 without matplotlib."""
    from io import BytesIO

    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError.of(
            "P632",
            "pictures need matplotlib, which is not installed",
            help="install it with `pip install 'pi2[plot]'`",
        ) from None
    devices = list(dict.fromkeys(item.device for item in outcomes))
    figure = Figure(figsize=(7.0, 3.0 * len(devices)), layout="constrained")
    for number, device in enumerate(devices):
        axes = figure.add_subplot(len(devices), 1, number + 1)
        own = [item for item in outcomes if item.device == device]
        for model in dict.fromkeys(item.model for item in own):
            points = [
                (item.memory_bytes / 2**30, item.simulated_tokens_s)
                for item in own
                if item.model == model and item.simulated_tokens_s is not None
            ]
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=model)
        axes.set_title(f"{device}, simulated")
        axes.set_xlabel("memory (GiB)")
        axes.set_ylabel("tokens/s")
        axes.legend(fontsize="small")
    stream = BytesIO()
    figure.savefig(stream, format=form)
    return stream.getvalue()
