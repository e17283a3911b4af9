"""`tools/build_demo_store.py`: small, whole, and the same bytes every time."""

from pathlib import Path

import numpy as np
import pytest

from pi2.cli.options import read_model
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from tests.helpers.checkpoints import write_checkpoint, write_counts, write_safetensors
from tests.helpers.models import draw_weights
from tools import build_demo_store


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model's shape, as the training tool exports it, but random."""
    model = read_model("pi2-demo")
    weights = draw_weights(model)
    inside = {name: values for name, values in weights.items() if "predictor" not in name}
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder, model, inside)
    predictors = {name: values for name, values in weights.items() if name not in inside}
    write_safetensors(folder / "predictors.safetensors", predictors)
    shape = (model.shape.layers, model.shape.ffn)
    write_counts(folder / "activations.parquet", np.random.default_rng(0).integers(0, 1000, shape))
    (folder / "training.json").write_text("{}")
    (folder / "heldout.txt").write_text("def f(): pass")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, output: Path) -> int:
    arguments = ["build", "--checkpoint", str(checkpoint), "--output", str(output)]
    monkeypatch.setattr("sys.argv", arguments)
    return build_demo_store.main()


def test_the_store_fits_the_shipped_model_and_a_repository(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, checkpoint, tmp_path / "store") == 0
    with NeuronStore.open(tmp_path / "store", model=read_model("pi2-demo")) as store:
        files = {entry.path: entry.bytes for entry in store.manifest.files}
        assert store.manifest.order == "hotness"
        assert (store.bundle.used_bytes, store.bundle.stride) == (432, 512)
    assert {"tokenizer.json", "activations.parquet", "training.json", "heldout.txt"} <= set(files)
    assert sum(files.values()) <= 16 * 2**20
    assert verify_store(tmp_path / "store") == []


def test_the_same_checkpoint_gives_the_same_bytes_even_over_an_older_store(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, checkpoint, tmp_path / "store") == 0
    first = (tmp_path / "store/manifest.json").read_bytes()
    assert run(monkeypatch, checkpoint, tmp_path / "store") == 0
    assert (tmp_path / "store/manifest.json").read_bytes() == first


def test_an_unfinished_training_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path / "none", tmp_path / "store") == 2
    assert "error[P530]" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
