"""GGUF files of mixtures run as they are, and give the logits of the reference implementation."""

import gc
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import pi2
from pi2.weights.file_reading import FileFiller
from tests.helpers.gguf_files import make_tokens, write_gguf
from tests.helpers.gguf_tensors import read_checkpoint, translate
from tests.helpers.goldens import copy_checkpoint, read_golden


@pytest.mark.parametrize(
    "name",
    [
        "ernie4-5-moe",
        "glm4-moe",  # sigmoids, groups, biases of choices, shared experts
        "granite-moe",
        "granite-moe-shared",
        "hunyuan-moe",
        "minimax-m2",
        "mixtral",
        "olmoe",  # queries, keys and values are cut
        "qwen2-moe",  # a gate of shared experts
        "qwen3-moe",
    ],
)
def test_mixtures_give_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    config, weights = read_checkpoint(copy_checkpoint(name, tmp_path / "checkpoint"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, config, translate(weights, config), changes=make_tokens(config["vocab_size"]))
    golden = read_golden(name)
    assert FileFiller().runs_as_it_is(file)
    with pi2.load(file, set={"kv.context": 64}) as model:
        together = model.logits(golden.prompt).copy()
        one_by_one = model.logits(golden.prompt, mode="decode").copy()
    for found in (together, one_by_one):
        assert_near(found, golden.logits)


def test_a_dropped_model_gives_its_memory_back_at_once(tmp_path: Path) -> None:
    config, weights = read_checkpoint(copy_checkpoint("mixtral", tmp_path / "checkpoint"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, config, translate(weights, config), changes=make_tokens(config["vocab_size"]))
    before = list_unnamed_libraries()
    gc.collect()
    gc.disable()  # what is part of a circle would stay
    try:
        with pi2.load(file, set={"kv.context": 64}) as model:
            model.logits([1, 2])
            assert list_unnamed_libraries() != before
        forward = weakref.ref(model._parts.forward)
        del model
        assert forward() is None
    finally:
        gc.enable()
    assert list_unnamed_libraries() <= before


def list_unnamed_libraries() -> set[str]:
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if line.endswith(".so (deleted)")}


def assert_near(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> None:
    """Weights are floats, so activations are not rounded; keys and values have 16 bits."""
    assert np.abs(found - expected).max() <= 4e-3 * np.abs(expected).max()
