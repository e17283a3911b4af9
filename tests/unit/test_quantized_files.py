"""`pi2 convert -o FILE.gguf --quantization q4_k_m`: a checkpoint as one file that runs as it is."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.cli.main import run
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.gguf_file import read_gguf
from pi2.importing.new_model import describe_checkpoint
from pi2.measuring.importance import record_importance
from pi2.model.tensors import MIXTURES, takes_care
from pi2.sandbox.tokenizer import open_tokenizer
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.goldens import UNROUNDED, measure_error
from tests.helpers.models import MIXTURE
from tests.helpers.programs import Ask
from tests.helpers.slow import mark_slow
from tests.helpers.tables import in_table
from tests.unit.test_imatrix import write_old

WIDE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "layers": 8}


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    return write_sources(tmp_path, WIDE)


def write_sources(
    folder: Path, shape: Mapping[str, int], changes: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    file, checkpoint = write_random_gguf(folder, shape, changes, "F32"), folder / "checkpoint"
    (checkpoint / "tokenizer.json").write_bytes(open_checkpoint(file).read_tokenizer() or b"")
    return file, checkpoint


def list_types(file: Path) -> dict[str, str]:
    return {name: entry.block.name.upper() for name, entry in read_gguf(file).entries.items()}


def compute(file: Path) -> F32:
    with pi2.load(file) as model:
        return model.logits([1, 2, 3, 4, 5])


def quantize(source: Path, output: Path, kind: str, *options: str) -> Path:
    assert run(["convert", str(source), "-o", str(output), "--quantization", kind, *options]) == 0
    return output


def test_a_file_keeps_its_names_and_metadata(sources: tuple[Path, Path], tmp_path: Path) -> None:
    file, _ = sources
    made = quantize(file, tmp_path / "made.gguf", "q4_k_m")
    before, after = read_gguf(file), read_gguf(made)
    own = {"general.file_type", "general.quantization_version", "general.alignment"}
    assert set(before.metadata) | own == set(after.metadata)
    for key, value in before.metadata.items():
        if key not in own:
            np.testing.assert_array_equal(after.metadata[key], value)
    assert after.metadata["general.file_type"] == MIXTURES["q4_k_m"].number
    assert list(after.entries) == list(before.entries)
    assert {n: e.shape for n, e in after.entries.items()} == {
        n: e.shape for n, e in before.entries.items()
    }


def test_matrices_that_err_most_get_more_bits(sources: tuple[Path, Path], tmp_path: Path) -> None:
    types = list_types(quantize(sources[0], tmp_path / "made.gguf", "q4_k_m"))
    for layer in range(WIDE["layers"]):
        careful = "Q6_K" if takes_care(layer, WIDE["layers"]) else "Q4_K"
        for part in ("attn_v", "ffn_down"):
            assert types[f"blk.{layer}.{part}.weight"] == careful
        for part in ("attn_q", "attn_k", "attn_output", "ffn_up", "ffn_gate"):
            assert types[f"blk.{layer}.{part}.weight"] == "Q4_K"
        assert types[f"blk.{layer}.attn_norm.weight"] == "F32"
    # The embedding is the head, too.
    assert types["token_embd.weight"] == "Q6_K"


def test_a_file_keeps_the_precision_of_its_checkpoint_unless_one_is_asked_for(
    sources: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = sources
    assert run(["convert", str(folder), "-o", str(tmp_path / "store")]) == 0
    advice = f"pi2 convert {folder} -o store.gguf --quantization q4_k_m"
    assert advice in capsys.readouterr().err
    made = tmp_path / "store.gguf"
    assert run([*advice.split()[1:-3], str(made)]) == 0
    assert set(list_types(made).values()) == {"F32"}
    with pi2.load(made, set=UNROUNDED) as one, pi2.load(sources[0], set=UNROUNDED) as other:
        own, expected = (model.logits([1, 2, 3, 4, 5]) for model in (one, other))
    assert measure_error(own, expected) < 1e-5


@pytest.mark.parametrize(
    ("kind", "matrix", "table"),
    [("int4", "Q4_0", "Q8_0"), ("int8", "Q8_0", "Q8_0"), ("fp16", "F16", "F16")],
)
def test_precisions_of_stores_are_formats_of_files(
    sources: tuple[Path, Path], tmp_path: Path, kind: str, matrix: str, table: str
) -> None:
    types = list_types(quantize(sources[1], tmp_path / "made.gguf", kind))
    assert types["blk.1.ffn_down.weight"] == matrix
    assert types["blk.1.attn_q.weight"] == matrix
    assert types["token_embd.weight"] == table
    assert types["output_norm.weight"] == "F32"


@pytest.mark.parametrize(
    ("kind", "distance"),
    [("q4_k_m", 0.35), *map(mark_slow, [("q8_0", 0.05), ("q6_k", 0.1), ("q5_k_m", 0.2)])],
)
def test_a_folder_becomes_a_file_that_runs_as_it_is(
    sources: tuple[Path, Path], tmp_path: Path, kind: str, distance: float
) -> None:
    file, folder = sources
    expected = compute(file)
    made = quantize(folder, tmp_path / f"{kind}.gguf", kind)
    wrong = np.linalg.norm(compute(made) - expected) / np.linalg.norm(expected)
    assert wrong < distance
    same = quantize(file, tmp_path / f"{kind}-again.gguf", kind)
    np.testing.assert_allclose(compute(made), compute(same), atol=0.02 * np.abs(expected).max())


def test_texts_of_a_folder_are_in_its_file(sources: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = sources
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.25}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    made = quantize(folder, tmp_path / "made.gguf", "q8_0")
    shutil.rmtree(folder)
    assert open_checkpoint(made).read_template() == b"{{ messages[0].content }}"
    with pi2.load(made) as model:
        sampling = model.plan.model.sampling
        assert sampling is not None and sampling.temperature == 0.25
        text = model.generate("hello world", max_tokens=2, temperature=0.0)
        assert len(list(text)) <= 2 and text.result.token_ids


def test_experts_lie_side_by_side(tmp_path: Path) -> None:
    shape = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "layers": 2}
    file, folder = write_sources(tmp_path, shape, MIXTURE)
    expected = compute(file)
    for number, source in enumerate((file, folder)):
        made = quantize(source, tmp_path / f"made-{number}.gguf", "q8_0")
        wrong = np.linalg.norm(compute(made) - expected) / np.linalg.norm(expected)
        assert wrong < 0.03


def test_rows_that_fill_no_block_get_more_bits(tmp_path: Path) -> None:
    shape = {"hidden": 96, "heads": 3, "kv_heads": 3, "head_dim": 32, "ffn": 256, "layers": 2}
    file, _ = write_sources(tmp_path, shape)
    types = list_types(quantize(file, tmp_path / "made.gguf", "q4_k_m"))
    assert types["blk.0.attn_q.weight"] == "Q5_0" and types["token_embd.weight"] == "Q8_0"
    assert types["blk.1.ffn_down.weight"] == "Q6_K"


def test_fewer_bits_than_wanted_stay_as_they_are(
    sources: tuple[Path, Path], tmp_path: Path
) -> None:
    first = quantize(sources[0], tmp_path / "first.gguf", "q4_0")
    second = quantize(first, tmp_path / "second.gguf", "q8_0")
    assert list_types(first) == list_types(second)
    for tensor, other in zip(
        open_checkpoint(first).tensors.values(),
        open_checkpoint(second).tensors.values(),
        strict=True,
    ):
        np.testing.assert_array_equal(tensor.read_raw(), other.read_raw())


def test_an_importance_matrix_weighs_columns(
    sources: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = np.ones((1, 256), np.float32)
    weights[0, ::8] = 1000
    imatrix = write_old(tmp_path / "x.dat", {"blk.0.ffn_up.weight": weights})
    original = open_checkpoint(sources[1]).tensors["model.layers.0.mlp.up_proj.weight"].read()
    for number, source in enumerate(sources):
        plain = quantize(source, tmp_path / f"plain-{number}.gguf", "q4_k_m")
        aware = tmp_path / f"aware-{number}.gguf"
        quantize(source, aware, "q4_k_m", "--imatrix", str(imatrix))
        assert "1 weighed by" in capsys.readouterr().err
        errors = []
        for file in (plain, aware):
            stored = open_checkpoint(file).tensors["model.layers.0.mlp.up_proj.weight"].read()
            errors.append(float((np.square(stored - original) * weights).sum()))
        assert errors[1] < 0.8 * errors[0]


def test_a_text_weighs_columns_by_what_they_read(
    sources: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello world two spaces " * 40)
    for number, source in enumerate(sources):
        options = ("--calibrate", str(text))
        quantize(source, tmp_path / f"aware-{number}.gguf", "q4_k_m", *options)
        assert "57 matrices quantised, 57 weighed by" in capsys.readouterr().err
    opened = open_checkpoint(sources[0])
    model = describe_checkpoint(opened).model
    found = record_importance(opened, model, [text], tmp_path)
    tokens = open_tokenizer(opened.read_tokenizer() or b"").encode(text.read_text())
    ids = [1, *tokens.ids][: model.shape.context - 1]
    x = opened.tensors["model.embed_tokens.weight"].read()[ids]
    x /= np.sqrt(np.square(x).mean(axis=1, keepdims=True) + model.norm.epsilon)
    x *= opened.tensors["model.layers.0.input_layernorm.weight"].read()
    own = found.sums["blk.0.attn_q.weight"]
    assert np.corrcoef(own, np.square(x).sum(axis=0))[0, 1] > 0.9
    assert found.sums["blk.0.ffn_down.weight"].shape == (256,)


def test_experts_are_weighed_by_the_tokens_that_choose_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "layers": 2}
    file, folder = write_sources(tmp_path, shape, MIXTURE)
    text = tmp_path / "text.txt"
    text.write_text("hello world two spaces " * 40)
    for number, source in enumerate((file, folder)):
        options = ("--calibrate", str(text))
        quantize(source, tmp_path / f"aware-{number}.gguf", "q4_k_m", *options)
        said = re.search(r"(\d+) matrices quantised, (\d+) weighed", capsys.readouterr().err)
        assert said is not None and said[1] == said[2]


@in_table
def test_what_cannot_be_is_refused(
    sources: tuple[Path, Path], tmp_path: Path, options: list[str], expected: str, ask: Ask
) -> None:
    write_old(tmp_path / "x.dat", {"another.weight": np.ones((1, 64), np.float32)})
    (tmp_path / "old.gguf").touch()
    given = [option.replace("FOLDER", str(tmp_path)) for option in options]
    before = sources[0].read_bytes()
    assert expected in " ".join(
        ask(["convert", str(sources[0]), "--quantization", "q4_k_m", *given], 2).err.split()
    )
    assert sources[0].read_bytes() == before
    assert not list(tmp_path.glob(".*.part")) and not (tmp_path / "made.gguf").exists()


def test_a_weight_that_does_not_fit_is_named(
    sources: tuple[Path, Path], tmp_path: Path, ask: Ask
) -> None:
    file, _ = sources
    entry = read_gguf(file).entries["blk.3.ffn_up.weight"]
    with file.open("r+b") as stream:
        stream.seek(entry.offset)
        stream.write(np.float32(np.nan).tobytes())
    command = ["convert", str(file), "-o", str(tmp_path / "made.gguf"), "--quantization", "q4_k_m"]
    assert "blk.3.ffn_up.weight" in ask(command, 2).err
    assert not (tmp_path / "made.gguf").exists()
