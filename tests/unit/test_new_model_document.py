"""docs/howto/add-a-model.md: a family is added by its TOML text alone."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.importing.families import list_families
from pi2.importing.gguf_architectures import find_architecture, list_architectures, list_tables
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Model
from pi2.plan.reading.references import find_shipped_folder, list_shipped
from tests.helpers.goldens import (
    FOLDER,
    copy_checkpoint,
    make_small_tokenizer,
    measure_error,
    read_golden,
)
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table

TEXT = (Path(__file__).parents[2] / "docs/howto/add-a-model.md").read_text("utf-8")
ACORN = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)[0]


def write_acorn(folder: Path) -> Path:
    """A checkpoint with Acorn's names: the weights of a golden model, query to value in one."""
    old = load_file(FOLDER / "stablelm-parallel/model.safetensors")
    new = {
        "tokens": old["model.embed_tokens.weight"],
        "norm.scale": old["model.norm.weight"],
        "norm.shift": old["model.norm.bias"],
        "logits": old["lm_head.weight"],
    }
    for layer in range(2):
        here, there = f"block.{layer}", f"model.layers.{layer}"
        query, key, value = (
            old[f"{there}.self_attn.{name}_proj.weight"].reshape(2, -1, 32) for name in "qkv"
        )
        fused = np.concatenate([query, key, value], axis=1).reshape(-1, 32)
        new[f"{here}.attention.qkv"] = np.ascontiguousarray(fused)
        new[f"{here}.attention.out"] = old[f"{there}.self_attn.o_proj.weight"]
        new[f"{here}.norm.scale"] = old[f"{there}.input_layernorm.weight"]
        new[f"{here}.norm.shift"] = old[f"{there}.input_layernorm.bias"]
        for name in ("gate", "up", "down"):
            new[f"{here}.ffn.{name}"] = old[f"{there}.mlp.{name}_proj.weight"]
    folder.mkdir()
    save_file(new, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "acorn"}')
    (folder / "tokenizer.json").write_bytes(make_small_tokenizer(96))
    return folder


def test_the_example_runs_and_is_right(tmp_path: Path) -> None:
    file = tmp_path / "acorn.model.toml"
    file.write_text(ACORN)
    assert run(["validate", str(file)]) == 0
    checkpoint = write_acorn(tmp_path / "checkpoint")
    output = tmp_path / "store"
    command = ["convert", str(checkpoint), "--model", str(file), "-o", str(output)]
    assert run([*command, "--quantization", "fp16"]) == 0
    golden = read_golden("stablelm-parallel")
    plan = output / "default.plan.toml"
    with pi2.load(plan, set={"backends.cpu": "reference"}) as model:
        logits = model.logits(golden.prompt)
    assert measure_error(logits, golden.logits) <= 1e-4


def test_without_the_document_the_family_is_unknown(tmp_path: Path, ask: Ask) -> None:
    checkpoint = write_acorn(tmp_path / "checkpoint")
    assert "P544" in ask(["convert", str(checkpoint), "-o", str(tmp_path / "store")], 2).err


def test_every_table_is_listed() -> None:
    for table in ("shape", "norm", "rope", "positions", "attention", "ffn", "multipliers", "moe"):
        assert f"`[{table}]`" in TEXT
        assert table in Model.model_fields


def test_acorn_is_sound(tmp_path: Path) -> None:
    file = tmp_path / "acorn.model.toml"
    file.write_text(ACORN)
    assert check_file(file).diagnostics == ()


def test_a_family_of_known_operators_is_one_document(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("stablelm-parallel", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "acorn", "eps": config.pop("layer_norm_eps")}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"P544.*'acorn'"):
        describe_checkpoint(checkpoint)
    family = checkpoint / "acorn.family.toml"
    family.write_text(
        'schema_version = 3\nextends = ["stablelm"]\nread.norm.epsilon = ["eps", 1e-3]\n'
    )
    assert check_file(family).diagnostics == ()
    expected = describe_checkpoint(FOLDER / "stablelm-parallel", name="acorn").model
    found = describe_checkpoint(checkpoint, name="acorn").model
    assert found.model_copy(update={"name": expected.name}) == expected


@in_table
def test_what_a_family_cannot_compute_is_refused(tmp_path: Path, line: str) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "acorn"}))
    family = checkpoint / "acorn.family.toml"
    family.write_text(f'schema_version = 3\nextends = ["llama"]\n{line}\n')
    with pytest.raises(UserError, match="P544"):
        describe_checkpoint(checkpoint)


def test_every_architecture_of_gguf_files_names_tables_that_exist() -> None:
    for name in list_architectures():
        found = find_architecture(name)
        assert found.names
        assert found.model_type in list_families().families | list_shipped("family")
        assert len(list(list_tables(found))) >= len(found.read)


@in_table
def test_mistakes_in_a_family_are_findings_at_their_places(
    tmp_path: Path, line: str, code: str, place: list[int]
) -> None:
    family = tmp_path / "acorn.family.toml"
    family.write_text(f'schema_version = 3\nextends = ["llama"]\n{line}\n')
    found = check_file(family).diagnostics
    assert [item.code for item in found] == [code]
    span = found[0].span
    assert span is not None and [span.line, span.column] == place


def test_shipped_families_are_sound() -> None:
    assert run(["validate", str(find_shipped_folder() / "families")]) == 0
