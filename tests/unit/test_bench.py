"""Benchmarks: what is timed, what is counted, what is printed."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.benchmarks.bandwidth import BandwidthMeter
from pi2.benchmarks.plan_contestant import PlanContestant, PlanRecipe
from pi2.benchmarks.profile import Profile
from pi2.benchmarks.report import (
    Conditions,
    describe_row,
    write_csv,
    write_json,
    write_markdown,
)
from pi2.benchmarks.samples import (
    Bandwidth,
    Description,
    Row,
    Sample,
    TokenBytes,
    add_counters,
    summarise_speed,
)
from pi2.benchmarks.session import Outcome, run_session
from pi2.benchmarks.token_bytes import count_dense_bytes, count_token_bytes
from pi2.benchmarks.worker import Worker
from pi2.benchmarks.workloads import TokenSource, Workload, list_workloads
from pi2.cli import main
from pi2.diagnostics import UserError
from pi2.engine.statistics import RunStatistics
from pi2.plan.resolve import load_plan
from pi2.store.reader import NeuronStore
from tests.helpers.models import make_model, make_tiny
from tests.helpers.plans import write_plan

Progress = Callable[[str, float], None]


def count(**changes: int) -> RunStatistics:
    zero = dict.fromkeys(RunStatistics.__dataclass_fields__, 0)
    return RunStatistics(**{**zero, **changes})


# Workloads


def test_workloads_are_named_as_in_llama_bench() -> None:
    names = [item.name for item in list_workloads([128, 512], [64], [0, 256])]
    assert names == ["pp128", "pp512", "pp128 @ d256", "pp512 @ d256", "tg64", "tg64 @ d256"]


def test_lengths_of_zero_are_left_out() -> None:
    assert [item.name for item in list_workloads([0], [16], [0])] == ["tg16"]


def test_tokens_walk_through_the_vocabulary_and_never_end_a_text() -> None:
    source = TokenSource.walk_vocabulary(100, without=[30])
    first, second = source.take(60), source.take(80)
    assert list(first[:3]) == [24, 25, 26]
    assert 30 not in first
    assert second[0] == first[-1] + 1, "repetitions go on where the last one stopped"
    assert len({*first, *second}) == 99


# Figures


def test_speed_is_mean_deviation_and_median_of_the_repetitions() -> None:
    samples = [Sample(tokens=10, seconds=seconds) for seconds in (1.0, 2.0, 10.0)]
    speed = summarise_speed(samples)
    assert speed.mean == pytest.approx((10 + 5 + 1) / 3)
    assert speed.median == pytest.approx(5)
    assert speed.deviation == pytest.approx(np.std([10, 5, 1], ddof=1))


def test_counters_of_repetitions_are_added() -> None:
    samples = [
        Sample(tokens=1, seconds=1.0, counters=count(active_neurons=number)) for number in (3, 4)
    ]
    total = add_counters(samples)
    assert total is not None and total.active_neurons == 7
    assert add_counters([Sample(tokens=1, seconds=1.0)]) is None


def make_row(**changes: Any) -> Row:
    description = Description(
        engine="pi2 1.0",
        model="tiny",
        backend="cpu",
        threads=2,
        synthetic=True,
        predictor="gate",
        plan="tiny.plan.toml",
        digest="f00d" * 16,
        budget_bytes=2**30,
    )
    fields: dict[str, Any] = {
        "description": description,
        "workload": Workload("tg", 10, 0),
        "samples": (Sample(tokens=10, seconds=2.0, counters=count(flash_read_bytes=50)),),
        "peak_rss_bytes": 2**29,
        "token_bytes": TokenBytes(attention=4e8, head=1e8, predictor=2e8, neurons=2e8, kv=1e8),
        "bandwidth": Bandwidth(bytes_s=1e10, threads=2, method="compiled sum"),
    }
    return Row(**{**fields, **changes})


def test_the_limit_share_is_bytes_per_second_over_bandwidth() -> None:
    row = make_row()
    assert row.total_bytes == 1e9
    assert row.used_bytes_s == pytest.approx(5e9)
    assert row.limit_share == pytest.approx(0.5)
    assert row.flash_bytes_token == 5


def test_what_is_not_known_is_none_never_a_number() -> None:
    row = make_row(token_bytes=None, bandwidth=None, samples=(Sample(tokens=10, seconds=2.0),))
    described = describe_row(row)
    for name in ("limit_share", "used_bytes_s", "active_share", "hit_rate", "flash_bytes_token"):
        assert described[name] is None, name


# Bytes per token


@pytest.fixture(params=["tied", "untied"])
def tiny_plan(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    changes = {"tied_head": request.param == "tied", "attention": {"qkv_bias": True}}
    return write_plan(tmp_path, make_tiny(tmp_path, changes))


def measure_tensors(path: Path) -> dict[str, int]:
    """Bytes of the store's tensors as they lie in the file."""
    resolved = load_plan(path)
    with NeuronStore.open(resolved.store_path, model=resolved.model) as store:
        return {
            name: tensor.weights.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)
            for name, tensor in store.tensors.items()
        }


@pytest.mark.parametrize("mode", ["none", "gate", "low-rank"])
def test_bytes_of_a_token_are_those_of_the_stores_tensors(tiny_plan: Path, mode: str) -> None:
    resolved = load_plan(tiny_plan, overrides={"decode.predictor": mode})
    model, used = resolved.model, resolved.bundle.used_bytes
    found = count_token_bytes(resolved, ranks=[32] * 3, active=0.25, position=10)
    assert found is not None
    sizes = measure_tensors(tiny_plan)
    vocab, ffn, layers = model.shape.vocab, model.shape.ffn, model.shape.layers
    predictors = sum(size for name, size in sizes.items() if "predictor" in name)
    layer_tensors = sum(size for name, size in sizes.items() if name.startswith("layers."))
    assert found.attention == pytest.approx(
        layer_tensors - predictors + sizes["final_norm"] + sizes["embedding"] / vocab
    )
    assert found.head == sizes["embedding" if model.tied_head else "head"]
    assert found.kv == 2 * layers * 10 * model.shape.kv_heads * model.shape.head_dim * 2
    neurons = layers * ffn
    assert (found.predictor, found.neurons) == {
        "none": (0, neurons * used),
        "gate": (neurons * used / 3, neurons * 0.25 * used * 2 / 3),
        "low-rank": (predictors, neurons * 0.25 * used),
    }[mode]


def test_a_sliding_window_bounds_the_context_that_is_read(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"attention": {"sliding_window": 8}})
    resolved = load_plan(write_plan(tmp_path, tiny))
    full, longer = (
        count_token_bytes(resolved, ranks=[32] * 3, active=0.1, position=position)
        for position in (8, 40)
    )
    assert full is not None
    assert full == longer


def test_sparse_bytes_are_unknown_without_a_measured_share(tiny_plan: Path) -> None:
    resolved = load_plan(tiny_plan)
    assert count_token_bytes(resolved, ranks=[32] * 3, active=None, position=1) is None


def test_a_dense_engine_reads_what_a_dense_plan_reads(tiny_plan: Path) -> None:
    resolved = load_plan(tiny_plan, overrides={"decode.predictor": "none"})
    ours = count_token_bytes(resolved, ranks=[32] * 3, active=None, position=5)
    theirs = count_dense_bytes(resolved.model, position=5)
    assert ours == theirs


# The course of a session


@dataclass
class FakeContestant:
    name: str
    log: list[str]
    seconds: list[float]
    description: Description = field(init=False)

    def __post_init__(self) -> None:
        self.description = Description(
            engine=self.name, model="m", backend="b", threads=1, synthetic=False
        )

    def run(self, workload: Workload) -> Sample:
        self.log.append(f"{self.name} {workload.name}")
        return Sample(tokens=workload.tokens, seconds=self.seconds.pop(0))

    def profile(self, workload: Workload) -> Profile | None:
        self.log.append(f"{self.name} profile")
        return None

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        return None

    def read_peak_rss_bytes(self) -> int:
        return 1


@dataclass
class FakeLimit:
    log: list[str]
    speeds: list[float]

    def measure(self) -> list[float]:
        self.log.append("limit")
        return [self.speeds.pop(0)]

    def summarise(self, speeds: list[float]) -> Bandwidth:
        return Bandwidth(bytes_s=float(np.median(speeds)), threads=1, method="fake")


def test_contestants_take_turns_after_a_warm_up_with_the_limit_in_between() -> None:
    log: list[str] = []
    a = FakeContestant("a", log, [99.0, 1.0, 2.0])
    b = FakeContestant("b", log, [99.0, 4.0, 8.0])
    outcomes = list(
        run_session(
            [a, b],
            [Workload("tg", 8, 0)],
            repetitions=2,
            limit=FakeLimit(log, [3e9, 9e9, 5e9]),
        )
    )
    assert log == [
        *("a tg8", "b tg8"),
        *("limit", "a tg8", "b tg8", "a tg8", "b tg8", "limit", "limit"),
    ]
    rows = [item.row for item in outcomes]
    assert [row.description.engine for row in rows] == ["a", "b"]
    assert rows[0].speed.median == pytest.approx((8 + 4) / 2), "the warm-up of 99 s is left out"
    assert rows[1].speed.median == pytest.approx((2 + 1) / 2)
    assert rows[0].bandwidth is not None and rows[0].bandwidth.bytes_s == 5e9


def test_profiles_are_made_after_the_timed_runs_and_only_if_asked_for() -> None:
    log: list[str] = []
    a = FakeContestant("a", log, [1.0] * 3)
    run = run_session(
        [a],
        [Workload("pp", 8, 0)],
        repetitions=2,
        limit=FakeLimit(log, [1.0] * 3),
        with_profile=True,
    )
    assert len(list(run)) == 1
    assert log[-1] == "a profile"
    assert log.count("a profile") == 1


# Processes


@dataclass(frozen=True)
class Echo:
    """A recipe, and what it makes."""

    fault: str = ""

    def __call__(self, progress: Progress) -> Echo:
        progress("loading", 0.5)
        if self.fault == "user":
            raise UserError.of("P999", "no such thing", help="look elsewhere")
        if self.fault == "bug":
            raise ZeroDivisionError("a bug")
        return self

    def double(self, value: int) -> int:
        if value < 0:
            raise UserError.of("P998", "negative")
        return 2 * value

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        pass


def test_objects_are_called_in_a_process_of_their_own() -> None:
    seen: list[tuple[str, float]] = []
    worker = Worker(Echo(), lambda label, share: seen.append((label, share)))
    try:
        assert worker.call("double", 21) == 42
        assert worker.read_peak_rss_bytes() > 2**20
    finally:
        worker.close()
    assert seen == [("loading", 0.5)]


def test_a_users_mistake_arrives_as_what_it_was() -> None:
    with pytest.raises(UserError) as caught:
        Worker(Echo(fault="user"))
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.help) == ("P999", "look elsewhere")
    assert caught.value.exit_code == 2

    worker = Worker(Echo())
    with pytest.raises(UserError, match="negative"):
        worker.call("double", -1)
    worker.close()


def test_a_bug_arrives_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug"):
        Worker(Echo(fault="bug"))


def test_a_process_that_the_system_kills_is_explained() -> None:
    worker = Worker(Echo())
    with pytest.raises(UserError) as caught:
        worker.call("die")
    assert caught.value.diagnostics[0].code == "P640"
    assert "ended by SIGKILL" in caught.value.diagnostics[0].message
    assert "memory" in (caught.value.diagnostics[0].help or "")
    worker.close()


# A plan under test


def load_contestant(path: Path, text: str | None = None, **overrides: object) -> PlanContestant:
    recipe = PlanRecipe(path=path, overrides=overrides, text=text)
    return recipe(lambda label, share: None)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path, make_tiny(tmp_path))


def test_a_plan_is_timed_and_its_counters_are_those_of_the_timed_tokens(plan: Path) -> None:
    contestant = load_contestant(plan)
    try:
        description = contestant.describe()
        assert (description.backend, description.predictor) == ("reference", "low-rank")
        assert description.digest == load_plan(plan).digest
        prompt = contestant.run(Workload("pp", 12, 4))
        assert (prompt.tokens, prompt.seconds > 0) == (12, True)
        assert prompt.counters is not None and prompt.counters.possible_neurons == 0
        answer = contestant.run(Workload("tg", 5, 7))
        assert answer.counters is not None
        assert answer.counters.possible_neurons == 5 * 3 * 96
    finally:
        contestant.close()


def test_a_dry_run_says_so_and_claims_no_bytes(plan: Path) -> None:
    contestant = load_contestant(plan, backends={"cpu": "null"})
    assert contestant.describe().notes == ("dry run: nothing is computed or read",)
    assert contestant.count_bytes(Workload("tg", 4, 0), 0.1) is None
    contestant.close()


def test_more_tokens_than_the_context_holds_are_refused(plan: Path) -> None:
    contestant = load_contestant(plan)
    with pytest.raises(UserError) as caught:
        contestant.run(Workload("tg", 32, 40))
    assert caught.value.diagnostics[0].code == "P642"
    assert "72 tokens of context, the plan has 64" in caught.value.diagnostics[0].message
    contestant.close()


def test_tokens_may_come_from_a_text(plan: Path) -> None:
    contestant = load_contestant(plan, text="ab")
    tokens = contestant._tokens.take(5)
    expected = contestant._model.encode("ab")
    assert list(tokens) == [*expected, *expected][:5]
    contestant.close()


def test_a_profile_divides_the_time_and_leaves_nothing_behind(plan: Path) -> None:
    contestant = load_contestant(plan)
    model = contestant._model
    before = [dict(vars(item)) for item in (model._parts.forward, model._parts.feed_forward)]
    profile = contestant.profile(Workload("tg", 6, 0))
    assert profile is not None and profile.level == "executor calls"
    assert profile.calls["attend"][0] == 6 * 3
    assert profile.calls["logits"][0] == 6
    assert profile.kernels_s == pytest.approx(sum(s for _, s in profile.calls.values()))
    assert 0 < profile.kernels_s < profile.total_s
    assert profile.io_wait_s > 0, "cold neurons had to be waited for"
    assert 0 < profile.python_s < profile.total_s
    after = [dict(vars(item)) for item in (model._parts.forward, model._parts.feed_forward)]
    for old, new in zip(before, after, strict=True):
        assert old["_executor"] is new["_executor"]
        assert old.get("_reader") is new.get("_reader")
    contestant.close()


def test_waiting_for_long_reads_of_a_prompt_is_counted(plan: Path) -> None:
    contestant = load_contestant(plan)
    profile = contestant.profile(Workload("pp", 16, 0))
    assert profile is not None and profile.io_wait_s > 0
    contestant.close()


# The limit


def test_bandwidth_is_measured_with_a_compiled_loop_that_reads_every_number() -> None:
    pytest.importorskip("tvm")
    from pi2.benchmarks.read_kernel import CompiledReader

    buffer = np.arange(64 * 1000, dtype=np.uint64)
    reader = CompiledReader(buffer, threads=2)
    reader()
    assert reader.sums.sum(dtype=np.int32) == buffer.view(np.int32).sum(dtype=np.int32)


def test_bandwidth_falls_back_to_numpy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pi2.benchmarks.read_kernel", None)
    meter = BandwidthMeter(2, 2**24)
    assert meter.get_method() == "numpy maximum"
    assert all(speed > 1e7 for speed in meter.measure())
    meter.close()


# Reports

CONDITIONS = Conditions(
    machine="a machine", started="2026-01-01 00:00 UTC", load_average=0.1, tokens="in order"
)


def list_outcomes() -> Sequence[Outcome]:
    other = Description(engine="llama.cpp", model="tiny", backend="cpu", threads=2, synthetic=True)
    profile = Profile(
        tokens=10,
        total_s=2.0,
        kernels_s=1.9,
        io_wait_s=0.06,
        level="kernels",
        calls={"attend": (30, 1.0)},
    )
    return [
        Outcome(row=make_row(), profile=profile),
        Outcome(
            row=make_row(
                description=other,
                samples=(Sample(tokens=10, seconds=4.0),),
                token_bytes=None,
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
    assert "tg10: 2.00 x llama.cpp (5.00 against 2.50 t/s" in text
    assert "95.0%" in text and "3.0%" in text and "2.0%" in text
    assert "digest f00df00df00d" in text
    assert "a machine" in text
    assert "synthetic: random weights" in text


def test_json_and_csv_hold_every_figure() -> None:
    outcomes = list_outcomes()
    document = json.loads(write_json(CONDITIONS, outcomes))
    assert document["conditions"]["machine"] == "a machine"
    row = document["rows"][0]
    assert row["tokens_s"]["median"] == 5.0
    assert row["token_bytes"]["total"] == 1e9
    assert row["profile"]["python_s"] == pytest.approx(0.04)
    assert document["rows"][1]["token_bytes"] is None

    lines = list(csv.DictReader(io.StringIO(write_csv(CONDITIONS, outcomes))))
    assert [line["engine"] for line in lines] == ["pi2 1.0", "llama.cpp"]
    assert float(lines[0]["tokens_s.median"]) == 5.0
    assert lines[1]["token_bytes.total"] == ""


# The command


@pytest.mark.slow
def test_the_command_prints_rows_of_a_real_run(
    plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi2.benchmarks.plans.BUFFER_BYTES", 2**24)
    code = main.run(
        ["bench", str(plan), "-p", "8", "-n", "4", "-r", "2", "-d", "0,3", "-o", "json"]
    )
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    tests = {row["test"]: row for row in document["rows"]}
    assert list(tests) == ["pp8", "pp8 @ d3", "tg4", "tg4 @ d3"]
    row = tests["tg4 @ d3"]
    assert row["digest"] == load_plan(plan).digest
    assert row["peak_rss_bytes"] > 2**20
    assert row["bandwidth"]["bytes_s"] > 1e7
    assert 0 < row["limit_share"] < 1
    assert len(row["seconds"]) == 2
    assert tests["pp8"]["limit_share"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "12x"], "expected whole numbers such as 128,512"),
        (["--text", "missing.txt"], "cannot read the text missing.txt"),
        (["-n", "4000"], "needs 4000 tokens of context, the plan has 64"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    plan: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main.run(["bench", str(plan), "-p", "0", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_engine_is_named_with_how_to_install_it(
    plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main.run(["bench", str(plan), "--against", "llama.cpp"]) == 2
    error = capsys.readouterr().err
    assert "error[P653]: comparing with llama.cpp needs llama-cpp-python and gguf" in error
    assert "pip install" in error


def test_a_mixture_reads_the_experts_of_a_token() -> None:
    one, mixture = (
        count_dense_bytes(make_model(changes), position=1)
        for changes in ({}, {"moe": {"experts": 4, "active_experts": 2}})
    )
    assert mixture.neurons == 2 * one.neurons
    assert mixture.attention == one.attention + 3 * 4 * 4 * 64, "the routers"
