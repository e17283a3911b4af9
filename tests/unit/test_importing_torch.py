"""PyTorch weight files: read where torch is installed, and never run."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from pi2.diagnostics import UserError
from pi2.importing import safetensors_file
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.convert import convert_checkpoint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import draw_weights, make_model


def make_checkpoint(folder: Path) -> Path:
    model = make_model()
    return write_checkpoint(folder / "checkpoint", model, draw_weights(model))


class Call:
    """Calls ``Path.touch`` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_without_torch_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path)
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    monkeypatch.setattr(safetensors_file, "has_torch", lambda: False)
    with pytest.raises(UserError, match=r"P531.*pytorch_model\.bin.*torch is not installed"):
        open_checkpoint(checkpoint)


def test_torch_weights_give_the_same_store(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = make_model()
    weights = draw_weights(model)
    checkpoint = make_checkpoint(tmp_path)
    convert_checkpoint(checkpoint, model, tmp_path / "a")
    (checkpoint / "model.safetensors").unlink()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(w)) for name, w in weights.items()}
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    convert_checkpoint(checkpoint, model, tmp_path / "b")
    for name in ("dense.arrow", "layers/ffn-002.arrow"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    checkpoint = make_checkpoint(tmp_path)
    (checkpoint / "model.safetensors").unlink()
    victim = tmp_path / "touched"
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Call(victim)}))
    with pytest.raises(UserError, match=r"P545.*pytorch_model\.bin"):
        convert_checkpoint(checkpoint, make_model(), tmp_path / "store")
    assert not victim.exists()
    assert not (tmp_path / "store").exists()
