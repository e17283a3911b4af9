"""`pi2 sparsity calibrate`: thresholds leave out the share that is asked for, and are measured."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit

import pi2
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.measuring.calibration import Goal, calibrate_thresholds
from pi2.measuring.evaluation import evaluate_plan
from pi2.measuring.magnitudes import Histogram
from pi2.measuring.texts import Passages
from pi2.orchestrator import load
from pi2.plan.reading.thresholds import read_thresholds
from pi2.plan.weights.bundles import unpack_part
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs.\n" * 5
LOOSE = "900%"
"""An error that any text keeps."""
SMOOTH = {"predictor": None, "ffn": {"activation": "silu"}}


@pytest.fixture(scope="module", autouse=True)
def _few_timed_tokens() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pi2.measuring.calibration.TIMED", 4)
        yield


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SiLU model, dense, an eighth of its neurons in memory."""
    folder = tmp_path_factory.mktemp("smooth")
    return write_plan(folder, make_tiny(folder, SMOOTH), {"decode": {"predictor": "none"}})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def sparse(plan: Path, text: Path) -> Path:
    """A plan that extends the dense one, with thresholds of half of the gates."""
    made, file = plan.with_name("half.plan.toml"), plan.with_name("half.thresholds.toml")
    command = ["sparsity", "calibrate", str(plan), "--text", str(text), "--target", "0.5"]
    command += ["--context", "32", "--error", LOOSE]
    assert run([*command, "-o", str(file), "--plan", str(made)]) == 0
    return made


def draw(shares: tuple[int, int], seed: int = 0) -> np.ndarray:
    """|act(gate)| and |act(gate) * up| of random neurons."""
    generator = np.random.default_rng(seed)
    gate = generator.standard_normal(shares).astype(np.float32)
    gate = gate / (1 + np.exp(-gate))
    values = np.stack([gate, gate * generator.standard_normal(shares).astype(np.float32)])
    return np.asarray(np.abs(values))


@pytest.mark.parametrize("target", [0.1, 0.5, 0.9])
def test_cats_cuts_at_the_quantile_whatever_the_pieces(target: float) -> None:
    magnitudes = draw((100, 400))
    whole, pieces = Histogram.make("cats"), Histogram.make("cats")
    whole.add(magnitudes)
    for start in range(0, 100, 7):
        pieces.add(magnitudes[:, start : start + 7])
    found = whole.choose(target)
    assert found == pieces.choose(target)
    assert found.gate == pytest.approx(np.quantile(magnitudes[0], target), rel=0.01)
    assert (magnitudes[0] < found.gate).mean() == pytest.approx(target, abs=0.003)
    assert found.down == 0.0


@pytest.mark.parametrize("target", [0.2, 0.5, 0.8])
def test_cats_teal_leaves_out_as_many_bytes_and_loses_less(target: float) -> None:
    magnitudes = draw((100, 400))
    histogram = Histogram.make("cats-teal")
    histogram.add(magnitudes)
    found = histogram.choose(target)
    gates, values = magnitudes
    closed = gates < found.gate
    dropped = closed | (values < found.down)
    assert (closed.mean() + dropped.mean()) / 2 == pytest.approx(target, abs=0.01)
    assert found.computed == pytest.approx(1 - closed.mean(), abs=0.01)
    assert found.active == pytest.approx(1 - dropped.mean(), abs=0.01)
    cats = gates < np.quantile(gates, target)
    assert np.square(values[dropped]).sum() < np.square(values[cats]).sum()


def test_decoding_leaves_out_the_share_that_was_asked_for(sparse: Path) -> None:
    thresholds = read_thresholds(sparse.with_name("half.thresholds.toml"))
    assert [layer.computed for layer in thresholds.layers] == [0.5] * 3
    with pi2.load(sparse) as model:
        assert model.plan.plan.decode.predictor == "gate"
        model.logits(list(TEXT[:60].encode()), mode="decode")
        assert model.stats.predicted_share == pytest.approx(0.5, abs=0.06)
        assert model.stats.flash_read_bytes > 0


def test_what_decodes_is_the_model_with_small_gates_cut(plan: Path, sparse: Path) -> None:
    limits = [
        layer.gate for layer in read_thresholds(sparse.with_name("half.thresholds.toml")).layers
    ]
    tokens = list(TEXT[:20].encode())
    with pi2.load(sparse) as model, pi2.load(plan) as dense:
        got = model.logits(tokens, mode="decode")
        assert np.allclose(model.logits(tokens), dense.logits(tokens), atol=1e-5)
        executor: Any = dense._parts.executor
        rows = []
        for position, token in enumerate(tokens):
            executor.embed(np.array([token], np.int32))
            for layer, stored in enumerate(dense._parts.texts.store.layers):
                executor.attend(layer, position)
                executor.begin_ffn(layer)
                gate = (
                    executor.now.read @ unpack_part(stored.bundles, executor._request.bundle, 0).T
                )
                kept = np.abs(gate / (1 + np.exp(-gate)))[0] >= limits[layer]
                executor.add_dense(layer, stored.bundles[kept])
                executor.end_ffn(layer)
            rows.append(executor.logits(0)[0].copy())
    assert np.abs(got - np.stack(rows)).max() < 1e-4 * np.abs(got).max()


def test_the_file_states_the_perplexity_that_evaluate_measures(sparse: Path) -> None:
    thresholds = read_thresholds(sparse.with_name("half.thresholds.toml"))
    held_out = TEXT[round(len(TEXT) * 0.9) :]
    dense, cut = evaluate_plan(sparse, Passages([held_out], context=32, count=8)).runs
    assert (cut.name, cut.predictor) == ("cats", "gate")
    assert dense.perplexity == pytest.approx(thresholds.perplexity_before, rel=1e-5)
    assert cut.perplexity == pytest.approx(thresholds.perplexity_after, rel=1e-5)
    assert cut.active is not None and cut.predicted is not None
    assert 0.4 < cut.active <= cut.predicted < 0.6


def test_a_loss_is_kept_by_the_largest_share_that_keeps_it(plan: Path) -> None:
    goal = Goal(method="cats-teal", max_increase=0.002)
    found = calibrate_thresholds(
        plan, Passages([TEXT], context=32, count=2, held_out=1), goal=goal, max_error=9.0
    )
    targets = [trial.thresholds.target for trial in found.trials]
    assert targets[0] == 0.5 and len(targets) == 6
    assert found.chosen.increase <= 0.002
    for trial in found.trials:
        assert (trial.increase <= 0.002) == (
            trial.thresholds.target <= found.chosen.thresholds.target
        )
    assert found.chosen.active < found.chosen.computed


def test_a_loss_that_cannot_be_kept_is_a_finding(plan: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("pi2.measuring.calibration.TRIALS", 1)
    monkeypatch.setattr("pi2.measuring.calibration._keeps", lambda trial, goal: False)
    goal = Goal(method="cats", max_increase=1e-3)
    with pytest.raises(UserError, match="P669"):
        calibrate_thresholds(plan, Passages([TEXT], context=32, held_out=1), goal=goal)


def test_the_plan_says_what_is_wanted_and_where_it_goes(
    plan: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = {"method": "cats", "target": 0.25, "thresholds": "quarter.thresholds.toml"}
    asked = plan.with_name("asked.plan.toml")
    room = {"memory": {"segments": {"cold": "48 KiB"}}}
    document = {"schema_version": 3, "extends": [f"./{plan.name}"], "sparsity": wish, **room}
    asked.write_text(tomlkit.dumps({**document, "decode": {"predictor": "gate"}}))
    assert run(["validate", str(asked)]) == 1
    assert "P028" in capsys.readouterr().out
    command = ["sparsity", "calibrate", str(asked), "--text", str(text), "--context", "32"]
    command += ["--error", LOOSE]
    assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["thresholds"] == str(plan.with_name("quarter.thresholds.toml"))
    assert found["trials"][0]["computed"] == pytest.approx(0.75, abs=0.06)
    assert run(["validate", str(asked)]) == 0
    assert run(command) == 2  # what is there stays
    assert "P027" in capsys.readouterr().err


def test_what_few_tokens_say_is_not_stated(
    plan: Path, text: Path, tmp_path: Path, ask: Ask
) -> None:
    """The error must be half of the change at most, or what is asked for."""
    file = tmp_path / "few.thresholds.toml"
    command = ["sparsity", "calibrate", str(plan), "--text", str(text), "--context", "32"]
    command += ["--target", "0.5", "-o", str(file)]
    said = ask(command, 2).err
    assert "P679" in said and "over 31 tokens" in said and "--error" in said
    assert not file.exists()
    assert run([*command, "--error", "1%"]) == 2
    assert run([*command, "--error", LOOSE]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.slow
def test_more_tokens_make_the_error_smaller(plan: Path) -> None:
    """Windows are scored until the error is small."""
    found = {
        windows: calibrate_thresholds(
            plan,
            Passages([TEXT * windows], context=32, count=2, held_out=windows),
            goal=Goal(method="cats", target=0.5),
            max_error=9.0,
        ).chosen
        for windows in (1, 6)
    }
    assert found[1].scored < found[6].scored and found[6].error < found[1].error


def test_what_was_found_survives_an_interrupt(
    plan: Path, sparse: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows that were counted are not counted again, and the result is the same."""
    file = tmp_path / "again.thresholds.toml"
    command = ["sparsity", "calibrate", str(plan), "--text", str(text), "--target", "0.5"]
    command += ["--context", "32", "--error", LOOSE, "-o", str(file)]

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pi2.measuring.calibration._time_tokens", interrupt)
        assert run(command) == 130
    partial = file.with_name(f"{file.name}.partial")
    assert partial.exists() and not file.exists()
    assert f"{partial} has the results so far" in capsys.readouterr().err

    def forbid(*arguments: object) -> None:
        raise AssertionError("counted again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pi2.measuring.magnitudes.MagnitudeObserver.__call__", forbid)
        assert run(command) == 0
    assert not partial.exists()
    assert file.read_bytes() == sparse.with_name("half.thresholds.toml").read_bytes()


def test_another_text_does_not_go_on_where_one_was(plan: Path, tmp_path: Path) -> None:
    def calibrate(text: str, partial: Path | None) -> list[float]:
        found = calibrate_thresholds(
            plan,
            Passages([text], context=32, count=2, held_out=1),
            goal=Goal(method="cats", target=0.5),
            max_error=9.0,
            unfinished=partial,
        )
        return [layer.gate for layer in found.chosen.thresholds.layers]

    partial = tmp_path / "partial"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pi2.measuring.calibration.KeptFindings.drop", lambda self: None)
        calibrate(TEXT, partial)
    other = TEXT.upper()
    assert calibrate(other, partial) == calibrate(other, None)
    partial.write_bytes(b"no such file")
    assert calibrate(TEXT, partial) == calibrate(TEXT, None)


@in_table
def test_what_is_not_said_is_asked_for(
    plan: Path, text: Path, options: list[str], code: str, ask: Ask
) -> None:
    assert code in ask(["sparsity", "calibrate", str(plan), "--text", str(text), *options], 2).err


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with thresholds for a mixture of SiLU experts, run by the reference backend."""
    plan = make_mixture_plan(tmp_path_factory.mktemp("mixture"), "silu", {"predictor": None})
    plan.write_text(plan.read_text().replace('cpu = "cpu"', 'cpu = "reference"'))
    (plan.parent / "text.txt").write_text(TEXT)
    command = ["sparsity", "calibrate", str(plan), "--text", str(plan.parent / "text.txt")]
    file, made = plan.with_name("half.thresholds.toml"), plan.with_name("half.plan.toml")
    assert run([*command, "--target", "0.5", "-o", str(file), "--plan", str(made)]) == 0
    return made


def test_every_expert_of_a_mixture_gets_a_threshold(mixture: Path) -> None:
    thresholds = load_plan(mixture).thresholds
    assert thresholds is not None
    for layer in thresholds.layers:
        assert len(layer.experts) == 4
        assert min(layer.experts) < layer.gate < max(layer.experts)
        assert layer.computed == 0.5
    with pi2.load(mixture) as model:
        model.logits(list(TEXT[:40].encode()), mode="decode")
        # Of the neurons of the two experts that compute a token.
        assert model.stats.predicted_share == pytest.approx(0.5, abs=0.05)


def test_a_threshold_is_that_of_its_expert(mixture: Path) -> None:
    thresholds = load_plan(mixture).thresholds
    assert thresholds is not None
    closed = [layer.model_copy(update={"experts": (99.0,) * 4}) for layer in thresholds.layers]
    with load(mixture, thresholds=thresholds.model_copy(update={"layers": tuple(closed)})) as model:
        model.logits(list(TEXT[:5].encode()), mode="decode")
        assert model.stats.predicted_neurons == 0
    other = thresholds.model_copy(update={"layers": tuple(closed)})
    assert other.limits == thresholds.limits and other.expert_limits != thresholds.expert_limits


def test_second_thresholds_are_not_for_mixtures(mixture: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_plan(mixture, overrides={"sparsity.method": "cats-teal"})
    assert "P257" in {diagnostic.code for diagnostic in caught.value.diagnostics}
    goal = Goal(method="cats-teal", target=0.5)
    with pytest.raises(UserError, match="P257"):
        calibrate_thresholds(mixture, Passages([TEXT]), goal=goal)


def test_neurons_that_rest_by_themselves_need_no_thresholds(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path))
    with pytest.raises(UserError, match="P257"):
        calibrate_thresholds(plan, Passages([TEXT]), goal=Goal(method="cats", target=0.5))


def test_a_broken_file_is_shown_where_it_is_broken(sparse: Path, tmp_path: Path, ask: Ask) -> None:
    good = sparse.with_name("half.thresholds.toml").read_text()
    broken = sparse.with_name("broken.thresholds.toml")
    broken.write_text(good.replace("gate = ", "gates = ", 1))
    other = sparse.with_name("broken.plan.toml")
    other.write_text(sparse.read_text().replace("half.thr", "broken.thr"))
    shown = ask(["validate", str(other)], 1).out
    assert "P101" in shown and "broken.thresholds.toml:" in shown


def test_thresholds_are_found_from_plan_that_extends_another(sparse: Path) -> None:
    (sparse.parent / ".git").mkdir()
    other = sparse.parent / "deep" / "other.plan.toml"
    other.parent.mkdir()
    base = os.path.relpath(sparse, other.parent)
    other.write_text(f"schema_version = 3\nextends = ['{base}']\n")
    assert load_plan(other).thresholds == load_plan(sparse).thresholds is not None


def test_digests_tell_thresholds_apart(sparse: Path) -> None:
    text = sparse.with_name("half.thresholds.toml").read_text()
    sparse.with_name("other.thresholds.toml").write_text(text.replace("gate = 0.", "gate = 1.", 1))
    other = load_plan(sparse, overrides={"sparsity.thresholds": "other.thresholds.toml"})
    assert other.digest != load_plan(sparse).digest
