"""Keys of a file that pi2 reads change the model, or the file is refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2.importing.gguf_checkpoint as gguf_checkpoint
from pi2.diagnostics import UserError
from pi2.importing.gguf_checkpoint import GgufCheckpoint, open_gguf
from pi2.importing.gguf_file import GgufFile, read_gguf
from pi2.importing.gguf_metadata import list_idle, read_statements
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Model
from tests.helpers.peers import read_models
from tests.helpers.slow import keep_quick
from tests.helpers.whole_files import OTHERS, write_file

pytest.importorskip("gguf")

MODELS = read_models()
NAMES = [name for name, own in MODELS.items() if own.kind == "F32"]
WHOLE = ("llama", "mixtral")
"""Models that are asked for every key that any architecture may have."""


class Job:
    """A tiny file whose metadata change without being written again."""

    def __init__(self, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._path = write_file(name, folder)
        self.read = read_gguf(self._path)
        checkpoint = self._open({})
        self.model = describe_checkpoint(checkpoint, "tiny", has_texts=False).model
        metadata = checkpoint.statements
        self.architecture = metadata.architecture
        self.idle = list_idle(metadata, self.model)
        self.used = {*metadata.used, *self.read.metadata}

    def _open(self, changes: dict[str, Any]) -> GgufCheckpoint:
        found = replace(self.read, metadata={**self.read.metadata, **changes})

        def give(path: Path) -> GgufFile:
            return found

        self._patch.setattr(gguf_checkpoint, "read_gguf", give)
        opened = open_gguf(self._path)
        assert isinstance(opened, GgufCheckpoint)
        return opened

    def describe(self, changes: dict[str, Any]) -> Model:
        return describe_checkpoint(self._open(changes), "tiny", has_texts=False).model

    def has_effect(self, key: str, value: object) -> bool:
        try:
            return self.describe({key: value}) != self.model
        except UserError:
            return True


def list_changes(value: object) -> Iterator[list[Any]]:
    """Values of a kind, one of which must have an effect, for each kind that a key may have."""
    if isinstance(value, np.ndarray):
        first, last = value.copy(), value.copy()
        for own, place in ((first, 0), (last, -1)):
            own[place] = not own[place] if own.dtype.kind == "b" else own[place] + 1
        yield [first, last]
    elif isinstance(value, bool):
        yield [not value]
    elif isinstance(value, int):
        yield [value + 1, 1, 97]
    elif isinstance(value, float):
        yield [value * 1.5 + 0.1]
    elif isinstance(value, str):
        yield ["odd"]
    else:
        yield from ([3, 97], [0.37], [True, False], ["odd"], [np.arange(1, 65)])


@pytest.mark.parametrize("name", keep_quick([*NAMES, *OTHERS], [*NAMES[::8], *list(OTHERS)[::4]]))
def test_a_key_that_is_read_changes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What changes nothing is listed with its reason by `list_idle`."""
    job = Job(tmp_path, name, monkeypatch)
    start = f"{job.architecture}."
    keys = {key.removeprefix(start) for key in job.used if key.startswith(start)}
    if name in WHOLE:
        keys |= read_statements()["compared"].keys() | read_statements()["neutral"].keys()
    assert len(keys) > 5 and all(job.idle.values())
    silent = [
        (key, values)
        for key in sorted(keys - job.idle.keys())
        for values in list_changes(job.read.metadata.get(f"{start}{key}"))
        if not any(job.has_effect(f"{start}{key}", value) for value in values)
    ]
    assert silent == []


def list_windowed(model: Model) -> list[int]:
    return [n for n, own in enumerate(model.blocks) if own.attention and own.attention.window]


WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("name", "every"),
    [("gemma2", 2), ("gemma3", 6), ("gemma3n", 5), ("olmo3", 4), ("cohere2", 4), ("gpt-oss", 2)],
)
def test_layers_with_a_window_are_those_of_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, every: int
) -> None:
    """The last of so many layers has none, all layers do (0), or a list says it."""
    job = Job(tmp_path, name, monkeypatch)
    layers = range(job.model.shape.layers)
    window, pattern = (f"{job.architecture}.{key}" for key in (WINDOW, PATTERN))
    for stated in (0, 1, 2, 3, None):
        cycle = every if stated is None else stated
        expected = [layer for layer in layers if cycle == 0 or layer % cycle < cycle - 1]
        if name == "gemma3n" and stated is None:
            continue  # its last layers find none whose keys they could read
        assert list_windowed(job.describe({window: 8, pattern: stated})) == expected
    flags = np.array([layer % 3 != 2 for layer in layers])
    expected = np.flatnonzero(flags).tolist()
    assert list_windowed(job.describe({window: 8, pattern: flags})) == expected
    with pytest.raises(UserError, match=f"P532.*{pattern} is -1"):
        job.describe({window: 8, pattern: -1})
    if name != "gemma3n":
        assert list_windowed(job.describe({window: 0})) == []


def test_a_number_counts_for_each_layer_of_gemma_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, "gemma4", monkeypatch)
    with pytest.raises(UserError):  # heads of layers with a window are narrower
        job.describe({f"{job.architecture}.{PATTERN}": 1})
    flags = job.read.metadata[f"{job.architecture}.{PATTERN}"]
    assert list_windowed(job.model) == np.flatnonzero(flags).tolist()
