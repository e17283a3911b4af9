"""Low-bit twins of neurons: what they change, what is counted, and that nothing is lost by having
them where everything is in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit

import pi2
from pi2.arrays import F32
from pi2.cli.main import run as cli
from pi2.diagnostics import UserError
from pi2.engine.statistics import RunStatistics
from pi2.importing.activations import group_experts
from pi2.plan.arithmetic.fitting import fit_plan
from pi2.plan.arithmetic.sizes import need_twin
from pi2.plan.resolve import load_plan
from pi2.store.manifest import MANIFEST, TWIN_FILE, read_manifest
from pi2.store.reader import NeuronStore
from pi2.store.reordering import reorder_store
from pi2.store.twins import add_twin, read_twins
from pi2.store.verification import verify_store
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.preparing import watch_kernels

TWIN: dict[str, Any] = {"twin.precision": "int2", "memory.segments.twin": "2 MiB"}
TOKENS = [7, 100, 8, 290, 3, 3, 41, 250, 12, 77, 5]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose store has a twin."""
    plan = make_mixture_plan(tmp_path_factory.mktemp("twins"), "silu", {"predictor": None})
    store = plan.parent / "store"
    add_twin(store, "int2")
    with NeuronStore.open(store) as old:
        orders = np.stack([group_experts(one.copy_original(), 200, 1) for one in old.layers])
    # The twin follows the neurons' new order.
    reorder_store(store, orders, "expert")
    return plan


def run(plan: Path, cold: str = "600 KiB", **settings: Any) -> tuple[F32, RunStatistics]:
    """Logits of `TOKENS`, one by one, and what was done."""
    base = {"decode.predictor": "router", "backends.cpu": "reference", "layers.hot": 0.0}
    base |= {"memory.segments.cold": cold, "cache.fill": False, "memory.budget": "1 GiB"}
    named = {name.replace("__", "."): value for name, value in settings.items()}
    with pi2.load(plan, set={**base, **named}) as model:
        return model.logits(TOKENS, mode="decode"), model.stats


def measure_change(found: F32, exact: F32) -> float:
    """Root mean square of the difference, over that of the exact."""
    return float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()))


def test_with_everything_in_memory_a_twin_changes_no_bit(plan: Path) -> None:
    exact, _ = run(plan, "8 MiB", layers__hot=1.0, memory__segments__hot="8 MiB")
    logits, stats = run(
        plan,
        "8 MiB",
        layers__hot=1.0,
        memory__segments__hot="8 MiB",
        experts__most_reads=0,
        **TWIN,
    )
    np.testing.assert_array_equal(logits, exact)
    assert stats.twin_neurons == 0 and stats.twin_weight_share == 0.0


@pytest.mark.parametrize("look_ahead", ["none", "layer"])
def test_twins_compute_what_would_be_left_out(plan: Path, look_ahead: str) -> None:
    ahead: dict[str, Any] = {"decode__look_ahead": look_ahead}
    exact, before = run(plan, **ahead)
    dial: dict[str, Any] = {"experts__least_weight": 0.6}
    dropped, _ = run(plan, **ahead, **dial)
    logits, stats = run(plan, **ahead, **dial, **TWIN)
    assert stats.flash_read_bytes < before.flash_read_bytes
    assert stats.left_out_share == 0.0 and 0.1 < (stats.twin_weight_share or 0) < 0.9
    assert stats.twin_neurons > 0
    error = read_manifest(plan.parent / "store").twin
    assert error is not None and 0.3 < error.error < 0.36
    change = measure_change(logits, exact)
    assert 0.0 < change < min(error.error, measure_change(dropped, exact))


def test_three_bits_are_nearer_to_the_neurons_than_two(plan: Path, tmp_path: Path) -> None:
    exact, _ = run(plan)
    coarse, _ = run(plan, experts__most_reads=0, **TWIN)
    shutil.copytree(plan.parent, tmp_path / "copy")
    own = tmp_path / "copy" / plan.name
    described = add_twin(own.parent / "store", "int3").twin
    assert described is not None and 0.1 < described.error < 0.2
    assert verify_store(own.parent / "store") == []
    finer: dict[str, Any] = {**TWIN, "twin.precision": "int3"}
    logits, stats = run(own, experts__most_reads=0, **finer)
    assert stats.flash_read_bytes == 0 and stats.twin_neurons > 0
    assert 0.0 < measure_change(logits, exact) < 0.8 * measure_change(coarse, exact)


def test_kernels_for_twins_are_compiled_before_twins_are_read(plan: Path) -> None:
    early, needed = watch_kernels(lambda: run(plan, backends__cpu="cpu", **TWIN))
    assert early == [needed]
    assert needed.twin == "int2"


def test_nothing_is_read_where_twins_compute_all_that_is_missing(plan: Path) -> None:
    exact, _ = run(plan)
    logits, stats = run(plan, experts__most_reads=0, **TWIN)
    assert stats.flash_read_bytes == 0 and stats.twin_weight_share == pytest.approx(1.0)
    assert 0.0 < measure_change(logits, exact) < 1.0
    some, partly = run(
        plan, experts__most_reads=0, layers__hot=0.5, memory__segments__hot="4 MiB", **TWIN
    )
    # The first experts are hot, and one of them may be so in part.
    assert 0 < partly.twin_neurons < stats.twin_neurons
    assert measure_change(some, exact) < measure_change(logits, exact)


def test_several_sequences_have_twins_of_their_own(plan: Path) -> None:
    dial = {"experts.most_reads": 0, "decode.predictor": "router", "layers.hot": 0.0, **TWIN}
    memory = {"memory.segments.cold": "600 KiB", "memory.budget": "1 GiB"}
    memory |= {"memory.segments.kv": "64 KiB", "memory.segments.workspace": "8 MiB"}
    base = {"backends.cpu": "reference", "cache.fill": False, **memory, **dial}
    prompts = ["some words", "and others", "a third"]
    with pi2.load(plan, set={**base, "decode.batch": 3}) as model:
        together = [list(item.token_ids) for item in batch(model, prompts)]
    with pi2.load(plan, set=base) as model:
        alone = [list(item.token_ids) for own in prompts for item in batch(model, [own])]
    assert together == alone


def batch(model: pi2.LoadedModel, prompts: list[str]) -> Any:
    generation = model.generate_batch(prompts, max_tokens=4, temperature=0.0)
    list(generation)
    return generation.result.sequences


@pytest.mark.parametrize("bias", [False, True])
def test_kernels_and_reference_agree_about_twins_of_experts(tmp_path: Path, bias: bool) -> None:
    changes = {"predictor": None, "ffn": {"activation": "silu", "bias": bias}}
    plan = make_mixture_plan(tmp_path, "silu", changes)
    add_twin(plan.parent / "store", "int2")
    dial = {"experts__most_reads": 0, **TWIN}
    expected, _ = run(plan, **dial)
    logits, stats = run(plan, backends__cpu="cpu", **dial)
    assert stats.twin_neurons > 0 and stats.active_neurons
    assert measure_change(logits, expected) < 2e-3


def test_predicted_neurons_with_low_scores_are_computed_by_their_twins(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"quantization": {"ffn": "int8"}})
    add_twin(tiny.store, "int2")
    plan = write_plan(tmp_path, tiny, {"layers": {"hot": 0.25}})
    base: dict[str, Any] = {"decode.threshold": -1e9, "cache.fill": False}
    base |= {"memory.budget": "1 GiB", "backends.cpu": "reference"}
    for look_ahead in ("none", "layer"):
        ahead = {**base, "decode.look_ahead": look_ahead}
        results = []
        for settings in ({}, {"decode.missing_threshold": 1e9}, None):
            chosen = {"decode.missing_threshold": 1e9, **TWIN} if settings is None else settings
            with pi2.load(plan, set={**ahead, **chosen}) as model:
                results.append(model.logits([7, 100, 8, 3], mode="decode"))
                stats = model.stats
        exact, dropped, twins = results
        assert stats.cache_misses == 0
        assert stats.predicted_neurons + stats.twin_neurons == stats.possible_neurons
        assert 0.0 < measure_change(twins, exact) < measure_change(dropped, exact)


def test_a_summary_and_an_evaluation_say_what_twins_computed(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"decode.predictor": "router", "layers.hot": 0.0, "memory.segments.cold": "600 KiB"}
    settings |= {"backends.cpu": "reference", "experts.most_reads": 0, **TWIN}
    settings["memory.budget"] = "1 GiB"
    options = [part for item in settings.items() for part in ("--set", "=".join(map(str, item)))]
    text = tmp_path / "text.txt"
    text.write_text("some words " * 12)
    assert cli(["evaluate", str(plan), "--text", str(text), "--context", "32", *options]) == 0
    assert "% computed by twins; " in capsys.readouterr().out
    assert cli(["run", str(plan), "--prompt", "some", "--max-tokens", "3", *options]) == 0
    assert "twins computed" in capsys.readouterr().err


def test_a_store_gets_a_twin_and_keeps_the_rest(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(plan.parent / "store", store)
    before = {entry.path: entry.sha256 for entry in read_manifest(store).files}
    assert cli(["store", "twin", str(store)]) == 0
    assert "int2" in capsys.readouterr().err
    assert {entry.path: entry.sha256 for entry in read_manifest(store).files} == before
    assert verify_store(store) == []
    cli(["store", "info", str(store)])
    assert "twin" in capsys.readouterr().out
    with NeuronStore.open(store) as opened:
        whole = read_twins(opened, [0, 0], lambda size: np.zeros(size, np.uint8))
        rest = read_twins(opened, [5, 800], lambda size: np.zeros(size, np.uint8))
    np.testing.assert_array_equal(rest[0], whole[0][5:])
    assert len(rest[1]) == len(whole[1]) - 800
    content = bytearray((store / TWIN_FILE).read_bytes())
    content[-5000] ^= 1
    (store / TWIN_FILE).write_bytes(content)
    assert [item.code for item in verify_store(store)] == ["P507"]


def test_a_conversion_writes_a_twin(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "other")
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tiny.model, tiny.weights)
    store = tmp_path / "store"
    command = ["convert", str(checkpoint), "--model", str(tmp_path / "tiny.model.toml")]
    values = tiny.model.model_dump(mode="json", exclude_none=True)
    (tmp_path / "tiny.model.toml").write_text(tomlkit.dumps(values))
    assert cli([*command, "-o", str(store), "--twin", "int2"]) == 0
    assert read_manifest(store).twin is not None and verify_store(store) == []


def test_a_fitted_budget_has_room_for_the_twins_of_all_neurons(plan: Path) -> None:
    settings: dict[str, Any] = {"decode.predictor": "router", "layers.hot": 0.5}
    settings |= {"memory.budget": "1 GiB", "memory.segments.cold": "600 KiB", **TWIN}
    resolved = load_plan(plan, overrides=settings)
    fitted = fit_plan(resolved, 400 << 20)
    every = need_twin(resolved, hot=False).bytes
    assert resolved.needs.twin.bytes < every <= fitted.plan.memory.segments.twin


def test_a_plan_wants_the_twin_that_its_store_has(plan: Path, tmp_path: Path) -> None:
    store = plan.parent / "store"
    fields = json.loads((store / MANIFEST).read_text())
    bare = {**fields, "twin": None}
    try:
        (store / MANIFEST).write_text(json.dumps(bare))
        with pytest.raises(UserError, match="has no twin of int2") as caught:
            run(plan, experts__most_reads=0, **TWIN)
        assert caught.value.diagnostics[0].code == "P520"
        wrong = {**fields, "twin": {**fields["twin"], "stride": 64}}
        (store / MANIFEST).write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=r"twin.arrow"):
            NeuronStore.open(store)
    finally:
        (store / MANIFEST).write_text(json.dumps(fields))


def test_neurons_that_can_have_no_twin_are_refused(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"quantization": {"ffn": "fp16"}})
    with pytest.raises(UserError, match="fp16") as caught:
        add_twin(tiny.store, "int2")
    assert caught.value.diagnostics[0].code == "P105"
    assert not (tiny.store / TWIN_FILE).exists()
