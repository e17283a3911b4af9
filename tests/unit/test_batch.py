"""Several sequences at the same time, each with what it would have alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import pi2
from pi2.arrays import F32
from pi2.cli.run import run_command as command
from pi2.engine.loaded_model import LoadedModel
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.slow import keep_quick
from tests.helpers.tables import in_table

PROMPTS = ([5, 6, 7, 8, 9], [250], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [17, 99])
ROOM = {
    "memory.budget": "2 GiB", "memory.segments.workspace": "16 MiB", "memory.segments.kv": "16 MiB",
    "memory.segments.predictor": "1 MiB", "memory.segments.cold": "700 KiB",
}  # fmt: skip
"""A mixture's plan has as little as one sequence needs, and no cold neurons."""
ROUNDING = 1e-6
"""Of the largest logit: the reference backend adds in another order."""


def feed(model: LoadedModel, ids: Sequence[int], sequence: int) -> None:
    """Read a prompt into the place of a sequence."""
    forward = model._parts.forward
    forward.reset(sequence)
    forward.prefill(np.array(ids, np.int32), sequence=sequence)


def run_together(plan: Path, settings: dict[str, Any]) -> dict[int, list[F32]]:
    """Logits of tokens that follow `PROMPTS`: of four sequences, then of those that are left, then
    of one that has come for another."""
    found: dict[int, list[F32]] = {number: [] for number in range(4)}
    with pi2.load(plan, set={**settings, "decode.batch": 4}) as model:
        for number in (0, 1, 2, 3):
            feed(model, PROMPTS[number], number)
        for step, members in enumerate(([0, 1, 2, 3], [0, 1, 2, 3], [3, 1], [1], [1, 3])):
            tokens = [10 * number + step for number in members]
            for number, row in zip(
                members, model._parts.forward.step(tokens, members), strict=True
            ):
                found[number].append(row.copy())
        check_at_rest(model)
    return found


def run_alone(
    plan: Path, settings: dict[str, Any], steps: Mapping[int, Sequence[int]]
) -> dict[int, list[F32]]:
    found: dict[int, list[F32]] = {}
    with pi2.load(plan, set=settings) as model:
        for number, own in steps.items():
            feed(model, PROMPTS[number], 0)
            found[number] = [model._parts.forward.decode(10 * number + step).copy() for step in own]
    return found


def check_at_rest(model: LoadedModel) -> None:
    cache = model._parts.cache
    assert cache.free_capacity == cache.cold_capacity, "nothing is held in the end"


def check(plan: Path, settings: dict[str, Any]) -> None:
    found = run_together(plan, settings)
    steps = {0: (0, 1), 1: (0, 1, 2, 3, 4), 2: (0, 1), 3: (0, 1, 2, 4)}
    for number, expected in run_alone(plan, settings, steps).items():
        error = np.abs(np.stack(found[number]) - np.stack(expected)).max() / np.abs(expected).max()
        assert error < ROUNDING, (number, error)


CASES: dict[str, dict[str, Any]] = {
    "dense": {"decode.predictor": "none"},
    "gates": {"decode.predictor": "gate"},
    "predictors": {},
    "in memory": {"layers.hot": 1.0},
    # Where the neurons of several do not fit at once, nothing is looked ahead at.
    "ahead by a layer": {
        "decode.look_ahead": "layer",
        "pipeline.cluster": 16,
        "memory.segments.cold": "1 MiB",
        "cache.fill": False,
    },
    "ahead by attention": {"decode.look_ahead": "attention", "layers.hot": 0.0},
    "more than the cache holds": {"decode.threshold": -1e9, "layers.hot": 0.0},
    "lent by the context": {"kv.lend": True},
}


@pytest.mark.parametrize("name", keep_quick(CASES, list(CASES)[1::2]))
def test_every_sequence_has_the_logits_that_it_has_alone(plan: Path, name: str) -> None:
    check(plan, CASES[name])


def test_neurons_may_be_read_in_two_phases(tmp_path: Path) -> None:
    # Gate, up and down take a block of 512 bytes each.
    fp16 = dict.fromkeys(("ffn", "attention", "embedding", "head", "predictor"), "fp16")
    tiny = make_tiny(tmp_path, {"quantization": fp16, "shape": {"hidden": 256}})
    plan = write_plan(tmp_path, tiny, {"layers": {"hot": 0.0}, "pipeline": {"cluster": 8}})
    settings = {
        "pipeline.phases": 2,
        "cache.fill": False,
        "io.engine": "pread",
        "decode.threshold": 0.5,
    }
    with pi2.load(plan, set={**settings, "decode.batch": 2}) as model:
        feed(model, [1], 0)
        feed(model, [2], 1)
        model._parts.forward.step([3, 4], [0, 1])
        assert model.stats.gate_reads > 0 and model.stats.flash_saved_bytes > 0
    check(plan, settings)


@in_table
def test_tokens_of_a_mixture_have_experts_of_their_own(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    check(make_mixture_plan(tmp_path, "drelu"), {**ROOM, "backends.cpu": "reference", **settings})


def test_an_expert_named_late_has_neurons_that_another_token_left_closed(tmp_path: Path) -> None:
    fp16 = dict.fromkeys(("ffn", "attention", "embedding", "head", "predictor"), "fp16")
    shape = {"layers": 4, "hidden": 256, "ffn": 200, "vocab": 300}
    plan = make_mixture_plan(tmp_path, "drelu", {"quantization": fp16, "shape": shape})
    settings = {
        **ROOM, "backends.cpu": "reference", "decode.batch": 4, "decode.threshold": -1e9,
        "decode.look_ahead": "layer", "memory.segments.cold": "2 MiB",
        "memory.segments.workspace": "32 MiB", "layers.hot": 0.0, "cache.fill": False,
        "io.engine": "pread", "pipeline.cluster": 8,
    }  # fmt: skip
    found = []
    for phases in (1, 2):
        with pi2.load(plan, set={**settings, "pipeline.phases": phases}) as model:
            for number in range(4):
                feed(model, PROMPTS[number], number)
            step = model._parts.forward.step
            tokens = [[first, first + 9, first + 20, first + 30] for first in range(30)]
            found.append(np.stack([step(own, [0, 1, 2, 3]).copy() for own in tokens]))
            assert model.stats.foreseen_experts < model.stats.routed_experts
            check_at_rest(model)
    assert np.abs(found[1] - found[0]).max() / np.abs(found[0]).max() < ROUNDING


def test_a_neuron_that_several_tokens_need_is_read_once(plan: Path) -> None:
    settings = {
        "decode.threshold": -1e9,
        "layers.hot": 0.0,
        "memory.segments.cold": "1 MiB",
        "cache.fill": False,
    }
    with pi2.load(plan, set={**settings, "decode.batch": 2}) as model:
        feed(model, [1], 0)
        feed(model, [2], 1)
        before = model.stats
        model._parts.forward.step([3, 4], [0, 1])
        statistics = model.stats - before
        neurons = model.plan.model.shape.layers * model.plan.model.layer_neurons
        assert statistics.predicted_neurons == statistics.possible_neurons == 2 * neurons
        assert statistics.cache_misses == neurons and statistics.cache_hits == 0


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_prompts_wait_for_place_and_give_text_that_they_give_alone(plan: Path, batch: int) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 9}
    with pi2.load(plan) as model:
        alone = [
            model.generate(ids, seed=40 + n, **options).result for n, ids in enumerate(PROMPTS)
        ]
        lengths = [len(result.token_ids) for result in alone]
    with pi2.load(plan, set={"decode.batch": batch}) as model:
        generation = model.generate_batch(PROMPTS, seed=40, **options)
        texts = [""] * len(PROMPTS)
        for number, piece in generation:
            texts[number] += piece
        result = generation.result
        assert [item.token_ids for item in result.sequences] == [item.token_ids for item in alone]
        assert texts == [item.text for item in alone]
        assert [item.finish_reason for item in result.sequences] == [
            item.finish_reason for item in alone
        ]
        assert result.rounds.whole.tokens == sum(lengths) - len(lengths)
        assert result.mean_sequences is not None and 1 <= result.mean_sequences <= batch
        assert (result.mean_sequences > 1) == (batch > 1)
        # The first place is as good as any for a generation of one.
        again = model.generate(PROMPTS[1], seed=41, **options).result
        assert again.token_ids == alone[1].token_ids


def test_the_context_is_that_of_each_sequence(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"kv": {"context": 16}})
    with pi2.load(plan, set={"decode.batch": 2}) as model:
        result = model.generate_batch(["0123456789", "01"], max_tokens=99, ignore_eos=True).result
        assert [item.finish_reason for item in result.sequences] == ["context", "context"]
        for item in result.sequences:
            assert item.prompt_tokens + len(item.token_ids) == 17
        with pytest.raises(pi2.UserError, match="P601"):
            model.generate_batch(["fine", "x" * 16])
        with pytest.raises(pi2.UserError, match="P603"):
            model.generate_batch([])


def test_an_interrupted_batch_leaves_nothing_behind(plan: Path) -> None:
    with pi2.load(plan, set={"decode.batch": 3, "kv.lend": True}) as model:
        expected = model.generate_batch(PROMPTS, max_tokens=6).result.sequences
        started = model.generate_batch(PROMPTS, max_tokens=6)
        next(started)
        check_at_rest(model)
        found = model.generate_batch(PROMPTS, max_tokens=6).result.sequences
        assert [item.token_ids for item in found] == [item.token_ids for item in expected]


def test_positions_that_depend_on_the_length_are_for_one_sequence(tmp_path: Path) -> None:
    rope = {
        "kind": "longrope",
        "factor": 2.0,
        "original_context": 32,
        "short_factors": [1.0] * 8,
        "long_factors": [2.0] * 8,
    }
    plan = write_plan(tmp_path, make_tiny(tmp_path, {"rope": rope}))
    with pytest.raises(pi2.UserError, match="P322"):
        pi2.load(plan, set={"decode.batch": 2})
    with pi2.load(plan, set={"decode.batch": 2, "kv.context": 32}) as model:
        assert len(model._parts.forward.positions) == 2


def test_kernels_give_every_sequence_its_text_within_the_segments(tmp_path: Path) -> None:
    # More sequences than a chunk has tokens; misses, and gates that are known.
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"prefill": {"chunk": 2}})
    settings = {"backends.cpu": "cpu", "decode.predictor": "gate", "decode.batch": 3}
    with pi2.load(plan, set=settings) as model:
        found = model.generate_batch(PROMPTS, max_tokens=8, temperature=0).result.sequences
        for prompt, item in zip(PROMPTS, found, strict=True):
            alone = model.generate(prompt, max_tokens=8, temperature=0).result
            assert item.token_ids == alone.token_ids
        assert model.stats.cache_misses > 0
        used = model._parts.budget.used_bytes
        for name, need in model.plan.needs.items():
            assert name == "cold" or used[name] <= need.bytes, name


def run_command(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_several_prompts_are_shown_in_their_order(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"decode": {"batch": 2}})
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\nthree\n", "utf-8")
    common = (str(plan), "--max-tokens", "5", "--temperature", "0", "--ignore-eos")
    shown = run_command(*common, "--prompts", str(lines))
    assert shown.exit_code == 0, shown.output
    assert [line for line in shown.stdout.splitlines() if line.startswith("---")] == [
        "--- 1",
        "--- 2",
        "--- 3",
    ]
    assert "3 sequences" in shown.stderr
    found = json.loads(run_command(*common, "--json", "--prompts", str(lines)).stdout)
    given = [value for text in ("one", "two", "three") for value in ("--prompt", text)]
    again = json.loads(run_command(*common, "--json", *given).stdout)
    texts = [item["text"] for item in found["sequences"]]
    assert texts == [item["text"] for item in again["sequences"]]
    for text, prompt in zip(texts, ("one", "two", "three"), strict=True):
        assert json.loads(run_command(*common, "--json", "--prompt", prompt).stdout)["text"] == text
    lines.write_text("\n \n", "utf-8")
    assert "P603" in str(run_command(*common, "--prompts", str(lines)).exception)
    assert run_command(*common, "--prompts", str(lines), "--prompt", "a").exit_code == 2
