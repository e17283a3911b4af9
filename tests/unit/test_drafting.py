"""Which tokens a prompt or an MTP head gives to guess, and when guessing pays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.arrays import F32
from pi2.cli.main import run
from pi2.engine.forward import Forward
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.parts import Touched
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
    measure_error,
    read_golden,
    write_plan,
)


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


HEADS = {
    "deepseek-v3": ("model.layers.2", ("eh_proj", "enorm", "hnorm", "shared_head.norm")),
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
    file, unit = checkpoint / "model.safetensors", float(name == "deepseek-v3")
    tensors = {key: v.astype(np.float32) for key, v in load_file(file).items()}
    hidden, draw = len(tensors["model.norm.weight"]), np.random.default_rng(5)
    for key in [key for key in tensors if key.startswith("model.layers.1.")]:
        tensors[key.replace("model.layers.1", HEADS[name][0])] = tensors[key]
    weights = [draw.normal(0, 0.3, (hidden, 2 * hidden))]
    weights += [unit + draw.normal(0, 0.2, hidden) for _ in range(3)]
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
    plan = write_plan(folder, convert_golden(checkpoint, folder, EXACT), {})
    opened = open_checkpoint(checkpoint)
    head = describe_mtp(opened, describe_checkpoint(opened, "golden").model)
    exact = {"id": "golden", "quantization": Quantization.model_validate(dict(EXACT))}
    (folder / "mtp").mkdir()
    convert_checkpoint(opened, head.model_copy(update=exact), folder / "mtp" / "store")
    write_plan(folder / "mtp", head.model_copy(update=exact), {"backends": {"cpu": backend}})
    return plan


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
        assert model.scheduler.rounds.steps <= 6
    assert result.token_ids == alone.token_ids
    assert counters.accepted_tokens == counters.draft_tokens >= 16


def test_a_head_reads_a_token_and_the_input_of_the_head_before_it(tmp_path: Path) -> None:
    """Its logits are those of a model whose embeddings are both, each by its norm, projected."""
    name = "deepseek-v3"
    plan = write_plans(name, tmp_path, "reference")
    tensors, prompt = load_file(tmp_path / "checkpoint" / "model.safetensors"), [5, 9, 33, 60, 7]
    with load_both(plan, "reference") as model:
        forward, draft = model._parts.forward, model._parts.draft
        assert isinstance(forward, Forward) and draft is not None
        assert isinstance(draft.forward, Forward)
        seen: list[F32] = []
        forward.watch = lambda place, position, tokens, inputs: seen.append(inputs.copy())
        forward.prefill(np.array(prompt, np.int32))
        draft.forward.given = np.concatenate(seen)[:-1]
        found = draft.forward.prefill(np.array(prompt[1:], np.int32), all_logits=True)
    project, token_norm, stream_norm, last_norm = (tensors[own] for own in name_own(name))
    inputs = np.concatenate(seen)[:-1, : len(last_norm)]
    parts = [(tensors["model.embed_tokens.weight"][prompt[1:]], token_norm), (inputs, stream_norm)]
    normed = [x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * w for x, w in parts]
    table = np.zeros_like(tensors["model.embed_tokens.weight"])
    table[: len(found)] = np.concatenate(normed, axis=1) @ project.T
    checkpoint = copy_checkpoint(name, tmp_path / "one" / "checkpoint")
    change_config(checkpoint, num_hidden_layers=1, first_k_dense_replace=0)
    layer = {
        key.replace("layers.2", "layers.0"): own
        for key, own in tensors.items()
        if key.startswith("model.layers.2.") and key not in name_own(name)
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
    assert run(["convert", str(checkpoint), "-o", str(store)]) == 0
    advice = f"pi2 convert {checkpoint} --mtp -o {store}-mtp"
    assert advice in capsys.readouterr().err
    assert run(advice.split()[1:]) == 0
    assert "decode.speculation = " in capsys.readouterr().err
    speculation = {"drafts": "plan", "plan": f"../model-mtp/{PLAN}", "when": "always"}
    changes = {"decode.speculation": speculation, "memory.budget": "2 GiB"}
    with pi2.load(store / PLAN, set=changes) as model:
        result = model.generate([5, 9, 33], max_tokens=12, temperature=0.0, ignore_eos=True).result
        counters = result.statistics.speculation
    assert counters.accepted_tokens == counters.draft_tokens > 4
