"""A conversion of a small checkpoint that a test spoils before it runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.convert import convert_checkpoint
from pi2.plan.documents.model import Model
from tests.helpers.checkpoints import write_checkpoint, write_safetensors
from tests.helpers.models import draw_weights, make_model

GATE = "model.layers.1.mlp.gate_proj.weight"
OUTER = "model.layers.1.mlp.predictor.fc2.weight"
Weights = dict[str, F32]


@dataclass
class Job:
    folder: Path
    model: Model
    weights: Weights
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def file(self) -> Path:
        return self.checkpoint / "model.safetensors"

    def save(self) -> None:
        write_safetensors(self.file, self.weights)

    def convert(self) -> None:
        convert_checkpoint(self.checkpoint, self.model, self.folder / "store", **self.options)

    def expect(self, code: str, *words: str, count: int = 1) -> None:
        """The conversion fails with ``code``, says ``words``, and leaves nothing behind."""
        with pytest.raises(UserError) as caught:
            self.convert()
        assert [item.code for item in caught.value.diagnostics] == [code] * count, str(caught.value)
        text = str(caught.value)
        assert all(word in text for word in words), text
        assert caught.value.exit_code == 2
        left = {path.name for path in self.folder.iterdir()}
        assert not left & {"store", ".store.partial", ".store.old"}


def make_job(folder: Path) -> Job:
    """A checkpoint of three layers with predictors, not yet spoilt."""
    model = make_model()
    weights = draw_weights(model)
    write_checkpoint(folder / "checkpoint", model, weights)
    return Job(folder, model, weights)
