"""Statements of a GGUF file are computed or refused by name: nothing is dropped silently."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from backends.arithmetic import compute_rope_tables
from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.requirements import describe_other_parts
from pi2.plan.documents.model import Model
from pi2.weights.file_reading import FileFiller
from tests.helpers.gguf_goldens import convert, expect_same_weights
from tests.helpers.goldens import EXACT, copy_checkpoint
from tests.helpers.peers import TOKENS, VOCAB, read_models, write_tiny
from tests.helpers.tables import in_table

pytest.importorskip("gguf")

MODELS = read_models()


class Job:
    def __init__(self, folder: Path, name: str = "llama") -> None:
        self.folder, self.model = folder, MODELS[name]
        self.tensors, self.architecture = dict(self.model.list_tensors()), self.model.architecture

    def write(self, name: str = "tiny", **keys: Any) -> Path:
        """Write it; ``keys``: further ones of the architecture, with two lines for a dot."""
        stated = {f".{key.replace('__', '.')}": value for key, value in keys.items()}
        model = replace(self.model, settings={**self.model.settings, **stated})
        return write_tiny(self.folder / f"{name}.gguf", model, self.tensors)

    def describe(self, **keys: Any) -> Model:
        return describe_checkpoint(self.write(**keys)).model

    def refuse(self, code: str, *words: str, **keys: Any) -> None:
        with pytest.raises(UserError, match=code) as caught:
            self.describe(**keys)
        for word in words:
            assert word in str(caught.value)


SCALES = np.resize(np.array([0.5, 2.0, 0.25, 4.0, 8.0, 0.125, 16.0], np.float32), 12)
"""Powers of 2, by which numbers of every format are multiplied exactly."""


@in_table
def test_matrices_are_multiplied_by_their_scales(
    tmp_path: Path, name: str, kind: str, matrices: list[str]
) -> None:
    """As llama.cpp does, in every architecture, by one number or one for each expert, before biases
    are added: in files that run, and in stores that are made of them."""
    model = replace(MODELS[name], kind=kind)
    plain = dict(model.list_tensors())
    scaled, multiplied = dict(plain), dict(plain)
    for matrix in matrices:
        values = plain[f"{matrix}.weight"]
        scales = SCALES[: len(values) if matrix.endswith("_exps") else 1]
        scaled[f"{matrix}.scale"] = scales
        factors = scales.reshape(-1, *[1] * (values.ndim - 1))
        multiplied[f"{matrix}.weight"] = (values * factors).astype(np.float32)
        # It says how a processor rounds inputs, which nothing here does.
        scaled[f"{matrix}.input_scale"] = np.full(1, 0.5, np.float32)
    found = []
    for number, tensors in enumerate((scaled, multiplied, plain)):
        file = write_tiny(tmp_path / f"{number}.gguf", model, tensors)
        assert FileFiller().runs_as_it_is(file)
        with pi2.load(file, set={"kv.context": 64}) as loaded:
            found.append(np.array(loaded.logits(TOKENS)))
        if kind == "F32":
            convert(file, tmp_path / f"store-{number}", None, EXACT)
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    if kind == "F32":
        expect_same_weights(tmp_path / "store-0", tmp_path / "store-1")


def test_a_scale_has_one_number_or_one_for_each_expert(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.tensors["blk.0.attn_q.scale"] = np.ones(3, np.float32)
    job.refuse("P534", "blk.0.attn_q.scale")
    job.tensors["blk.0.attn_q.scale"] = np.full(1, np.nan, np.float32)
    job.refuse("P539", "blk.0.attn_q.scale")


def vector(count: int) -> F32:
    return np.ones(count, np.float32)


@in_table
def test_a_tensor_that_nothing_reads_is_named(tmp_path: Path, name: str) -> None:
    job = Job(tmp_path)
    job.tensors[name] = vector(32)
    job.refuse("P537", f"'{name}'", "no operator of the model")


def test_a_bias_of_the_head_is_that_of_qwen2(tmp_path: Path) -> None:
    job = Job(tmp_path, "qwen2")
    job.tensors["output.bias"] = vector(VOCAB)
    assert job.describe().head_bias


def test_a_bias_of_what_heads_give_is_that_of_llama(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for layer in range(4):
        job.tensors[f"blk.{layer}.attn_output.bias"] = vector(32)
    attention = job.describe().attention
    assert (attention.qkv_bias, attention.output_bias) == (False, True)


def test_layers_that_draft_tokens_are_left_out_with_a_word(tmp_path: Path) -> None:
    job = Job(tmp_path, "glm4-moe")
    layers = job.model.settings[".block_count"]
    for name, values in list(job.tensors.items()):
        if name.startswith(f"blk.{layers - 1}."):
            job.tensors[name.replace(str(layers - 1), str(layers), 1)] = values
    job.tensors[f"blk.{layers}.nextn.eh_proj.weight"] = vector(4)
    file = job.write(block_count=layers + 1, nextn_predict_layers=1)
    assert describe_checkpoint(file).model.shape.layers == layers
    assert any("draft tokens" in line for line in describe_other_parts(open_checkpoint(file)))


@pytest.mark.parametrize(
    ("keys", "kind", "factor"),
    [
        ({"type": "yarn", "factor": 4.0}, "yarn", 0.9 * (0.1 * np.log(4.0) + 1.0)),
        ({"type": "linear", "factor": 2.0}, "linear", 0.9),
        ({"type": "none", "factor": 2.0}, "plain", 0.9),
        ({}, "plain", 0.9),
    ],
)
def test_sines_and_cosines_are_multiplied(
    tmp_path: Path, keys: dict[str, Any], kind: str, factor: float
) -> None:
    """By what llama.cpp multiplies them by: the file's factor, and that of YaRN."""
    stated = {f"rope__scaling__{key}": value for key, value in keys.items()}
    model = Job(tmp_path).describe(rope__scaling__attn_factor=0.9, **stated)
    assert model.rope.kind == kind
    cosines, sines = compute_rope_tables(model.rope, model.shape.head_dim, 8)
    np.testing.assert_allclose(np.hypot(cosines, sines), factor, rtol=1e-6)


@pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
def test_a_scaling_without_a_kind_is_linear(tmp_path: Path, key: str) -> None:
    rope = Job(tmp_path).describe(**{key: 4.0}).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@in_table
def test_a_key_that_nothing_reads_is_named_with_its_value(
    tmp_path: Path, key: str, value: object
) -> None:
    Job(tmp_path).refuse("P544", f"llama.{key.replace('__', '.')} = {value!r}"[:40], **{key: value})


@in_table
def test_a_value_that_the_model_does_not_have_is_named(
    tmp_path: Path, golden: str, key: str, value: object, path: str
) -> None:
    job = Job(tmp_path, golden)
    stated = f"{job.architecture}.{key.replace('__', '.')} is {value!r}"
    job.refuse("P537", stated, path, **{key: value})


@in_table
def test_values_that_stand_for_nothing_are_taken(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert Job(tmp_path).describe(**keys).rope.kind == "plain"


def test_weights_of_experts_add_up_to_1_where_a_file_of_deepseek_v2_says_so(tmp_path: Path) -> None:
    model = Job(tmp_path, "deepseek-v2").describe(expert_weights_norm=True)
    assert model.moe is not None and model.moe.normalise_weights


@pytest.mark.parametrize(
    ("key", "value"),
    [("general.type", "adapter"), ("general.type", "mmproj"), ("adapter.lora.alpha", 16.0)],
)
def test_what_is_no_model_is_refused(tmp_path: Path, key: str, value: object) -> None:
    model = replace(MODELS["llama"], settings={**MODELS["llama"].settings, key: value})
    with pytest.raises(UserError, match=rf"P544.*{key} = {value!r}"):
        describe_checkpoint(write_tiny(tmp_path / "a.gguf", model))


def test_an_adapter_in_a_folder_is_named(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "checkpoint")
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"P537.*adapter_config\.json"):
        describe_checkpoint(checkpoint)


def test_the_last_token_is_the_embedding_where_a_file_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.describe().pooling == "mean"
    assert job.describe(pooling_type=3).pooling == "last"
    checkpoint = copy_checkpoint("llama", tmp_path / "checkpoint")
    (checkpoint / "1_Pooling").mkdir()
    (checkpoint / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert describe_checkpoint(checkpoint).model.pooling == "last"
