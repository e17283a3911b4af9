"""GGUF files of mixtures run as they are, and give the logits of the reference implementation."""

import gc
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import pi2
from pi2.backends.blocks.instructions import Weight
from pi2.weights.file_reading import FileFiller
from pi2.weights.gguf_weights import GgufWeights
from tests.helpers.block_model import PlainBlockModel
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


def test_biases_of_experts_and_routers_and_sinks(tmp_path: Path) -> None:
    """Files of gpt-oss do not say the limit of its activation: numpy takes the usual one, too."""
    config, weights = read_checkpoint(copy_checkpoint("gpt-oss", tmp_path / "checkpoint"))
    file = tmp_path / "tiny.gguf"
    write_gguf(file, config, translate(weights, config), changes=make_tokens(config["vocab_size"]))
    prompt = read_golden("gpt-oss").prompt
    assert FileFiller().runs_as_it_is(file)
    with GgufWeights.open(file, has_texts=False) as source:
        expected = PlainBlockModel(source.model, partial(read_weight, source)).compute(prompt)
    with pi2.load(file, set={"kv.context": 64}) as model:
        assert_near(model.logits(prompt), expected)


def assert_near(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> None:
    """Weights are floats, so activations are not rounded; keys and values have 16 bits."""
    assert np.abs(found - expected).max() <= 4e-3 * np.abs(expected).max()


def read_weight(source: GgufWeights, key: str, layer: int) -> Weight | None:
    found = None if key.endswith("_bias") else source.find(key, layer)
    if found is None or found.rows == 1:
        values = source.read_vector(key, layer)
        if values is None:
            return None
        return Weight(format="f32", rows=1, length=values.size, data=values.view(np.uint8))
    return Weight(
        format=found.format, rows=found.rows // found.experts, length=found.length,
        experts=found.experts, scales=found.scales, neighbours=found.has_neighbours,
        data=source.map_rows(found).reshape(-1),
    )  # fmt: skip
