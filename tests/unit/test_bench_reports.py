"""What a benchmark prints, and how a row's figures are derived."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pi2.engine.accounts import TokenBytes
from pi2.engine.statistics import RunStatistics
from pi2.measuring.contestant import Profile
from pi2.measuring.report import (
    Bandwidth,
    Conditions,
    Description,
    Row,
    Sample,
    Workload,
    summarise_speed,
    write_csv,
    write_json,
    write_markdown,
)
from pi2.measuring.session import Outcome
from tools.bench_against import write_ratios


def count(**changes: int) -> RunStatistics:
    names = RunStatistics.__dataclass_fields__.keys() - {"speculation"}
    zero: dict[str, Any] = dict.fromkeys(names, 0)
    return RunStatistics(**{**zero, **changes})


def test_speed_is_mean_deviation_and_median_of_the_repetitions() -> None:
    speed = summarise_speed([Sample(tokens=10, seconds=seconds) for seconds in (1.0, 2.0, 10.0)])
    assert speed.mean == pytest.approx((10 + 5 + 1) / 3)
    assert speed.median == pytest.approx(5)
    assert speed.deviation == pytest.approx(np.std([10, 5, 1], ddof=1))


def make_row(**changes: Any) -> Row:
    description = Description(
        engine="pi2 1.0", model="tiny", backend="cpu", threads=2, synthetic=True, predictor="gate",
        plan="tiny.plan.toml", digest="f00d" * 16, budget_bytes=2**30,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "description": description,
        "workload": Workload("tg", 10, 0),
        "samples": (Sample(tokens=10, seconds=2.0, counters=count(flash_read_bytes=50)),),
        "peak_rss_bytes": 2**29,
        "token_bytes": TokenBytes(attention=4e8, head=1e8, predictor=2e8, neurons=2e8, kv=1e8),
        "bandwidth": Bandwidth(bytes_s=1e10, threads=2, method="compiled sum"),
    }
    return Row(**{**fields, **changes})


CONDITIONS = Conditions(
    machine="a machine", started="2026-01-01 00:00 UTC", load_average=0.1, tokens="in order"
)


def list_outcomes() -> Sequence[Outcome]:
    other = Description(engine="llama.cpp", model="tiny", backend="cpu", threads=2, synthetic=True)
    calls = {"attend": (30, 1.0), "head": (10, 0.9)}
    profile = Profile(tokens=10, total_s=2.0, io_wait_s=0.06, calls=calls)
    return [
        Outcome(row=make_row(), profile=profile),
        Outcome(
            row=make_row(
                description=other, samples=(Sample(tokens=10, seconds=4.0),), token_bytes=None
            )
        ),
    ]


def test_markdown_shows_figures_limits_ratios_and_circumstances() -> None:
    text = write_markdown(CONDITIONS, list_outcomes())
    ours, theirs = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(("| pi2", "| llama"))
    ]
    assert ours[:9] == [
        *("pi2 1.0 (cpu, gate, 2 threads)", "tiny (synthetic)", "tg10"),
        *("5.00 ± 0.00", "5.00", "1000", "5.0", "10.0", "50.0%"),
    ]
    assert theirs[5:9] == ["-", "-", "10.0", "-"], "what is not known is a dash"
    (ratio,) = write_ratios([item.row for item in list_outcomes()])
    assert "tg10: 2.00 x llama.cpp (5.00 against 2.50 t/s" in ratio
    assert "95.0%" in text and "3.0%" in text and "2.0%" in text
    assert "digest f00df00df00d" in text and "a machine" in text
    assert "synthetic: random weights" in text


def test_several_sequences_are_compared_with_one_at_the_same_depth() -> None:
    rows = [
        make_row(
            workload=Workload("tg", 10, depth, count),
            samples=(Sample(tokens=10 * count, seconds=seconds),),
        )
        for depth, count, seconds in ((0, 1, 2.0), (0, 4, 4.0), (32, 4, 1.0))
    ]
    text = write_markdown(CONDITIONS, [Outcome(row=row) for row in rows])
    lines = [line for line in text.splitlines() if "of one sequence" in line]
    assert lines == ["- tg10 x 4: 2.00 x the tokens of one sequence (10.00 against 5.00 t/s)"]
    assert "| each" in text.replace("  ", " ")


def test_json_and_csv_hold_every_figure() -> None:
    outcomes = list_outcomes()
    document = json.loads(write_json(CONDITIONS, outcomes))
    assert document["conditions"]["machine"] == "a machine"
    row = document["rows"][0]
    assert (row["tokens_s"]["median"], row["token_bytes"]["total"]) == (5.0, 1e9)
    assert row["profile"]["python_s"] == pytest.approx(0.04)
    assert document["rows"][1]["token_bytes"] is None

    lines = list(csv.DictReader(io.StringIO(write_csv(CONDITIONS, outcomes))))
    assert [line["engine"] for line in lines] == ["pi2 1.0", "llama.cpp"]
    assert float(lines[0]["tokens_s.median"]) == 5.0
    assert lines[1]["token_bytes.total"] == ""
