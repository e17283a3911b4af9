"""Of models that read pictures too, the part that reads text is one of the known families."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.requirements import describe_other_parts
from pi2.plan.documents.model import Model
from tests.helpers.goldens import EXACT, convert_golden, copy_checkpoint
from tests.helpers.tables import in_table

Tensors = dict[str, npt.NDArray[Any]]


def wrap(checkpoint: Path, kind: str, text_kind: str, prefix: str) -> None:
    """Make ``checkpoint`` the text part, of ``text_kind``, of a model of ``kind``, whose names have
    ``prefix`` in place of ``model.``."""
    file = checkpoint / "config.json"
    text = json.loads(file.read_text())
    # Text parts say of the head what they like; the whole model's word counts.
    tied = text.pop("tie_word_embeddings", False)
    text |= {"model_type": text_kind, "tie_word_embeddings": not tied}
    config = {"model_type": kind, "text_config": text, "tie_word_embeddings": tied}
    file.write_text(json.dumps(config))
    weights = load_file(checkpoint / "model.safetensors")
    named = {name.replace("model.", prefix, 1): values for name, values in weights.items()}
    named["model.visual.merger.weight"] = np.ones((2, 2), np.float16)
    save_file(named, checkpoint / "model.safetensors")


def describe(model: Model) -> dict[str, Any]:
    return model.model_dump(exclude={"name", "id", "tensors"})


@in_table
def test_the_text_part_is_described_as_a_model_of_text_alone(
    tmp_path: Path, name: str, kind: str, text_kind: str, prefix: str
) -> None:
    plain = copy_checkpoint(name, tmp_path / "plain")
    wrapped = copy_checkpoint(name, tmp_path / "wrapped")
    wrap(wrapped, kind, text_kind, prefix)
    found = describe_checkpoint(wrapped).model
    assert describe(found) == describe(describe_checkpoint(plain).model)
    assert found.tensors.query.startswith(prefix) or found.tensors.query == ""
    assert describe_other_parts(open_checkpoint(wrapped)) == ["left out: 1 tensor to read pictures"]


def test_what_reads_pictures_and_sound_is_told_apart(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "llama")
    weights = load_file(checkpoint / "model.safetensors")
    others = (
        *("model.aligner.fc1.weight", "model.image_newline", "model.generation_head.weight"),
        *("model.acoustic_tokenizer_encoder.weight", "projector.query"),
    )
    weights |= dict.fromkeys(others, np.ones(2, np.float16))
    save_file(weights, checkpoint / "model.safetensors")
    assert describe_other_parts(open_checkpoint(checkpoint)) == [
        "left out: 2 tensors to read pictures",
        "left out: 1 tensor to draw pictures",
        "left out: 1 tensor to read sound",
        "left out: 1 tensor to read pictures or sound",
    ]


def test_positions_of_three_numbers_are_plain_where_there_is_text_alone(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("qwen2", tmp_path / "qwen2")
    plain = describe_checkpoint(checkpoint).model
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    scaling = {"type": "mrope", "mrope_section": [2, 1, 1]}
    # As older transformers wrote it: nothing says which keys are those of the text.
    config |= {"model_type": "qwen2_5_vl", "rope_theta": theta, "rope_scaling": scaling}
    file.write_text(json.dumps(config))
    assert describe(describe_checkpoint(checkpoint).model) == describe(plain)


@in_table
def test_experts_in_one_tensor_in_either_order_give_the_store_of_a_tensor_for_each(
    tmp_path: Path, name: str, kind: str, is_turned: bool
) -> None:
    plain = copy_checkpoint(name, tmp_path / "plain")
    wrapped = copy_checkpoint(name, tmp_path / "wrapped")
    file = plain / "config.json"
    config = json.loads(file.read_text())
    # The part of Qwen3-VL that reads text has no such choice.
    file.write_text(json.dumps(config | {"norm_topk_prob": True}))
    wrap(wrapped, kind, f"{kind}_text", "model.language_model.")
    weights = load_file(wrapped / "model.safetensors")
    stacked: Tensors = {name: value for name, value in weights.items() if ".experts." not in name}
    bases = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for base in bases:
        gates, ups, downs = (
            np.stack(
                [
                    weights[f"{base}.experts.{expert}.{part}_proj.weight"]
                    for expert in range(config.get("num_experts", config.get("num_local_experts")))
                ]
            )
            for part in ("gate", "up", "down")
        )
        gate_ups = np.concatenate([gates, ups], axis=1)
        if is_turned:
            gate_ups, downs = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (gate_ups, downs))
        stacked |= {f"{base}.experts.gate_up_proj": gate_ups, f"{base}.experts.down_proj": downs}
    save_file(stacked, wrapped / "model.safetensors")
    for checkpoint in (plain, wrapped):
        convert_golden(checkpoint, checkpoint, EXACT)
    files = [path.relative_to(plain) for path in sorted(plain.rglob("*.arrow"))]
    assert len(files) > 1
    for each in files:
        assert (plain / each).read_bytes() == (wrapped / each).read_bytes(), each
