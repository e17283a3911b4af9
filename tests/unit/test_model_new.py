"""`pi2 model new`, and what `pi2 convert` leaves beside a store for a first run."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.config import read_sampling
from pi2.importing.families import list_families
from pi2.importing.new_model import describe_checkpoint, make_id
from pi2.importing.requirements import describe_other_parts
from pi2.plan.documents.model import Model
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.goldens import change_config, copy_checkpoint, list_goldens
from tests.helpers.models import MIXTURE, draw_weights, make_model
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table

Capture = pytest.CaptureFixture[str]


def rename_tensors(checkpoint: Path, old: str, new: str) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {name.replace(old, new, 1): values for name, values in load_file(file).items()}
    save_file(tensors, file)


@pytest.mark.parametrize("name", list_goldens())
def test_the_document_is_sound_and_says_everything(tmp_path: Path, name: str) -> None:
    made = describe_checkpoint(copy_checkpoint(name, tmp_path / name))
    file = tmp_path / f"{made.model.id}.model.toml"
    file.write_text(made.text)
    report = check_file(file)
    assert report.is_sound, report.diagnostics
    assert report.document == made.model


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "original_max_position_embeddings": 64}
HALF = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
UNKNOWN = "(model_type) is unknown; the nearest known one is "
WHERE = {"P533": "", "P534": "config.json says", "P537": "model.safetensors", "P544": "config.json"}
"""What a finding with the code names."""


@pytest.mark.parametrize(
    ("name", "changes", "code", "problem"),
    [
        ("llama", {"model_type": "nobody"}, "P544", "the family 'nobody' (model_type) is unknown"),
        ("llama", {"model_type": "llama5_text"}, "P544", f"{UNKNOWN}'llama4_text'"),
        ("llama", {"model_type": "minimax_m9"}, "P544", f"{UNKNOWN}'minimax_m2'"),
        ("llama", {"model_type": "minimax"}, "P544", "lightning attention"),
        ("llama", {"model_type": None}, "P544", "does not state model_type"),
        *(
            ("glm-moe-dsa", changes, "P544", f"attention.index: an index needs {needed}")
            for changes, needed in (
                ({"indexer_types": ["shared", "full", "full", "full"]}, "a layer of its own"),
                ({"index_head_dim": 4}, "heads that are as wide as the part that is rotated"),
                ({"q_lora_rank": None}, "queries that are made of a vector"),
            )
        ),
        ("minimax-m3-blocks", {"index_n_heads": 3}, "P544", "a head for each of the 2 key heads"),
        ("minimax-m3-blocks", {"index_local_blocks": 5}, "P544", "no more local blocks"),
        ("llama", {"hidden_size": "32"}, "P544", "hidden_size is '32', expected a whole number"),
        ("llama", {"hidden_act": "mish"}, "P544", "the activation 'mish' is unknown"),
        ("llama", {"rope_parameters": {"rope_type": "warp"}}, "P544", "position scaling 'warp'"),
        ("llama", {"rope_parameters": HALF}, "P544", "partial_rotary_factor is 0.5"),
        ("llama", {"num_attention_heads": 0}, "P544", "heads"),
        ("llama", {"rope_theta": 10**400, "rope_parameters": None}, "P544", "rope_theta"),
        (
            "llama-yarn",
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            *("P544", "original_max_position_embeddings is 0"),
        ),
        *(
            (
                "llama-yarn",
                # 0.1 ln(e^10) + 1 cancels with a scale of -1.
                {
                    "rope_parameters": YARN
                    | {"factor": math.exp(10), "mscale": one, "mscale_all_dim": other}
                },
                *("P544", "mscale and mscale_all_dim scale attention by"),
            )
            for one, other in ((1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0))
        ),
        ("llama-yarn", {"max_position_embeddings": 10**400}, "P544", "max_position_embeddings"),
        ("gemma", {"hidden_size": -32}, "P544", "hidden_size is -32, not in"),
        ("granite", {"logits_scaling": 0}, "P544", "logits_scaling is 0"),
        ("opt", {"do_layer_norm_before": False}, "P544", "do_layer_norm_before is False"),
        ("falcon-7b-relu", {"alibi": True}, "P544", "alibi is True"),
        ("qwen3", {"num_key_value_heads": 3}, "P544", "kv_heads"),
        # Mixtures.
        ("deepseek-v2", {"topk_method": "best"}, "P544", "topk_method is 'best'"),
        ("deepseek-v3", {"n_group": 4}, "P544", "6 experts in 4 groups"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, "P544", "a list of 3 kinds of FFN"),
        ("hunyuan-moe", {"moe_topk": [1, 2]}, "P544", "moe_topk in [moe.active_experts"),
        ("ernie4-5-moe", {"use_bias": True}, "P544", "use_bias is True"),
        # Tensors that contradict it, that it denies, and that are not there.
        ("llama", {"intermediate_size": 81}, "P534", "mlp.gate_proj.weight"),
        ("llama", {"vocab_size": 97}, "P534", "model.embed_tokens.weight"),
        ("llama", {"num_key_value_heads": 4}, "P534", "self_attn.k_proj.weight"),
        ("llama", {"head_dim": 16}, "P534", "self_attn.q_proj.weight"),
        ("llama", {"num_hidden_layers": 1}, "P537", "model.layers.1.input_layernorm.weight"),
        ("opt", {"num_hidden_layers": 1}, "P537", "layers.1.self_attn_layer_norm.weight"),
        (
            *("llama-biases", {"attention_bias": False, "mlp_bias": False}),
            *("P537", "self_attn.q_proj.bias"),
        ),
        ("falcon-sequential", {"bias": False}, "P537", "self_attention.query_key_value.bias"),
        ("qwen3", {"model_type": "llama"}, "P537", "self_attn.q_norm.weight"),
        ("llama", {"tie_word_embeddings": True}, "P537", "lm_head.weight"),
        ("llama", {"attention_bias": True}, "P533", "self_attn.q_proj.bias"),
    ],
)
def test_what_cannot_be_described(
    tmp_path: Path, name: str, changes: dict[str, Any], code: str, problem: str
) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / name)
    change_config(checkpoint, **changes)
    with pytest.raises(UserError, match=code) as caught:
        describe_checkpoint(checkpoint)
    said = str(caught.value)
    assert problem in said and WHERE[code] in said
    assert not problem.startswith(UNKNOWN) or "docs/howto/add-a-model.md" in said
    assert code not in ("P534", "P537") or len(caught.value.diagnostics) == 1


@pytest.mark.parametrize(
    ("name", "share"), [("llama", 1.0), ("qwen3", 1.0), ("gemma", 1.0), ("phi3", 0.5), ("glm", 0.5)]
)
def test_a_part_of_heads_is_rotated_where_the_family_does_so(
    tmp_path: Path, name: str, share: float
) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / name)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    change_config(checkpoint, rope_parameters=rope)
    assert describe_checkpoint(checkpoint).model.rope.share == share


def test_a_base_that_alpha_changes_is_read_as_older_transformers_wrote_it(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("hunyuan-dense", tmp_path / "hunyuan")
    theta = describe_checkpoint(checkpoint).model.rope.theta
    scaling = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
    change_config(checkpoint, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    assert describe_checkpoint(checkpoint).model.rope.theta == theta > 10000.0


def test_layers_that_draft_tokens_are_left_out_with_a_word(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("deepseek-v3", tmp_path / "mixture")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    norm = "model.layers.{}.input_layernorm.weight"
    save_file(tensors | {norm.format(2): tensors[norm.format(1)]}, file)
    change_config(checkpoint, num_nextn_predict_layers=1)
    assert describe_checkpoint(checkpoint).model.shape.layers == 2
    assert describe_other_parts(open_checkpoint(checkpoint)) == [
        "left out: 1 tensor of layers to draft tokens"
    ]
    change_config(checkpoint, num_nextn_predict_layers=0)
    with pytest.raises(UserError, match=r"P537.*the model has 2 layers"):
        describe_checkpoint(checkpoint)


def test_no_family_is_both_known_and_refused() -> None:
    listing = list_families()
    assert not listing.refused.keys() & listing.families.keys()


def test_a_mixture_whose_experts_a_bias_chooses_has_it(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("deepseek-v3", tmp_path / "mixture")
    rename_tensors(checkpoint, "model.layers.1.mlp.gate.e_score", "model.layers.1.other.e_score")
    with pytest.raises(UserError, match=r"P533.*e_score_correction_bias"):
        describe_checkpoint(checkpoint)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_reads_pictures_too(tmp_path: Path, prefix: str) -> None:
    checkpoint = copy_checkpoint("gemma3", tmp_path / "gemma3")
    expected = describe_checkpoint(checkpoint).model
    rename_tensors(checkpoint, "model.", prefix)
    file = checkpoint / "config.json"
    text = json.loads(file.read_text())
    del text["hidden_activation"], text["rms_norm_eps"]
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    made = describe_checkpoint(checkpoint).model
    assert made.tensors.query == f"{prefix}layers.{{layer}}.self_attn.q_proj.weight"
    assert made.model_copy(update={"tensors": expected.tensors}) == expected


def test_layers_without_a_window_have_other_positions(tmp_path: Path) -> None:
    """As hub configurations said it before transformers 5."""
    checkpoint = copy_checkpoint("gemma3", tmp_path / "gemma3")
    change_config(
        checkpoint, rope_parameters=None, layer_types=None, sliding_window_pattern=3,
        rope_theta=50000.0, rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )  # fmt: skip
    expected = describe_checkpoint(copy_checkpoint("gemma3", tmp_path / "newer")).model
    made = describe_checkpoint(checkpoint).model
    assert (made.rope, made.other_rope) == (expected.rope, expected.other_rope)
    assert made.attention == expected.attention


def test_a_tied_head_may_be_written_out(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("qwen3", tmp_path / "qwen3")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, file)
    assert describe_checkpoint(checkpoint).model.tied_head


@pytest.mark.parametrize(
    ("name", "prefix"), [("opt", "model."), ("falcon-40b", "transformer."), ("llama", "model.")]
)
def test_names_may_lack_their_first_part(tmp_path: Path, name: str, prefix: str) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / name)
    rename_tensors(checkpoint, prefix, "")
    assert not describe_checkpoint(checkpoint).model.tensors.embedding.startswith(prefix)


def test_predictors_in_the_checkpoint_are_described(tmp_path: Path) -> None:
    model = make_model({"ffn": {"activation": "relu"}})
    checkpoint = write_checkpoint(tmp_path / "sparse", model, draw_weights(model))
    change_config(checkpoint, hidden_act="relu", max_position_embeddings=64, bos_token_id=256)
    made = describe_checkpoint(checkpoint).model
    assert made.predictor is not None and made.predictor.rank == 32
    assert made.tokenizer.bos == 256


def test_turbosparse_mixtral_has_drelu_and_a_predictor_in_every_expert(tmp_path: Path) -> None:
    model = make_model(MIXTURE)
    checkpoint = write_checkpoint(tmp_path / "sparse", model, draw_weights(model))
    change_config(
        checkpoint, model_type="turbosparsemixtral", hidden_act="relu", max_position_embeddings=64,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    made = describe_checkpoint(checkpoint).model
    assert made.ffn.activation == "drelu" and made.moe == model.moe
    assert made.predictor is not None and made.predictor.rank == 32
    store = tmp_path / "store"
    assert run(["convert", str(checkpoint), "-o", str(store)]) == 0
    settings = {"backends.cpu": "reference", "decode.predictor": "low-rank"}
    with pi2.load(store / "default.plan.toml", set=settings) as loaded:
        loaded._parts.forward.prefill(np.array([3, 4], np.int32))
        loaded._parts.forward.decode(5)
        assert loaded.stats.possible_neurons == 3 * 2 * 96
        assert loaded.stats.predicted_neurons > 0


def test_ends_come_from_the_generation_config_first(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "llama")
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert describe_checkpoint(checkpoint).model.tokenizer.eos == (5, 7)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Llama-2-7b hf", "llama-2-7b-hf"), ("..x", "x"), ("日本", "model"), ("a" * 80, "a" * 64)],
)
def test_short_names(name: str, expected: str) -> None:
    assert make_id(name) == expected


# Commands
def test_the_command_writes_a_file_and_overwrites_none(tmp_path: Path, ask: Ask) -> None:
    checkpoint = copy_checkpoint("qwen3", tmp_path / "checkpoint")
    file = tmp_path / "mine.model.toml"
    assert run(["model", "new", str(checkpoint), "-o", str(file)]) == 0
    report = check_file(file)
    assert isinstance(report.document, Model)
    assert report.document.id == "mine" and report.document.attention.head_norm
    assert "P027" in ask(["model", "new", str(checkpoint), "-o", str(file)], 2).err
    assert run(["model", "new", str(checkpoint), "-o", str(file), "--force"]) == 0
    assert run(["model", "new", str(checkpoint), "-o", str(tmp_path / "mine.toml")]) == 2


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_the_plan_beside_a_store_runs(tmp_path: Path, name: str, capsys: Capture) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / name)
    output = tmp_path / "out"
    assert run(["convert", str(checkpoint), "-o", str(output)]) == 0
    plan = output / "default.plan.toml"
    assert f"pi2 run {plan}" in capsys.readouterr().err
    assert run(["validate", str(plan)]) == 0
    assert run(["store", "verify", str(output)]) == 0
    with pi2.load(plan, set={"backends.cpu": "reference"}) as model:
        assert np.isfinite(model.logits([1, 5, 9])).all()


@in_table
def test_the_plan_draws_tokens_as_the_checkpoint_recommends(
    tmp_path: Path, said: str, expected: dict[str, Any] | None
) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "llama")
    (checkpoint / "generation_config.json").write_text(said)
    found = read_sampling(open_checkpoint(checkpoint))
    assert (None if found is None else found.model_dump(exclude_unset=True)) == expected


def test_plans_of_a_model_draw_tokens_as_its_checkpoint_recommends(
    tmp_path: Path, capsys: Capture, ask: Ask
) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "llama")
    said = {"do_sample": True, "temperature": 1, "top_k": 20, "min_p": 0.05}
    (checkpoint / "generation_config.json").write_text(json.dumps(said))
    expected = {"temperature": 1.0, "top_k": 20, "min_p": 0.05}
    store = tmp_path / "store"
    assert run(["convert", str(checkpoint), "-o", str(store)]) == 0
    model = store / "llama.model.toml"
    new, planned = tmp_path / "new.plan.toml", tmp_path / "planned.plan.toml"
    common = ["--model", str(model), "--store", str(store)]
    assert (
        run(["new", "plan", "--device", "host", *common, "--memory", "2GiB", "-o", str(new)]) == 0
    )
    command = ["plan", "--device", "pc-rtx-4090", *common, "--memory", "2GiB", "-o", str(planned)]
    assert run(command) == 0
    for plan in (store / "default.plan.toml", new, planned):
        assert tomllib.loads(plan.read_text())["sampling"] == expected, plan
        capsys.readouterr()
        assert tomllib.loads(ask(["show", str(plan)]).out)["sampling"]["top_k"] == 20


def test_an_answer_ends_where_the_tokenizer_says_that_a_turn_ends(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "llama")
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    turn = {"id": 7, "content": "<turn>", "special": True, **flags}
    (checkpoint / "tokenizer.json").write_text(json.dumps({**tokenizer, "added_tokens": [turn]}))
    said = {"eos_token": {"content": turn["content"]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(said))
    ends = describe_checkpoint(checkpoint).model.tokenizer.eos
    assert turn["id"] not in ends  # no chat template: it is not asked to chat
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert describe_checkpoint(checkpoint).model.tokenizer.eos == (*ends, turn["id"])


def test_a_chat_template_may_lie_in_a_json_file(tmp_path: Path, capsys: Capture) -> None:
    checkpoint, output = copy_checkpoint("llama", tmp_path / "llama"), tmp_path / "out"
    file = checkpoint / "chat_template.json"
    file.write_text("[]")
    assert run(["convert", str(checkpoint), "-o", str(output)]) == 2
    assert "P543" in (told := capsys.readouterr().err) and "chat_template.json" in told
    file.write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert run(["convert", str(checkpoint), "-o", str(output)]) == 0
    (template,) = output.rglob("chat_template.jinja")
    assert template.read_text() == "{{ messages[0].content }}"


def test_quantisation_may_be_chosen(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "llama")
    output = tmp_path / "out"
    assert run(["convert", str(checkpoint), "-o", str(output), "--quantization", "fp16"]) == 0
    document = check_file(output / "llama.model.toml").document
    assert isinstance(document, Model)
    assert set(document.quantization.model_dump(exclude_none=True).values()) == {"fp16"}


def test_replacing_a_store_keeps_the_plan_that_was_changed(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("llama", tmp_path / "llama")
    output = tmp_path / "out"
    command = ["convert", str(checkpoint), "-o", str(output)]
    assert run(command) == 0
    plan = output / "default.plan.toml"
    plan.write_text(plan.read_text() + "# mine\n")
    assert run([*command, "--force"]) == 0
    assert "# mine" not in plan.read_text()
    assert (output / "default.plan.toml.old").read_text().endswith("# mine\n")
