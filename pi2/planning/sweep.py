"""Plan and simulate a grid of devices, models and memories, in several processes or on Ray."""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pi2.diagnostics import UserError
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import approximate_bytes, approximate_number, write_table
from pi2.planning.wish import find_device_memory
from pi2.progress import Progress
from pi2.ray_cluster import import_ray, start_ray
from pi2.sharing.fetching import write_atomically
from pi2.tracing import add_legend, make_figure, pick_styles, save_figure

Task = TypeVar("Task")
Result = TypeVar("Result")
RETRIES = 3
"""Times that Ray starts a task again whose worker was lost."""
_AHEAD = 4
"""Tasks for each worker that Ray is given before it has done the first."""


class WorkersLost(Exception):
    """Workers ended before their work did; finished cells were returned."""


def run_in_processes(
    run: Callable[[Task], Result], tasks: Sequence[Task], jobs: int
) -> Iterator[Result]:
    """Yield results as they come; raises `WorkersLost`."""
    if jobs == 1:
        yield from map(run, tasks)
        return
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            for job in as_completed([pool.submit(run, task) for task in tasks]):
                yield job.result()
    except BrokenProcessPool:
        raise WorkersLost from None


def run_on_ray(
    run: Callable[[Task], Result], tasks: Sequence[Task], jobs: int | None
) -> Iterator[Result]:
    """Results from the cluster RAY_ADDRESS, or one with ``jobs`` workers here; raises
    `WorkersLost`, UserError P355 without Ray."""
    ray = import_ray("pip install 'pi2[ray]', or --on processes")
    started = not ray.is_initialized()
    if started:
        start_ray(ray, jobs)
    try:
        remote = ray.remote(max_retries=RETRIES)(run)
        workers = jobs or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        waiting = list(reversed(tasks))
        running: list[Any] = []
        while waiting or running:
            while waiting and len(running) < workers * _AHEAD:
                running.append(remote.remote(waiting.pop()))
            done, running = ray.wait(running)
            for job in done:
                try:
                    yield ray.get(job)
                except ray.exceptions.WorkerCrashedError:
                    raise WorkersLost from None
                except ray.exceptions.RayTaskError as error:
                    raise error.as_instanceof_cause() from None
    finally:
        if started:
            ray.shutdown()


ATTEMPTS = 3
"""Times that cells are started again after a process was lost."""

Place = Literal["processes", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid; documents as JSON, which other processes can be given."""

    device: str
    model: str
    memory_bytes: int
    context: int
    tokens: int

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a cell; None where there is no plan."""

    key: str
    device: str
    model: str
    memory_bytes: int
    code: str | None
    """Finding that says why there is no plan, such as P350."""
    reason: str | None
    predicted_tokens_s: float | None = None
    """Speed that the cost model predicts."""
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
        room = find_device_memory(device)
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
    cells: Sequence[Cell],
    output: Path,
    *,
    jobs: int | None,
    progress: Progress,
    on: Place = "processes",
) -> list[Outcome]:
    """Run missing cells, write ``output`` (Parquet), return all; UserError P353."""
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
                found = (
                    run_on_ray(run_cell, waiting, jobs)
                    if on == "ray"
                    else run_in_processes(run_cell, waiting, jobs or os.cpu_count() or 1)
                )
                for outcome in found:
                    known[outcome.key] = outcome
                    file.write(json.dumps(asdict(outcome)) + "\n")
                    file.flush()
                    progress(
                        "planning and simulating", sum(c.key in known for c in cells) / len(cells)
                    )
            except WorkersLost:
                attempts += 1
                if attempts >= ATTEMPTS:
                    raise UserError.of(
                        "P353",
                        "workers of the sweep were lost again and again",
                        help="the same command goes on from here; --jobs 1 takes less memory",
                    ) from None
            waiting = [cell for cell in cells if cell.key not in known]
    outcomes = [known[cell.key] for cell in cells]
    write_parquet(output, outcomes)
    journal.unlink(missing_ok=True)
    return outcomes


def run_cell(cell: Cell) -> Outcome:
    """Plan and simulate one cell; a cell that cannot be planned has an outcome as well."""
    from pi2.planning.planner import plan
    from pi2.planning.wish import Wish
    from pi2.simulate import read_inputs, simulate

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
        # In a folder that is not there: no store of the same name is looked at.
        unstored = replace(planned.resolved, path=Path("sweep/sweep.plan.toml"))
        simulated = simulate(read_inputs(unstored), tokens=cell.tokens).describe()["decode"]
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
        simulated_tokens_s=float(simulated["tokens_s"]),
        p50_ms=float(simulated["p50_ms"]),
        p99_ms=float(simulated["p99_ms"]),
    )


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
    absent = ""
    if len(outcomes) < len(memories) * len({(item.device, item.model) for item in outcomes}):
        absent = "; empty: more than the device has"
    yield f"Simulated tokens/s, not measured; `-`: no plan fits{absent}."
    yield ""
    rows: dict[tuple[str, str], dict[int, Outcome]] = {}
    for item in outcomes:
        rows.setdefault((item.device, item.model), {})[item.memory_bytes] = item
    yield from write_table(
        " | ".join(("device", "model", *map(approximate_bytes, memories))),
        ((*name, *(_show(cells.get(size)) for size in memories)) for name, cells in rows.items()),
    )
    reasons = {item.code: item.reason for item in outcomes if item.code not in (None, "P350")}
    for code, reason in reasons.items():
        yield f"{code}: {reason}"


def _show(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.simulated_tokens_s is None:
        return "-" if outcome.code == "P350" else outcome.code or "-"
    return approximate_number(outcome.simulated_tokens_s)


def write_matrix(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A Markdown table, which device runs what: the fastest cell of each device and model."""
    yield "Fastest tokens/s, simulated, and the memory it takes; `-`: no plan fits."
    yield ""
    devices, models = list_names(outcomes)
    best = find_fastest(outcomes)

    def show(found: Outcome | None) -> str:
        return "-" if found is None else f"{_show(found)} ({approximate_bytes(found.memory_bytes)})"

    rows = [(device, *(show(best.get((device, model))) for model in models)) for device in devices]
    yield from write_table(" | ".join(("device", *models)), rows)


def list_names(outcomes: Sequence[Outcome]) -> tuple[list[str], list[str]]:
    """Devices and models, in order."""
    devices = dict.fromkeys(item.device for item in outcomes)
    return list(devices), list(dict.fromkeys(item.model for item in outcomes))


def find_fastest(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], Outcome]:
    """The fastest cell of each device and model; of equal ones that with the least memory."""
    found: dict[tuple[str, str], Outcome] = {}
    for item in sorted(outcomes, key=lambda item: item.memory_bytes):
        old = found.get((item.device, item.model))
        speed = item.simulated_tokens_s
        if speed is not None and (old is None or speed > (old.simulated_tokens_s or 0.0) * 1.01):
            found[item.device, item.model] = item
    return found


def draw_matrix(outcomes: Sequence[Outcome], form: str) -> bytes:
    """Draw the speed of each model on each device; UserError P632 without matplotlib."""
    figure = make_figure(4.0, 1.5)
    devices, models = list_names(outcomes)
    # Long names lie below and beside the fields, and take nothing of them.
    below, beside = (max(map(len, names), default=0) for names in (models, devices))
    figure.set_size_inches(
        1.8 + 0.08 * beside + 1.6 * len(models), 1.3 + 0.03 * below + 0.5 * len(devices)
    )
    best = find_fastest(outcomes)
    found = {name: item.simulated_tokens_s or 0.0 for name, item in best.items()}
    speeds = [[found.get((device, model), 0.0) for model in models] for device in devices]
    axes = figure.add_subplot()
    axes.imshow(speeds, cmap="Blues", aspect="auto", vmin=0.0)
    axes.set_xticks(range(len(models)), models, rotation=20, ha="right")
    axes.set_yticks(range(len(devices)), devices)
    most = max((speed for row in speeds for speed in row), default=0.0)
    for y, device in enumerate(devices):
        for x, model in enumerate(models):
            item, speed = best.get((device, model)), speeds[y][x]
            text = "-"
            if item is not None:
                text = f"{approximate_number(speed)}\n{approximate_bytes(item.memory_bytes)}"
            colour = "white" if speed > 0.6 * most else "black"
            axes.text(x, y, text, ha="center", va="center", fontsize="small", color=colour)
    axes.set_title("Tokens/s, simulated, and the memory they take")
    return save_figure(figure, form)


def draw_summary(outcomes: Sequence[Outcome], form: str) -> bytes:
    """Speed over memory, a picture per device; UserError P632 without matplotlib."""
    devices, models = list_names(outcomes)
    styles = dict(zip(models, pick_styles(len(models)), strict=True))  # the same on every device
    figure = make_figure(9.0, max(3.0, 0.25 * len(models)) * len(devices))
    memories = [item.memory_bytes / 2**30 for item in outcomes]
    room = 0.03 * (max(memories) - min(memories)) or 0.5
    for number, device in enumerate(devices):
        axes = figure.add_subplot(len(devices), 1, number + 1)
        own = [item for item in outcomes if item.device == device]
        for model, style in styles.items():
            points = [
                (item.memory_bytes / 2**30, item.simulated_tokens_s)
                for item in own
                if item.model == model and item.simulated_tokens_s is not None
            ]
            if points:
                axes.plot([x for x, _ in points], [y for _, y in points], label=model, **style)
        axes.set_title(f"{device}, simulated")
        axes.set_xlabel("memory (GiB)")
        axes.set_ylabel("tokens/s")
        axes.set_ylim(bottom=0.0)
        axes.set_xlim(min(memories) - room, max(memories) + room)
        axes.grid(alpha=0.3)
        if axes.lines:
            add_legend(axes)
    return save_figure(figure, form)
