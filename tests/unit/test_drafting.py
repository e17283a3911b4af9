"""Which tokens a prompt or an MTP head gives to guess, and when guessing pays."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.arrays import F32
from pi2.cli.main import run
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.opening import Touched
from pi2.engine.speculation import (
    FIRST_REST,
    PLAIN_STEPS,
    REFRESH_STEPS,
    TRIAL_STEPS,
    Payback,
    PromptLookup,
)
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint, describe_mtp
from pi2.plan.documents.model_parts import Quantization
from pi2.pulled_models import PLAN
from tests.helpers.goldens import (
    EXACT,
    UNROUNDED,
    change_config,
    convert_golden,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
    write_plan,
)
from tests.helpers.peers import Tiny, read_models, write_tiny
from tests.helpers.tables import in_table

MODELS = read_models()


def propose(ids: Sequence[int], match: int = 2, most: int = 3) -> list[int]:
    return PromptLookup(match).propose(0, np.array(ids, np.int64), most)


def test_what_came_after_the_last_tokens_is_guessed() -> None:
    assert propose([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5]
    assert propose([1, 2, 3, 4, 5, 9, 1]) == []
    assert propose([1]) == []
    assert propose([7, 7, 7]) == [7]
    # The longest match counts, then the latest.
    assert propose([8, 1, 2, 3, 5, 1, 2, 4, 8, 1, 2]) == [3, 5, 1]
    assert propose([5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2]) == [4, 7, 1]


def test_an_index_that_grows_finds_what_a_new_one_finds() -> None:
    draw = np.random.default_rng(3)
    ids = draw.integers(0, 4, 200)
    growing = PromptLookup(3)
    for end in range(1, 200, 3):
        known = ids[:end]
        assert growing.propose(0, known, 5) == PromptLookup(3).propose(0, known, 5)
    growing.forget(0)
    assert growing.propose(0, np.array([1, 2, 3]), 4) == []


def feed(
    payback: Payback, steps: int, *, kept: int, size: int, seconds: float, flash: int = 0
) -> list[bool]:
    """Steps as they are wanted, of which those with guesses keep ``kept`` tokens, touch ``size``
    bytes in memory and ``flash`` on flash, and take ``seconds``; those without touch 90 and 10, and
    take a second."""
    found = []
    for _ in range(steps):
        drafted = payback.wants_draft()
        found.append(drafted)
        touched = Touched(size, flash or 10 * kept) if drafted else Touched(90, 10)
        tokens, taken_s = (kept, seconds) if drafted else (1, 1.0)
        payback.note(drafted=drafted, tokens=tokens, touched=touched, seconds=taken_s)
    return found


def test_guessing_goes_on_while_it_saves_bytes_and_time() -> None:
    found = feed(Payback(), 200, kept=3, size=200, seconds=2.0)
    assert found[:PLAIN_STEPS] == [False] * PLAIN_STEPS
    assert found[PLAIN_STEPS : PLAIN_STEPS + REFRESH_STEPS] == [True] * REFRESH_STEPS
    assert not found[PLAIN_STEPS + REFRESH_STEPS], "steps without guesses stay known"
    assert sum(found) > 180


@pytest.mark.parametrize(("kept", "size", "seconds"), [(1, 140, 0.5), (2, 230, 1.0), (2, 130, 2.5)])
def test_guessing_rests_where_it_saves_no_bytes_or_no_time(
    kept: int, size: int, seconds: float
) -> None:
    found = feed(Payback(), 1000, kept=kept, size=size, seconds=seconds)
    first = PLAIN_STEPS + TRIAL_STEPS
    assert all(found[PLAIN_STEPS:first])
    assert not any(found[first : first + FIRST_REST])
    assert all(found[first + FIRST_REST : first + FIRST_REST + TRIAL_STEPS])
    assert sum(found) <= 6 * TRIAL_STEPS, "each rest is longer than the one before"


def test_what_rests_is_taken_up_only_for_more_than_it_takes_to_go_on() -> None:
    slight: dict[str, Any] = {"kept": 2, "size": 176, "seconds": 1.5}
    assert sum(feed(Payback(), 400, **slight)) > 350
    payback = Payback()
    feed(payback, PLAIN_STEPS + TRIAL_STEPS, kept=1, size=300, seconds=3.0)
    assert not payback.is_on
    assert sum(feed(payback, 400, **slight)) < 50
    feed(payback, 600, kept=4, size=200, seconds=2.0)
    assert payback.is_on


USUAL = "model.layers.2", ("eh_proj", "enorm", "hnorm", "shared_head.norm")
HEADS = {
    "deepseek-v3": USUAL,
    "glm4-moe": USUAL,
    "qwen3-next": ("mtp.layers.0", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
}
"""How names of an MTP head's layer begin, and ends of names of its other tensors: projection, its
two norms, and the last norm."""


def name_own(name: str) -> list[str]:
    layer, own = HEADS[name]
    start = layer if layer.startswith("model") else "mtp"
    return [f"{start}.{part}.weight" for part in own]


def add_head(name: str, checkpoint: Path, *, is_blind: bool = False) -> dict[str, F32]:
    """Give a checkpoint an MTP head, whose layer is one of its layers; return its tensors.  With
    ``is_blind`` no layer adds anything, and the head reads tokens only: it guesses all rightly."""
    file, unit = checkpoint / "model.safetensors", float(name != "qwen3-next")
    tensors = {key: v.astype(np.float32) for key, v in load_file(file).items()}
    hidden, draw = len(tensors["model.norm.weight"]), np.random.default_rng(5)
    for key in [key for key in tensors if key.startswith("model.layers.1.")]:
        tensors[key.replace("model.layers.1", HEADS[name][0])] = tensors[key]
    weights = [draw.normal(0, 0.3, (hidden, 2 * hidden))]
    weights += [unit + draw.normal(0, 0.2, hidden) for _ in range(3)]
    if HEADS[name] == USUAL:  # copies, as in GLM 4.5
        tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"]
    if is_blind:
        for key in tensors:
            if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensors[key] = np.zeros_like(tensors[key])
        weights = [np.eye(hidden, 2 * hidden), *[np.full(hidden, unit)] * 2]
        weights.append(tensors["model.norm.weight"])
    own = (values.astype(np.float32) for values in weights)
    tensors |= dict(zip(name_own(name), own, strict=True))
    save_file(tensors, file)
    change_config(checkpoint, num_nextn_predict_layers=1)
    return tensors


def write_plans(name: str, folder: Path, backend: str, *, is_blind: bool = False) -> Path:
    """Convert a golden model and its MTP head, with a plan for each; return the model's."""
    checkpoint = copy_checkpoint(name, folder / "checkpoint")
    add_head(name, checkpoint, is_blind=is_blind)
    return convert_both(checkpoint, folder, backend)


def convert_both(source: Path, folder: Path, backend: str) -> Path:
    plan = write_plan(folder, convert_golden(source, folder, EXACT), {})
    opened = open_checkpoint(source)
    head = describe_mtp(opened, describe_checkpoint(opened, "golden").model)
    exact = {"id": "golden", "quantization": Quantization.model_validate(dict(EXACT))}
    (folder / "mtp").mkdir()
    convert_checkpoint(opened, head.model_copy(update=exact), folder / "mtp" / "store")
    write_plan(folder / "mtp", head.model_copy(update=exact), {"backends": {"cpu": backend}})
    return plan


def write_file(model: Tiny, file: Path, *, left_out: str = "none", is_blind: bool = False) -> Path:
    """Write a tiny model with an MTP head as llama.cpp has them, for every family with one layer
    more (see `add_head`); without tensors whose names a pattern has ``left_out``."""
    tensors, layers = dict(model.list_tensors()), model.settings[".block_count"]
    hidden, own = model.settings[".embedding_length"], f"blk.{layers}."
    # The second layer attends, and is a mixture.
    second = {key: v for key, v in tensors.items() if key.startswith("blk.1.")}
    tensors |= {key.replace("blk.1.", own): values for key, values in second.items()}
    draw = np.random.default_rng(5)
    weights: list[Any] = [draw.normal(0, 0.3, (hidden, 2 * hidden))]
    weights += [1 + draw.normal(0, 0.2, hidden) for _ in range(3)]
    if is_blind:
        for key in tensors:
            if re.search(r"attn_output|ssm_out|ffn_down", key):
                tensors[key] = np.zeros_like(tensors[key])
        weights = [
            np.eye(hidden, 2 * hidden),
            *[np.ones(hidden)] * 2,
            tensors["output_norm.weight"],
        ]
    for part, values in zip(
        ("eh_proj", "enorm", "hnorm", "shared_head_norm"), weights, strict=True
    ):
        tensors[f"{own}nextn.{part}.weight"] = values.astype(np.float32)
    kept = {key: v for key, v in tensors.items() if not re.search(left_out, key)}
    has_head = int(any(key.startswith(own) for key in kept))
    counts = {".block_count": layers + has_head, ".nextn_predict_layers": has_head}
    return write_tiny(file, replace(model, settings={**model.settings, **counts}), kept)


def load_both(plan: Path, backend: str, **settings: Any) -> LoadedModel:
    speculation = {"drafts": "plan", "plan": "./mtp/golden.plan.toml", "when": "always"}
    changes = {"decode.speculation": speculation, "backends.cpu": backend, **UNROUNDED}
    return pi2.load(plan, set=changes | settings)


BOTH = pytest.mark.parametrize(
    ("name", "backend"), [("deepseek-v3", "reference"), ("qwen3-next", "cpu")]
)


@BOTH
def test_a_text_is_the_same_with_an_mtp_head(tmp_path: Path, name: str, backend: str) -> None:
    plan, golden = write_plans(name, tmp_path, backend), read_golden(name)
    with load_both(plan, backend, **{"decode.batch": 2}) as model:
        answer: dict[str, Any] = {"max_tokens": 32, "temperature": 0.0, "ignore_eos": True}
        results = model.generate_batch([golden.prompt, golden.prompt[:9]], **answer).result
        counters = model.stats.speculation
    assert list(results.sequences[0].token_ids) == golden.greedy
    assert counters.draft_tokens > 0 and counters.accepted_tokens < counters.draft_tokens


@BOTH
def test_a_head_that_is_right_has_all_of_its_guesses_accepted(
    tmp_path: Path, name: str, backend: str
) -> None:
    plan, prompt = write_plans(name, tmp_path, backend, is_blind=True), read_golden(name).prompt
    with pi2.load(plan, set={"backends.cpu": backend, **UNROUNDED}) as model:
        alone = model.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True).result
    with load_both(plan, backend) as model:
        result = model.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True).result
        counters = model.stats.speculation
        assert model.scheduler.rounds.whole.steps <= 6
    assert result.token_ids == alone.token_ids
    assert counters.accepted_tokens == counters.draft_tokens >= 16


PROMPT = [5, 9, 33, 60, 7]


def read_head(model: LoadedModel) -> tuple[F32, F32]:
    """What a model's head reads of `PROMPT`, and the logits of its MTP head after each token."""
    forward, draft = model._parts.forward, model._parts.draft
    assert draft is not None
    seen: list[F32] = []
    forward.watch = lambda place, position, tokens, inputs: seen.append(inputs.copy())
    forward.prefill(np.array(PROMPT, np.int32))
    draft.forward.given = np.concatenate(seen)[:-1]
    found = draft.forward.prefill(np.array(PROMPT[1:], np.int32), all_logits=True)
    return np.concatenate(seen)[:-1], found


def test_a_head_reads_a_token_and_the_input_of_the_head_before_it(tmp_path: Path) -> None:
    """Its logits are those of a model whose embeddings are both, each by its norm, projected."""
    name = "deepseek-v3"
    plan = write_plans(name, tmp_path, "reference")
    tensors, prompt = load_file(tmp_path / "checkpoint" / "model.safetensors"), PROMPT
    with load_both(plan, "reference") as model:
        inputs, found = read_head(model)
    project, token_norm, stream_norm, last_norm = (tensors[own] for own in name_own(name))
    inputs = inputs[:, : len(last_norm)]
    parts = [(tensors["model.embed_tokens.weight"][prompt[1:]], token_norm), (inputs, stream_norm)]
    normed = [x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * w for x, w in parts]
    table = np.zeros_like(tensors["model.embed_tokens.weight"])
    table[: len(found)] = np.concatenate(normed, axis=1) @ project.T
    checkpoint = copy_checkpoint(name, tmp_path / "one" / "checkpoint")
    change_config(checkpoint, num_hidden_layers=1, first_k_dense_replace=0)
    layer = {
        key.replace("layers.2", "layers.0"): own
        for key, own in tensors.items()
        if re.match(r"model\.layers\.2\.(?!e|hnorm|shared)", key)
    }
    ends = {"model.embed_tokens.weight": table, "model.norm.weight": last_norm}
    save_file(
        layer | ends | {"lm_head.weight": tensors["lm_head.weight"]},
        checkpoint / "model.safetensors",
    )
    exact = dict(EXACT, embedding="fp16")
    one = write_plan(tmp_path / "one", convert_golden(checkpoint, tmp_path / "one", exact), {})
    with pi2.load(one, set=UNROUNDED) as model:
        expected = model.logits(list(range(len(found))))
    assert measure_error(found, expected) < 2e-3


def test_an_mtp_head_does_not_run_by_itself(tmp_path: Path) -> None:
    write_plans("deepseek-v3", tmp_path, "reference")
    with pytest.raises(pi2.UserError, match=r"P284.*only drafts for its model"):
        pi2.load(tmp_path / "mtp" / "golden.plan.toml")


def test_a_checkpoint_without_a_head_gives_none(tmp_path: Path) -> None:
    opened = open_checkpoint(copy_checkpoint("deepseek-v3", tmp_path / "checkpoint"))
    with pytest.raises(pi2.UserError, match=r"P544.*no MTP head"):
        describe_mtp(opened, describe_checkpoint(opened).model)


def test_a_conversion_names_the_command_that_converts_its_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, store = copy_checkpoint("deepseek-v3", tmp_path / "checkpoint"), tmp_path / "model"
    add_head("deepseek-v3", checkpoint, is_blind=True)
    assert run(["convert", str(checkpoint), "-o", str(store), "--quantization", "fp16"]) == 0
    advice = f"pi2 convert {checkpoint} --mtp -o {store}-mtp"
    assert advice in capsys.readouterr().err
    assert run(advice.split()[1:]) == 0
    assert "decode.speculation = " in capsys.readouterr().err
    speculation = {"drafts": "plan", "plan": f"../model-mtp/{PLAN}", "when": "always"}
    changes = {"decode.speculation": speculation, "memory.budget": "2 GiB"}
    changes["decode.predictor"] = "none"  # both are stores of an MoE model
    with (tmp_path / "model-mtp" / PLAN).open("a") as head:
        head.write('[decode]\npredictor = "none"\n')
    with pi2.load(store / PLAN, set=changes) as model:
        result = model.generate([5, 9, 33], max_tokens=12, temperature=0.0, ignore_eos=True).result
        counters = result.statistics.speculation
    assert counters.accepted_tokens == counters.draft_tokens > 4


def widen_experts(checkpoint: Path) -> None:
    """Draw weights of 32 neurons an expert instead of 20."""
    file, draw = checkpoint / "model.safetensors", np.random.default_rng(1)
    tensors: dict[str, F32] = {}
    for key, own in load_file(file).items():
        shape = [32 if size == 20 else size for size in own.shape]
        tensors[key] = draw.normal(own.ndim == 1, 0.1, shape).astype(np.float32)
    save_file(tensors, file)
    change_config(checkpoint, moe_intermediate_size=32)


MTP: dict[str, Any] = {"drafts": "mtp", "when": "always", "tokens": 3}
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


@in_table
def test_the_head_in_a_file_drafts_and_the_text_stays(
    tmp_path: Path, name: str, is_blind: bool, is_made: bool
) -> None:
    """``is_made``: pi2 makes the file of a folder."""
    file, found, prompt = tmp_path / "tiny.gguf", [], list(range(5, 22))
    if not is_made:
        write_file(MODELS[name], file, is_blind=is_blind)
    else:
        checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
        widen_experts(checkpoint)
        add_head(name, checkpoint, is_blind=is_blind)
        assert run(["convert", str(checkpoint), "-o", str(file), "--quantization", "q8_0"]) == 0
    for drafts in ({}, {"decode.speculation": MTP}):
        with pi2.load(file, set={"kv.context": 64, "decode.batch": 2, **drafts}) as model:
            result = model.generate_batch([prompt, prompt[:9]], **GREEDY).result
            found.append([own.token_ids for own in result.sequences])
            counters = model.stats.speculation
    assert found[0] == found[1]
    assert counters.draft_tokens > 8
    assert (counters.accepted_tokens == counters.draft_tokens) == is_blind


def test_experts_that_lie_apart_are_refused(tmp_path: Path) -> None:
    checkpoint, file = copy_checkpoint("glm4-moe", tmp_path / "checkpoint"), tmp_path / "tiny.gguf"
    add_head("glm4-moe", checkpoint)
    assert run(["convert", str(checkpoint), "-o", str(file), "--quantization", "q8_0"]) == 0
    with pytest.raises(pi2.UserError, match=r"P544.*experts of layer 1 do not lie side by side"):
        pi2.load(file)


@pytest.mark.parametrize("is_head", [True, False])
def test_a_second_file_drafts_if_it_is_a_head_or_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_head: bool
) -> None:
    write = partial(write_file, MODELS["glm4-moe"], is_blind=True)
    main, found = write(tmp_path / "main.gguf", left_out=r"^blk\.2\."), []
    other = main
    if is_head:
        (tmp_path / "other").mkdir()
        other = write(tmp_path / "other" / "draft.gguf", left_out=r"^(?!blk\.2)")
    command = f"run {main} -p w7 -n 24 --temperature 0 --ignore-eos --json --set kv.context=64"
    always = "--set decode.speculation.when=always"
    for more in ("", f"--draft {other} {always}"):
        assert run([*command.split(), *more.split()]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["text"] == found[1]["text"] and found[0]["speculation"] is None
    drafted = found[1]["speculation"]
    assert drafted["accepted_tokens"] == drafted["draft_tokens"] >= 16
    if is_head:  # a plan may name one, but no file without a head
        speculation = {"drafts": "mtp", "plan": str(main)}
        with pytest.raises(pi2.UserError, match=r"P544.*no MTP head"):
            pi2.load(main, set={"decode.speculation": speculation})


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3-next"])
def test_the_head_in_a_file_computes_what_the_store_made_of_it_does(
    tmp_path: Path, name: str
) -> None:
    file, found = write_file(MODELS[name], tmp_path / "tiny.gguf"), []
    plan = convert_both(file, tmp_path, "reference")
    settings = {"kv.context": 64, "decode.speculation": MTP}
    for load in (partial(load_both, plan, "reference"), partial(pi2.load, file, set=settings)):
        with load() as model:
            found.append(read_head(model)[1])
    assert measure_error(found[1], found[0]) < 4e-3


def test_a_file_that_streams_drafts_with_its_head_by_itself(tmp_path: Path) -> None:
    """The head's experts stream as well; with less memory, text that came before drafts."""
    model, sizes = MODELS["glm4-moe"], {32: 256, 64: 512, 80: 32768, 20: 2048}
    large = replace(
        model,
        kind="Q8_0",
        settings={
            **model.settings, ".embedding_length": 256, ".feed_forward_length": 32768,
            ".expert_feed_forward_length": 2048, ".attention.head_count": 32,
            ".attention.head_count_kv": 16,
        },
        tensors={
            name: [[sizes.get(size, size) for size in shape], *bounds]
            for name, (shape, *bounds) in model.tensors.items()
        },
    )  # fmt: skip
    file, ids, sources = write_file(large, tmp_path / "large.gguf", is_blind=True), [], []
    settings = {"kv.context": 128, "prefill.chunk": 32}
    with pytest.raises(pi2.UserError, match="P026") as caught:
        pi2.load(file, memory="10 MiB", set=settings | {"decode.speculation.drafts": "mtp"})
    least = re.search(r"--memory '(\d+) MiB", str(caught.value))
    assert least is not None
    for memory in (None, f"{int(least[1]) - 1} MiB", f"{least[1]} MiB"):
        with pi2.load(file, memory=memory, set=settings) as loaded:
            ids.append(loaded.generate(list(range(5, 45)), **GREEDY).result.token_ids)
            speculation, draft = loaded.plan.plan.decode.speculation, loaded.plan.draft
            sources.append(None if speculation is None else speculation.drafts)
            counters = loaded.stats.speculation
    assert ids == ids[:1] * 3
    assert sources == [None, "prompt", "mtp"]
    assert draft is not None and draft.file is not None and draft.file.expert_bytes > 0
    assert loaded.plan.file is not None and [*loaded.plan.file.shared] == ["output.weight"]
    assert counters.accepted_tokens == counters.draft_tokens > 4


def test_a_head_that_lacks_a_tensor_is_left_out_unless_the_plan_names_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kv.context": 64}
    wanted = {**settings, "decode.speculation": MTP}
    write, other = partial(write_file, MODELS["glm4-moe"]), tmp_path / "other.gguf"
    file = write(tmp_path / "tiny.gguf", left_out="blk.2.attn_norm")
    with pi2.load(file, set=settings) as model:
        assert len(model.generate([5, 9], **GREEDY).result.token_ids) == 24
    with pytest.raises(pi2.UserError, match=r"P533.*blk\.2\.attn_norm"):
        pi2.load(file, set=wanted)
    with pi2.load(write(other, left_out="head_norm"), set=wanted) as model:
        assert model.plan.draft is not None, "the model's last norm is the head's"
    with pytest.raises(pi2.UserError, match=r"P544.*no MTP head"):
        pi2.load(write(other, left_out="eh_proj"), set=wanted)
    plan = make_golden_plan("llama", tmp_path)
    with pytest.raises(pi2.UserError, match=r"P284.*a neuron store, which has no MTP head"):
        pi2.load(plan, set={"decode.speculation": MTP})
