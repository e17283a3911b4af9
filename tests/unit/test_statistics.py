"""`pi2 activations`: counts are those of the model's neurons, and an interrupted run goes on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import pi2
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.importing.conversion_job import read_counts
from pi2.measuring.activations import RecordingOptions, measure_skew, record_activations
from pi2.measuring.texts import Passages
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import TinyModel, make_tiny
from tests.helpers.plans import write_plan

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs.\n" * 3
OPTIONS = RecordingOptions(samples=5)
WHOLE = Passages([TEXT], context=32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModel, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny(folder)
    return model, write_plan(folder, model, {"prefill": {"chunk": 32}})


def observe_plainly(plan: Path, tokens: list[int]) -> np.ndarray:
    """Whether neurons fire [layers, tokens, neurons], in stored order."""
    fired = []
    with pi2.load(plan, set={"decode.predictor": "none"}) as model:
        executor: Any = model._parts.executor
        executor.embed(np.array(tokens, np.int32))
        for layer, stored in enumerate(model.store.layers):
            executor.attend(layer, 0)
            executor.begin_ffn(layer)
            fired.append(executor._activate(stored.bundles, slice(None)) != 0)
            executor.add_dense(layer, stored.bundles)
            executor.end_ffn(layer)
    return np.stack(fired)


def read(file: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(file)
    return {name: table.column(name).to_numpy() for name in table.column_names}


def test_counts_are_those_of_the_checkpoints_neurons(
    tiny: tuple[TinyModel, Path], tmp_path: Path
) -> None:
    model, plan = tiny
    text = TEXT[:31]
    found = record_activations(
        plan, Passages([text], context=32), tmp_path / "stats", options=OPTIONS
    )
    assert found.tokens == 32
    fired = observe_plainly(plan, [256, *_encode(plan, text)])
    counts, _ = read_counts(tmp_path / "stats/activations.parquet", 3, 96)
    columns = read(tmp_path / "stats/activations.parquet")
    for layer in range(3):
        original = model.original[layer]
        np.testing.assert_array_equal(counts[layer][original], fired[layer].sum(0))
        for batch in (2, 3, 4):
            groups = 32 // batch
            united = fired[layer][: groups * batch].reshape(batch, groups, 96).any(0).sum(0)
            rows = columns["layer"] == layer
            np.testing.assert_array_equal(columns[f"count_{batch}"][rows][original], united)
        assert found.layers[layer].active == pytest.approx(fired[layer].mean())
        assert found.layers[layer].batches[0] < found.layers[layer].batches[3]


def test_in_a_mixture_only_the_experts_of_a_token_count(tmp_path: Path) -> None:
    plan = make_mixture_plan(tmp_path, "drelu", {"predictor": None})
    plan.write_text(plan.read_text().replace('cpu = "cpu"', 'cpu = "reference"'))
    found = record_activations(
        plan, Passages([TEXT[:40]], context=32), tmp_path / "stats", options=OPTIONS
    )
    fired = observe_plainly(plan, _encode(plan, TEXT[:32]))
    for layer, shares in enumerate(found.layers):
        # Two of four experts compute a token.
        assert shares.batches[0] == pytest.approx(fired[layer].mean(), rel=0.1)
        assert shares.active == pytest.approx(2 * shares.batches[0])


def test_pairs_are_counted_together(tiny: tuple[TinyModel, Path], tmp_path: Path) -> None:
    model, plan = tiny
    text = TEXT[:31]
    record_activations(plan, Passages([text], context=32), tmp_path / "stats", options=OPTIONS)
    fired = observe_plainly(plan, [256, *_encode(plan, text)])
    pairs = read(tmp_path / "stats/coactivations.parquet")
    assert len(pairs["count"]) == 3 * 10  # 5 neurons
    assert (pairs["first"] < pairs["second"]).all()
    for layer, first, second, count in zip(*pairs.values(), strict=True):
        place = np.argsort(model.original[layer])
        assert (fired[layer][:, place[first]] & fired[layer][:, place[second]]).sum() == count


def test_an_interrupted_recording_goes_on(
    tiny: tuple[TinyModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plan = tiny
    whole = record_activations(plan, WHOLE, tmp_path / "whole", options=OPTIONS)
    monkeypatch.setattr("pi2.measuring.texts.PAUSE_S", -1.0)

    def interrupt(label: str, share: float) -> None:
        if label == "recording" and share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_activations(plan, WHOLE, tmp_path / "half", options=OPTIONS, progress=interrupt)
    assert [path.name for path in (tmp_path / "half").iterdir()] == ["unfinished.npz"]
    shares: list[float] = []

    def watch(label: str, share: float) -> None:
        if label == "recording":
            shares.append(share)

    half = record_activations(plan, WHOLE, tmp_path / "half", options=OPTIONS, progress=watch)
    assert 0 < len(shares) < 7  # not from the beginning
    assert half == whole
    for name in ("activations.parquet", "coactivations.parquet"):
        assert (tmp_path / "half" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "half/unfinished.npz").exists()


def test_what_is_finished_is_neither_run_again_nor_lost(
    tiny: tuple[TinyModel, Path], tmp_path: Path
) -> None:
    _, plan = tiny
    first = record_activations(plan, Passages([TEXT[:20]], context=32), tmp_path, options=OPTIONS)
    labels: set[str] = set()
    again = record_activations(
        plan,
        Passages([TEXT[:20]], context=32),
        tmp_path,
        options=OPTIONS,
        progress=lambda label, _: labels.add(label),
    )
    assert again == first and "recording" not in labels
    with pytest.raises(UserError) as caught:
        record_activations(plan, Passages([TEXT[:30]], context=32), tmp_path, options=OPTIONS)
    assert caught.value.diagnostics[0].code == "P664"
    other = record_activations(
        plan, Passages([TEXT[:30]], context=32), tmp_path, options=OPTIONS, replace=True
    )
    assert other.tokens > first.tokens


def test_a_folder_with_other_files_is_left_alone(
    tiny: tuple[TinyModel, Path], tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError) as caught:
        record_activations(tiny[1], WHOLE, tmp_path, options=OPTIONS)
    assert caught.value.diagnostics[0].code == "P664"
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_smooth_models_count_their_largest_neurons(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"predictor": None, "ffn": {"activation": "silu"}})
    plan = write_plan(tmp_path, tiny, {"decode": {"predictor": "none"}})
    with pytest.raises(UserError) as caught:
        record_activations(plan, WHOLE, tmp_path / "stats", options=OPTIONS)
    assert caught.value.diagnostics[0].code == "P665" and "routing" not in str(caught.value)
    half = RecordingOptions(largest=0.25)
    found = record_activations(
        plan, Passages([TEXT], context=32, count=1), tmp_path / "stats", options=half
    )
    assert all(layer.active == pytest.approx(0.25) for layer in found.layers)


def test_skew_is_the_share_of_neurons_that_makes_four_fifths() -> None:
    assert measure_skew(np.array([80, 10, 5, 3, 2])) == pytest.approx(0.2)
    assert measure_skew(np.full(10, 7)) == pytest.approx(0.8)
    assert measure_skew(np.zeros(4, np.int64)) == 0


def test_the_command_prints_writes_and_draws(
    tiny: tuple[TinyModel, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    command = ["activations", str(tiny[1]), "--text", str(file), "-o", str(tmp_path / "stats")]
    # Refused before anything is run.
    assert run([*command, "--plot", str(tmp_path / "picture.xyz")]) == 2
    assert "P633" in capsys.readouterr().err and not (tmp_path / "stats").exists()
    assert run([*command, "--windows", "1", "--plot", str(tmp_path / "picture.png")]) == 0
    assert "| layer | active |" in capsys.readouterr().out
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert run([*command, "--windows", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 3


def _encode(plan: Path, text: str) -> list[int]:
    with pi2.load(plan, set={"decode.predictor": "none"}) as model:
        return list(model.tokenizer.encode(text, add_special_tokens=False).ids)
