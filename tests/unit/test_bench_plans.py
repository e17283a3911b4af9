"""A plan under test: what is timed, what is counted, and the command `pi2 bench`."""

import json
from pathlib import Path

import numpy as np
import pytest

from pi2.arrays import F32, I32
from pi2.cli import main
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.measuring.contestant import BandwidthMeter
from pi2.measuring.report import Workload
from pi2.measuring.session import PlanContestant
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table


def load_contestant(path: Path, text: str | None = None, **overrides: object) -> PlanContestant:
    return PlanContestant(path, overrides, text)


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
        assert answer.counters is not None and answer.counters.possible_neurons == 5 * 3 * 96
    finally:
        contestant.close()


def test_a_context_is_filled_once_for_all_repetitions(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contestant = load_contestant(plan)
    forward, filled = contestant._model._parts.forward, []
    prefill = forward.prefill

    def fill(tokens: I32, *, sequence: int = 0) -> F32:
        filled.append((sequence, len(tokens)))
        return prefill(tokens, sequence=sequence)

    monkeypatch.setattr(forward, "prefill", fill)
    try:
        for depth in (20, 20, 9, 20):
            contestant.run(Workload("tg", 5, depth))
            assert forward.positions[0] == depth + 5
        assert filled == [(0, 20), (0, 9), (0, 20)]
        contestant.run(Workload("pp", 6, 20))
        assert filled[3:] == [(0, 20), (0, 6)], "a prompt is read behind a context of its own"
    finally:
        contestant.close()


def test_a_dry_run_says_so_and_claims_no_bytes(plan: Path) -> None:
    contestant = load_contestant(plan, backends={"cpu": "null"})
    assert contestant.describe().notes == ("dry run: nothing was computed or read",)
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
    parts = contestant._model._parts
    profile = contestant.profile(Workload("tg", 6, 0))
    assert profile is not None and profile.calls["attend"][0] == 6 * 3
    assert profile.calls["head"][0] == 6
    assert profile.kernels_s == pytest.approx(sum(s for _, s in profile.calls.values()))
    assert 0 < profile.kernels_s < profile.total_s
    assert profile.io_wait_s > 0, "cold neurons had to be waited for"
    assert 0 < profile.python_s < profile.total_s
    assert parts.executor._observer is None
    assert parts.reader._observer is None  # type: ignore[union-attr]
    contestant.close()


# The limit


def test_bandwidth_is_measured_with_a_compiled_loop_that_reads_every_number() -> None:
    pytest.importorskip("tvm")
    from pi2.measuring.read_kernel import CompiledReader

    buffer = np.arange(64 * 1000, dtype=np.uint64)
    reader = CompiledReader(buffer, threads=2)
    reader()
    assert reader.sums.sum(dtype=np.int32) == buffer.view(np.int32).sum(dtype=np.int32)


def test_bandwidth_falls_back_to_numpy_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pi2.measuring.read_kernel", None)
    meter = BandwidthMeter(2, 2**24)
    assert meter.get_method() == "numpy maximum"
    assert all(speed > 1e7 for speed in meter.measure())
    meter.close()


# The command


@pytest.mark.slow
def test_the_command_prints_rows_of_a_real_run(
    plan: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi2.measuring.session.BUFFER_BYTES", 2**24)
    options = ["--prompt-tokens", "8", "-n", "4", "-r", "2", "-d", "0,3", "--format", "json"]
    document = json.loads(ask(["bench", str(plan), *options]).out)
    tests = {row["test"]: row for row in document["rows"]}
    assert list(tests) == ["pp8", "pp8 @ d3", "tg4", "tg4 @ d3"]
    row = tests["tg4 @ d3"]
    assert row["digest"] == load_plan(plan).digest and row["peak_rss_bytes"] > 2**20
    assert row["bandwidth"]["bytes_s"] > 1e7 and 0 < row["limit_share"] < 1
    assert len(row["seconds"]) == 2
    assert tests["pp8"]["limit_share"] is None


def test_sequences_are_timed_together_and_share_what_is_read(plan: Path) -> None:
    contestant = PlanContestant(plan, {"decode.batch": 3})
    few, many = (Workload("tg", 4, 2, count) for count in (1, 3))
    one, three = contestant.run(few), contestant.run(many)
    assert (one.tokens, three.tokens) == (4, 12)
    bytes_of = [contestant.count_bytes(workload, 0.25) for workload in (few, many)]
    contestant.close()
    assert bytes_of[0] is not None and bytes_of[1] is not None
    assert bytes_of[1].head == pytest.approx(bytes_of[0].head / 3)
    assert bytes_of[1].neurons < bytes_of[0].neurons


@in_table
def test_what_cannot_be_measured_is_explained(
    plan: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main.run(["bench", str(plan), "--prompt-tokens", "0", *arguments]) == 2
    assert message in capsys.readouterr().err
