"""gpt-oss as it is published, its experts in MXFP4, computes what the same numbers in fp16 do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pi2.arrays import F32
from pi2.importing.convert import convert_checkpoint
from pi2.importing.gguf_file import read_gguf
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model_parts import Quantization
from pi2.store.reader import NeuronStore
from tests.helpers.gguf_goldens import expect_same_weights
from tests.helpers.goldens import (
    EXACT,
    FOLDER,
    Golden,
    convert_golden,
    make_small_tokenizer,
    measure_error,
    run_golden,
    write_plan,
)
from tests.helpers.programs import Ask
from tests.helpers.quantized import Stored, decode_fp4, pack_pairs, write_tensors
from tests.helpers.tables import in_table
from tests.helpers.whole_files import make_file

HIDDEN, FFN = 96, 64
KEPT = EXACT | {"ffn": "mxfp4"}
"""Neurons as they are published."""
GOLDEN = Golden(prompt=[1, 7, 30, 12, 95, 4], logits=np.zeros(0, np.float32), greedy=[])
FLASH = {"layers.hot": 0.0}
"""Three of the four experts of one of the layers have room, and no more."""


def describe_config() -> dict[str, object]:
    config = json.loads((FOLDER / "gpt-oss" / "config.json").read_text())
    return dict(config | {"hidden_size": HIDDEN, "intermediate_size": FFN})


def draw_tensors() -> tuple[Stored, Stored]:
    """Tensors of a whole checkpoint, with experts in MXFP4 and in fp16."""
    sizes = {48: HIDDEN, 19: FFN, 38: 2 * FFN}
    generator = np.random.default_rng(3)
    packed: Stored = {}
    plain: Stored = {}
    for name, tensor in load_file(FOLDER / "gpt-oss" / "model.safetensors").items():
        shape = tuple(sizes.get(size, size) for size in tensor.shape)
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            values = (0.3 * generator.standard_normal(shape)).astype(np.float16)
            if name.endswith(("layernorm.weight", "norm.weight")):
                values += np.float16(1)
            packed[name] = plain[name] = ("F16", values)
            continue
        experts, inputs, outputs = shape
        codes = generator.integers(0, 16, (experts, outputs, inputs))
        # So far apart that no other type holds the down projections exactly.
        exponents = generator.integers(117, 125, (experts, outputs, inputs // 32))
        numbers = np.vectorize(decode_fp4, otypes=[float])(codes)
        numbers *= 2.0 ** (exponents.repeat(32, axis=2) - 127.0)
        blocks = pack_pairs(codes).reshape(experts, outputs, inputs // 32, 16)
        packed[f"{name}_blocks"] = ("U8", blocks)
        packed[f"{name}_scales"] = ("U8", exponents.astype(np.uint8))
        plain[name] = ("F16", np.ascontiguousarray(numbers.swapaxes(1, 2)).astype(np.float16))
    return packed, plain


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4, and one with the same numbers in fp16."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    settings: tuple[dict[str, Any], ...] = ({"quantization_config": {"quant_method": "mxfp4"}}, {})
    for name, tensors, own in zip(("packed", "plain"), draw_tensors(), settings, strict=True):
        checkpoint = folder / name
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(describe_config() | own))
        write_tensors(checkpoint / "model.safetensors", tensors)
        (checkpoint / "tokenizer.json").write_bytes(make_small_tokenizer(96))
    return folder / "packed", folder / "plain"


@pytest.fixture(scope="module")
def stores(published: tuple[Path, Path]) -> tuple[Path, Path]:
    """Plans of both, the first with neurons of mxfp4."""
    plans = []
    for checkpoint, quantization in zip(published, (KEPT, EXACT), strict=True):
        folder = checkpoint.parent / f"{checkpoint.name}-store"
        folder.mkdir()
        plans.append(write_plan(folder, convert_golden(checkpoint, folder, quantization), {}))
    return plans[0], plans[1]


def list_neurons(plan: Path) -> list[F32]:
    """Gates, ups and downs of every layer of a plan's store, in the checkpoint's order."""
    from pi2.plan.weights.bundles import unpack_part

    with NeuronStore.open(plan.parent / "store") as store:
        layout = store.bundle.inline
        return [
            unpack_part(layer.read_inline(np.argsort(layer.original)), layout, part)
            for layer in store.layers
            for part in range(3)
        ]


def test_every_weight_is_kept_exactly(stores: tuple[Path, Path]) -> None:
    kept, plain = (list_neurons(plan) for plan in stores)
    for one, other in zip(kept, plain, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("settings", [{}, FLASH], ids=["in memory", "from flash"])
def test_a_published_checkpoint_computes_what_its_numbers_say(
    stores: tuple[Path, Path], settings: dict[str, str]
) -> None:
    (logits, greedy), (expected, text) = (
        run_golden(plan, GOLDEN, tokens=8, settings=own)
        for plan, own in zip(stores, (settings, {}), strict=True)
    )
    assert np.abs(expected).max() > 0.1
    assert measure_error(logits, expected) < 1e-6
    assert greedy == text


@in_table
def test_kernels_compute_what_the_reference_computes(
    stores: tuple[Path, Path], settings: dict[str, Any], limit: float
) -> None:
    expected, text = run_golden(stores[0], GOLDEN, tokens=8)
    logits, greedy = run_golden(
        stores[0], GOLDEN, tokens=8, settings={"backends.cpu": "cpu", **settings}
    )
    assert measure_error(logits, expected) < limit
    assert greedy == text


def test_converting_keeps_the_type_without_being_asked(published: tuple[Path, Path]) -> None:
    packed, plain = (describe_checkpoint(folder, "golden").model for folder in published)
    assert packed.quantization.ffn == "mxfp4" and packed.quantization.attention == "int8"
    assert plain.quantization.ffn == "int4"


def test_a_gguf_file_in_mxfp4_gives_the_same_store(
    published: tuple[Path, Path], stores: tuple[Path, Path], tmp_path: Path
) -> None:
    file = make_file(published[0], tmp_path / "made.gguf")
    assert "mxfp4" in {entry.block.name for entry in read_gguf(file).entries.values()}
    made = describe_checkpoint(file, "golden").model
    assert made.quantization.ffn == "mxfp4"
    model = made.model_copy(update={"quantization": Quantization.model_validate(KEPT)})
    tokenizer = published[0] / "tokenizer.json"
    convert_checkpoint(file, model, tmp_path / "store", tokenizer=tokenizer)
    expect_same_weights(stores[0].parent / "store", tmp_path / "store")


def test_neurons_that_share_scales_stay_together(stores: tuple[Path, Path], tmp_path: Path) -> None:
    from pi2.measuring.ordering import reorder_store

    rng = np.random.default_rng(0)
    with NeuronStore.open(stores[0].parent / "store") as store:
        neurons = store.layers[0].neurons
        orders = np.stack([rng.permutation(neurons).astype(np.int32) for _ in store.layers])
    reorder_store(stores[0].parent / "store", orders, "hotness", output=tmp_path / "store")
    with NeuronStore.open(tmp_path / "store") as store:
        original = store.layers[0].original.copy()
    assert not np.array_equal(original, np.sort(original))
    assert np.array_equal(original % 32, np.tile(np.arange(32), neurons // 32))
    (tmp_path / "golden.model.toml").write_bytes(
        (stores[0].parent / "golden.model.toml").read_bytes()
    )
    turned = tmp_path / "golden.plan.toml"
    turned.write_bytes(stores[0].read_bytes())
    for one, other in zip(list_neurons(stores[0]), list_neurons(turned), strict=True):
        assert np.array_equal(one, other)
    logits, greedy = run_golden(turned, GOLDEN, tokens=2)
    expected, text = run_golden(stores[0], GOLDEN, tokens=2)
    assert greedy == text
    # They are added up in another order.
    assert measure_error(logits, expected) < 3e-6


def test_gates_of_mxfp4_are_not_kept(stores: tuple[Path, Path], ask: Ask) -> None:
    plan = stores[0].with_name("gate.plan.toml")
    plan.write_text(stores[0].read_text().replace('predictor = "none"', 'predictor = "gate"'))
    assert "keeps no gates of mxfp4" in ask(["validate", str(plan)], 1).out
