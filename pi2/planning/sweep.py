"""Plan and simulate a grid of devices, models and memories, in several processes or on Ray.

Every finished cell is a line of a file beside the results, written at once: a sweep that was
killed goes on where it was.  At the end all cells become one Parquet file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pi2.diagnostics import UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.planning.program import import_solver
from pi2.planning.workers import WorkersLost, run_in_processes, run_on_ray
from pi2.progress import Progress
from pi2.sharing.files import write_atomically

ATTEMPTS = 3
"""Times that cells are started again after a process was lost."""

Place = Literal["processes", "ray"]


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
    cells: Sequence[Cell],
    output: Path,
    *,
    jobs: int | None,
    progress: Progress,
    on: Place = "processes",
) -> list[Outcome]:
    """Run what is not done yet, write ``output`` (Parquet), and return all outcomes in order.

    Raises `UserError` P352 without the solver, P353 where workers are lost again and again; what
    was done is kept.
    """
    journal = output.with_name(f"{output.name}.cells")
    known = read_journal(journal)
    waiting = [cell for cell in cells if cell.key not in known]
    if waiting:
        import_solver()
    output.parent.mkdir(parents=True, exist_ok=True)
    attempts = 0
    with journal.open("a", encoding="utf-8") as file:
        if file.tell():
            file.write("\n")  # the last line of a sweep that was killed may be cut off
        while waiting:
            try:
                for outcome in _run_cells(waiting, jobs, on):
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
    found = [known[cell.key] for cell in cells]
    write_parquet(output, found)
    journal.unlink(missing_ok=True)
    return found


def _run_cells(cells: Sequence[Cell], jobs: int | None, on: Place) -> Iterator[Outcome]:
    if on == "ray":
        return run_on_ray(run_cell, cells, jobs)
    return run_in_processes(run_cell, cells, jobs or os.cpu_count() or 1)


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


def _simulate(resolved: ResolvedPlan, cell: Cell) -> dict[str, Any]:
    """Simulated speed and times between tokens."""
    from pi2.simulate import read_inputs, simulate

    # In a folder that is not there: no store of the same name is looked at.
    unstored = replace(resolved, path=Path("sweep/sweep.plan.toml"))
    result = simulate(read_inputs(unstored), tokens=cell.tokens)
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
