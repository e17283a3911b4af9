"""The plan's arithmetic against what the engine allocates."""

from pathlib import Path

import pytest

import pi2
from pi2.fitting.check import load_plan
from tests.helpers.goldens import EXACT as EXPLICIT
from tests.helpers.goldens import UNROUNDED, check_arrays, make_golden_plan, read_golden
from tests.helpers.tables import in_table

EXACT = ("attention", "kv", "predictor", "hot")


@pytest.mark.parametrize("backend", ["null", "reference", "cpu"])
@pytest.mark.parametrize("predictor", ["none", "gate", "low-rank"])
def test_no_segment_takes_more_than_plan_counts(backend: str, predictor: str, plan: Path) -> None:
    with pi2.load(plan, set={"backends.cpu": backend, "decode.predictor": predictor}) as model:
        if backend == "null":
            model.logits([1, 2, 3], mode="decode")
        else:
            assert model.generate("abcd", max_tokens=3, ignore_eos=True).result.text
        if backend == "cpu":
            check_arrays(model)
        used = model._parts.budget.used_bytes
        for name, need in model.plan.needs.items():
            if name == "cold":  # the cache takes its whole segment
                continue
            assert used[name] <= need.bytes, name
            if backend == "cpu" and name in EXACT:
                assert used[name] >= 0.9 * need.bytes, name


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_rounds_nothing_takes_what_the_plan_counts(backend: str, plan: Path) -> None:
    with pi2.load(plan, set={"backends.cpu": backend, **UNROUNDED}) as model:
        assert model.generate("abcd", max_tokens=3, ignore_eos=True).result.text
        used, needs = model._parts.budget.used_bytes, model.plan.needs
        assert 0.9 * needs.kv.bytes <= used["kv"] <= needs.kv.bytes
        assert used["workspace"] <= needs.workspace.bytes
        assert needs.workspace.bytes > load_plan(plan).needs.workspace.bytes


@in_table
def test_families_take_no_more_than_the_plan_counts(name: str, tmp_path: Path) -> None:
    golden = read_golden(name)
    plan = make_golden_plan(name, tmp_path, EXPLICIT, {"backends": {"cpu": "cpu"}})
    with pi2.load(plan) as loaded:
        loaded.logits(golden.prompt)
        used, needs = loaded._parts.budget.used_bytes, loaded.plan.needs
        for segment, need in needs.items():
            assert segment == "cold" or used[segment] <= need.bytes, segment
        assert used["attention"] >= 0.99 * needs.attention.bytes


@pytest.mark.parametrize("more", [0, 24_000, 1 << 20])
def test_layers_first_takes_as_many_chunks_as_workspace_has_room_for(more: int, plan: Path) -> None:
    changes: dict[str, object] = {"backends.cpu": "cpu"}
    need = load_plan(plan, overrides=changes).needs.workspace.bytes
    changes["memory.segments.workspace"] = f"{need + more} B"
    changes["pipeline.prefill"] = "layers-first"
    with pi2.load(plan, set=changes) as model:
        # A chunk has 8 tokens, 64 wide; too many would overrun the segment.
        chunks = len(model._parts.executor._chunks)  # type: ignore[attr-defined]
        assert chunks == {0: 1, 24_000: 3, 1 << 20: 64}[more]
        assert model._parts.forward._piece == 8 * chunks
        check_arrays(model)
