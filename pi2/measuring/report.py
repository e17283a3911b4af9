"""Figures of timed runs, as Markdown, JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pi2.arrays import I32
from pi2.engine.accounts import TokenBytes
from pi2.engine.statistics import RunStatistics, divide
from pi2.machine import Machine, detect_machine
from pi2.plan.documents.quantities import approximate_bytes

if TYPE_CHECKING:
    from pi2.measuring.session import Outcome

Kind = Literal["pp", "tg"]
"""``pp``: a prompt is processed; ``tg``: tokens are generated one by one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One test, as in llama-bench: ``pp512``, ``tg64``, ``tg64 @ d512``."""

    kind: Kind
    tokens: int
    """Tokens that are timed."""
    depth: int
    """Tokens that are in the KV cache before the clock starts."""
    sequences: int | None = None
    """Sequences that generate at the same time; None: as many as the plan says."""

    @property
    def name(self) -> str:
        times = "" if self.sequences is None else f" x {self.sequences}"
        behind = f" @ d{self.depth}" if self.depth else ""
        return f"{self.kind}{self.tokens}{times}{behind}"

    @property
    def mean_position(self) -> float:
        return self.depth + (self.tokens + 1) / 2


def list_workloads(
    prompts: Sequence[int],
    answers: Sequence[int],
    depths: Sequence[int],
    sequences: Sequence[int | None] = (None,),
) -> list[Workload]:
    """All prompts, then all answers, at all depths and ``sequences``; lengths of 0 are left out."""
    return [
        *(Workload("pp", length, depth) for depth in depths for length in prompts if length),
        *(
            Workload("tg", length, depth, count)
            for depth in depths
            for length in answers
            if length
            for count in sequences
        ),
    ]


class TokenSource:
    """Endless tokens, equal for every program and new for the cache in each repetition."""

    def __init__(self, tokens: I32) -> None:
        assert len(tokens) > 0
        self._tokens = tokens
        self._place = 0

    @classmethod
    def walk_vocabulary(cls, vocab: int, without: Sequence[int] = ()) -> TokenSource:
        """The vocabulary in order without some tokens, starting behind bytes and marks."""
        tokens = np.setdiff1d(np.arange(vocab, dtype=np.int32), np.array(without, np.int32))
        return cls(np.roll(tokens, -min(1000, len(tokens) // 4)))

    def take(self, count: int) -> I32:
        """The next ``count`` tokens, int32 [count]."""
        places = (self._place + np.arange(count)) % len(self._tokens)
        self._place = (self._place + count) % len(self._tokens)
        return self._tokens[places]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    tokens: int
    seconds: float
    counters: RunStatistics | None = None
    """What the engine counted meanwhile, where it is ours."""
    busy_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of work of each unit but the sparse one, by its name."""

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second over repetitions."""

    mean: float
    deviation: float
    """Sample standard deviation; 0 for a single repetition."""
    median: float
    repetitions: int


def summarise_speed(samples: Sequence[Sample]) -> Speed:
    speeds = [sample.tokens_s for sample in samples]
    return Speed(
        mean=statistics.fmean(speeds),
        deviation=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        median=statistics.median(speeds),
        repetitions=len(speeds),
    )


def add_counters(samples: Sequence[Sample]) -> RunStatistics | None:
    """Counters of all repetitions together; None where nothing is counted."""
    counted = [sample.counters for sample in samples if sample.counters is not None]
    return reduce(add, counted) if counted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a program says about itself when it is ready."""

    engine: str
    """Name and version of the engine."""
    model: str
    """Short name of the model."""
    backend: str
    threads: int
    synthetic: bool
    """Whether weights are random: the figures then say nothing about text."""
    predictor: str | None = None
    batch: int = 1
    """Sequences that generate at the same time; their tokens are counted together."""
    plan: str | None = None
    """Path of the plan."""
    digest: str | None = None
    """Digest of the plan."""
    budget_bytes: int | None = None
    """Highest resident set that the plan allows."""
    load_s: float | None = None
    notes: tuple[str, ...] = ()
    """What a reader of the figures has to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Read bandwidth of the memory, measured between repetitions."""

    bytes_s: float
    """Bytes per second: median of the measurements."""
    threads: int
    method: str
    """Method of reading: a compiled kernel, or numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    description: Description
    workload: Workload
    samples: tuple[Sample, ...]
    peak_rss_bytes: int
    token_bytes: TokenBytes | None = None
    """None where it is not known, and for prompts, which are bound by arithmetic."""
    bandwidth: Bandwidth | None = None

    @property
    def speed(self) -> Speed:
        return summarise_speed(self.samples)

    @property
    def sequences(self) -> int:
        """Sequences whose tokens are counted together: prompts are read one after the other."""
        if self.workload.kind == "pp":
            return 1
        return self.workload.sequences or self.description.batch

    @property
    def counters(self) -> RunStatistics | None:
        return add_counters(self.samples)


UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    machine: str
    """Description of processor, cores, memory and system."""
    started: str
    """Date and time of the start, UTC."""
    load_average: float | None
    """Programs that wanted to run in the minute before: more than 0 disturbs the figures."""
    tokens: str
    """Source of the tokens."""


def write_json(conditions: Conditions, outcomes: Sequence[Outcome]) -> str:
    rows = []
    for item in outcomes:
        found, profile = describe_row(item.row), item.profile
        found["profile"] = profile and {
            **asdict(profile),
            "kernels_s": profile.kernels_s,
            "python_s": profile.python_s,
            "calls": {name: {"count": n, "seconds": s} for name, (n, s) in profile.calls.items()},
        }
        rows.append(found)
    return json.dumps({"conditions": asdict(conditions), "rows": rows}, indent=1)


def write_csv(conditions: Conditions, outcomes: Sequence[Outcome]) -> str:
    """A line per row; nested values have dotted names."""
    rows = [flatten(describe_row(item.row)) for item in outcomes]
    target = io.StringIO()
    names = ["machine", "started", "load_average", *dict.fromkeys(k for row in rows for k in row)]
    writer = csv.DictWriter(target, names, restval="", lineterminator="\n")
    writer.writeheader()
    shared = asdict(conditions)
    for row in rows:
        writer.writerow({**{name: shared[name] for name in names[:3]}, **row})
    return target.getvalue().rstrip("\n")


def write_markdown(conditions: Conditions, outcomes: Sequence[Outcome]) -> str:
    """Tables for people: speed, the parts of the time, and the measured machine."""
    rows = [item.row for item in outcomes]
    blocks = [write_speeds(rows)]
    blocks += write_ratios(rows)
    profiles = [item for item in outcomes if item.profile is not None]
    if profiles:
        blocks.append(write_profiles(profiles))
    blocks.append("\n".join(describe_circumstances(conditions, rows)))
    return "\n\n".join(blocks)


def describe_row(row: Row) -> dict[str, Any]:
    """Everything about a row as plain values; unknown values are None."""
    tokens, counters, limit = row.token_bytes, row.counters, row.bandwidth
    used_bytes_s = None if tokens is None else tokens.total * row.speed.median
    seconds = [sample.seconds for sample in row.samples]
    units = dict.fromkeys(name for sample in row.samples for name in sample.busy_s)
    read = None if counters is None else counters.flash_read_bytes
    return {
        **asdict(row.description),
        "test": row.workload.name,
        "kind": row.workload.kind,
        "tokens": row.workload.tokens,
        "depth": row.workload.depth,
        "tokens_s": asdict(row.speed),
        "sequences": row.sequences,
        "seconds": seconds,
        "token_bytes": None if tokens is None else {**asdict(tokens), "total": tokens.total},
        "used_bytes_s": used_bytes_s,
        "bandwidth": None if limit is None else asdict(limit),
        "limit_share": divide(used_bytes_s, limit.bytes_s) if used_bytes_s and limit else None,
        # Of all neurons, and of the neurons that were computed because a predictor named them.
        "active_share": None if counters is None else counters.active_share,
        "predicted_share": None if counters is None else counters.predicted_share,
        "hit_rate": None if counters is None else counters.hit_rate,
        "busy_shares": {
            name: sum(sample.busy_s.get(name, 0.0) for sample in row.samples) / sum(seconds)
            for name in units
        },
        "flash_bytes_token": None if read is None else read / sum(x.tokens for x in row.samples),
        "peak_rss_bytes": row.peak_rss_bytes,
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted names; lists as texts."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            flat[prefix + name] = " ".join(str(item) for item in value)
        else:
            flat[prefix + name] = value
    return flat


def write_speeds(rows: Sequence[Row]) -> str:
    found = [(row, describe_row(row)) for row in rows]
    columns: dict[str, Callable[[Row, dict[str, Any]], str]] = {
        "engine": lambda row, _: _name_engine(row),
        "model": lambda row, _: row.description.model + " (synthetic)" * row.description.synthetic,
        "test": lambda row, _: row.workload.name,
        "t/s": lambda row, _: f"{row.speed.mean:.2f} ± {row.speed.deviation:.2f}",
        "median": lambda row, _: f"{row.speed.median:.2f}",
        "each": lambda row, _: f"{row.speed.median / row.sequences:.2f}",
        "MB/token": lambda _, own: _scale((own["token_bytes"] or {}).get("total"), 1e6, 0),
        "GB/s": lambda _, own: _scale(own["used_bytes_s"], 1e9, 1),
        "limit": lambda _, own: _scale((own["bandwidth"] or {}).get("bytes_s"), 1e9, 1),
        "of limit": lambda _, own: _percent(own["limit_share"]),
        "active": lambda _, own: _percent(own["active_share"]),
        "computed": lambda _, own: _percent(own["predicted_share"]),
        "hits": lambda _, own: _percent(own["hit_rate"]),
        "busy": lambda _, own: _list_shares(own["busy_shares"]),
        "flash MB/token": lambda _, own: _scale(own["flash_bytes_token"], 1e6, 2),
        "peak MiB": lambda row, _: _scale(row.peak_rss_bytes or None, 2**20, 0),
        "budget MiB": lambda row, _: _scale(row.description.budget_bytes, 2**20, 0),
    }
    if all(row.sequences == 1 for row in rows):
        del columns["each"]
    if not any(own["busy_shares"] for _, own in found):
        del columns["busy"]
    cells = [[write(row, own) for write in columns.values()] for row, own in found]
    return _write_table(list(columns), cells, left=3)


def write_ratios(rows: Sequence[Row]) -> list[str]:
    """Ratios of medians that were measured in turns: several sequences to one."""
    lines = []
    for row in rows:
        alone = replace(row.workload, sequences=1)
        for other in rows:
            same = other.description == row.description and other.workload == alone
            if same and row.workload != alone:
                ratio = row.speed.median / other.speed.median
                lines.append(
                    f"- {row.workload.name}: {ratio:.2f} x the tokens of one sequence "
                    f"({row.speed.median:.2f} against {other.speed.median:.2f} t/s)"
                )
    return ["\n".join(lines)] if lines else []


def write_profiles(outcomes: Sequence[Outcome]) -> str:
    heads = ["test", "ms/token", "kernels", "waiting for reads", "Python"]
    with_units = any(item.profile is not None and item.profile.unit_wait_s for item in outcomes)
    if with_units:
        heads.insert(4, "waiting for units")
    cells, calls = [], []
    for item in outcomes:
        profile = item.profile
        assert profile is not None
        total = profile.total_s
        cells.append(
            [
                item.row.workload.name,
                f"{total / profile.tokens * 1e3:.2f}",
                f"{profile.kernels_s / total:.1%}",
                f"{profile.io_wait_s / total:.1%}",
                *([f"{profile.unit_wait_s / total:.1%}"] if with_units else []),
                f"{profile.python_s / total:.1%}",
            ]
        )
        calls += [
            [
                item.row.workload.name,
                name,
                f"{count / profile.tokens:.1f}",
                f"{seconds / profile.tokens * 1e3:.3f}",
                f"{seconds / total:.1%}",
            ]
            for name, (count, seconds) in sorted(
                profile.calls.items(), key=lambda entry: -entry[1][1]
            )
        ]
    tables = [_write_table(heads, cells, left=1)]
    if calls:
        names = ["test", "kernel", "calls/token", "ms/token", "share"]
        tables.append(_write_table(names, calls, left=2))
    return "\n\n".join(tables)


def describe_circumstances(conditions: Conditions, rows: Sequence[Row]) -> list[str]:
    lines = [f"- machine: {conditions.machine}"]
    load = UNKNOWN if conditions.load_average is None else f"{conditions.load_average:.1f}"
    lines.append(f"- started {conditions.started}, load average before: {load}")
    lines.append(f"- tokens: {conditions.tokens}")
    for method in dict.fromkeys(
        f"{row.bandwidth.method}, {row.bandwidth.threads} threads" for row in rows if row.bandwidth
    ):
        lines.append(f"- limit: read bandwidth in the same run ({method})")
    for description in dict.fromkeys(row.description for row in rows):
        parts = [description.engine, description.model]
        if description.plan is not None:
            parts.append(f"plan {description.plan}")
        if description.digest is not None:
            parts.append(f"digest {description.digest[:12]}")
        if description.load_s is not None:
            parts.append(f"loaded in {description.load_s:.1f} s")
        parts += description.notes
        lines.append("- " + ", ".join(parts))
    if any(row.description.synthetic for row in rows):
        lines.append("- synthetic: random weights; the figures say nothing about text")
    return lines


def _name_engine(row: Row) -> str:
    description = row.description
    settings = [description.backend, f"{description.threads} threads"]
    if description.predictor is not None:
        settings.insert(1, description.predictor)
    if description.batch > 1 and row.workload.sequences is None:
        settings.append(f"{description.batch} sequences")
    return f"{description.engine} ({', '.join(settings)})"


def _scale(value: float | None, unit: float, digits: int) -> str:
    return UNKNOWN if value is None else f"{value / unit:.{digits}f}"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _list_shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) or UNKNOWN


def _write_table(heads: Sequence[str], cells: Sequence[Sequence[str]], *, left: int) -> str:
    """A Markdown table that is also readable as it is; the first ``left`` columns are texts."""
    widths = [max(len(text) for text in column) for column in zip(heads, *cells, strict=True)]

    def write(texts: Sequence[str]) -> str:
        padded = [
            text.ljust(width) if number < left else text.rjust(width)
            for number, (text, width) in enumerate(zip(texts, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rules = [
        "-" * (width + 2) if number < left else "-" * (width + 1) + ":"
        for number, width in enumerate(widths)
    ]
    return "\n".join([write(heads), f"|{'|'.join(rules)}|", *(write(line) for line in cells)])


def describe_conditions(text: str | None) -> Conditions:
    """Machine, time and load; ``text`` names the file that tokens are taken from, if any."""
    return Conditions(
        machine=describe_machine(detect_machine()),
        started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        tokens=f"the text {text}" if text else "the vocabulary in order",
    )


def describe_machine(machine: Machine) -> str:
    """One line: processor, cores, features, memory, system."""
    cpu = machine.cpu
    features = " ".join(sorted(cpu.features)) or "no known features"
    memory = approximate_bytes(machine.memory.limit_bytes)
    return f"{cpu.name}, {cpu.cores} cores ({features}), {memory}, {machine.system}"
