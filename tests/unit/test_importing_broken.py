"""Broken parts beside the weights: one diagnostic that names the file, and no store left behind."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pi2.diagnostics import UserError
from tests.helpers.checkpoints import write_counts
from tests.helpers.models import make_model, make_tokenizer
from tests.helpers.spoilt_conversion import OUTER, Job, make_job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


# Configuration
@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("num_hidden_layers", 4, "shape.layers"),
        ("num_attention_heads", 8, "shape.heads"),
        ("num_key_value_heads", 4, "shape.kv_heads"),
        ("intermediate_size", 97, "shape.ffn"),
        ("rms_norm_eps", 1e-6, "norm.epsilon"),
        ("rope_theta", 500000.0, "rope.theta"),
        ("tie_word_embeddings", False, "tied_head"),
        ("rope_parameters", {"rope_theta": 500000.0}, "rope.theta"),
    ],
)
def test_a_config_that_contradicts_the_model(job: Job, key: str, value: object, path: str) -> None:
    file = job.checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    job.expect("P537", "config.json", path)


@pytest.mark.parametrize("value", [None, "absent"])
def test_what_the_config_does_not_state_is_not_compared(job: Job, value: object) -> None:
    config = json.loads((job.checkpoint / "config.json").read_text())
    config["num_key_value_heads"] = value
    if value == "absent":
        del config["num_key_value_heads"]
    (job.checkpoint / "config.json").write_text(json.dumps(config))
    job.convert()


# Predictors
def test_predictors_are_missing(job: Job) -> None:
    job.weights = {name: rows for name, rows in job.weights.items() if "predictor" not in name}
    job.save()
    job.expect("P533", "no predictors", "--predictors")


def test_the_predictor_of_one_layer_is_missing(job: Job) -> None:
    del job.weights[OUTER]
    job.save()
    job.expect("P533", OUTER)


def test_a_predictor_for_other_neurons(job: Job) -> None:
    job.weights[OUTER] = job.weights[OUTER][:-1]
    job.save()
    job.expect("P534", OUTER, "[95, 32]", "[96, 32]")


def test_predictors_of_another_rank(job: Job) -> None:
    job.model = make_model({"predictor": {"rank": 64}})
    job.expect("P534", "rank 32", "says 64", "predictor.rank = 32")


def test_predictors_that_the_model_does_not_announce(job: Job) -> None:
    job.model = make_model({"predictor": None})
    job.options["predictors"] = job.file
    job.expect("P542", "[predictor]")


def test_a_predictor_file_that_does_not_exist(job: Job) -> None:
    job.options["predictors"] = job.folder / "none.safetensors"
    job.expect("P532", "none.safetensors")


# Activation counts
def count_file(job: Job, **columns: Any) -> Path:
    shape = (3, 96)
    table = {
        "layer": np.repeat(np.arange(3), 96),
        "neuron": np.tile(np.arange(96), 3),
        "count": np.zeros(shape, np.int64).reshape(-1),
        **columns,
    }
    file = job.folder / "counts.parquet"
    pq.write_table(
        pa.table({name: values for name, values in table.items() if values is not None}), file
    )
    return file


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"neuron": None}, "neuron"),
        ({"layer": np.zeros(288, np.int64)}, "listed twice"),
        ({"layer": np.repeat(np.arange(1, 4), 96)}, "outside of 3 x 96"),
        ({"neuron": np.tile(np.arange(-1, 95), 3)}, "outside of 3 x 96"),
        ({"count": np.full(288, -1)}, "negative"),
        ({"count": np.full(288, "many")}, ""),
        ({"count": pa.array([None] * 288, pa.int64())}, "missing"),
        ({"count": np.full(288, 0.5)}, ""),
    ],
)
def test_counts_that_are_not_of_this_model(job: Job, columns: dict[str, Any], word: str) -> None:
    job.options["activations"] = count_file(job, **columns)
    job.expect("P540", "counts.parquet", word)


def test_counts_of_another_size(job: Job) -> None:
    counts = np.zeros((3, 97), np.int64)
    job.options["activations"] = write_counts(job.folder / "counts.parquet", counts)
    job.expect("P540", "291 rows", "3 layers x 96 neurons")


@pytest.mark.parametrize("content", [None, b"", b"PAR1 garbage PAR1"])
def test_counts_that_cannot_be_read(job: Job, content: bytes | None) -> None:
    file = job.folder / "counts.parquet"
    if content is not None:
        file.write_bytes(content)
    job.options["activations"] = file
    job.expect("P540", "counts.parquet")


# Tokenizer
def test_missing_tokenizer(job: Job) -> None:
    (job.checkpoint / "tokenizer.json").unlink()
    job.expect("P543", "tokenizer.json")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_garbled_tokenizer(job: Job, content: bytes) -> None:
    (job.checkpoint / "tokenizer.json").write_bytes(content)
    job.expect("P543", "tokenizer.json")


def test_a_tokenizer_of_a_larger_vocabulary(job: Job) -> None:
    (job.checkpoint / "tokenizer.json").write_bytes(make_tokenizer(300))
    job.expect("P543", "300 tokens", "288")


@pytest.mark.parametrize("name", ["../tokenizer.json", "/etc/passwd", "a/b.json"])
def test_a_tokenizer_elsewhere(job: Job, name: str) -> None:
    job.model = make_model({"tokenizer": {"file": name}})
    job.expect("P543", name)


# Output
def test_an_output_that_exists(job: Job) -> None:
    (job.folder / "store").mkdir()
    (job.folder / "store/file").write_text("x")
    with pytest.raises(UserError, match="P521"):
        job.convert()
    assert (job.folder / "store/file").read_text() == "x"
