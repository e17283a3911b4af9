"""The engine with the reference backend, however neurons are found, against all of them in memory;
`test_goldens` compares that with transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.cli.main import run as cli
from pi2.diagnostics import UserError
from pi2.memory.uring import UringEngine
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.slow import mark_slow

FP16 = {
    "quantization": dict.fromkeys(("ffn", "attention", "embedding", "head", "predictor"), "fp16")
}
KV_ROUNDING = 2e-4
"""A difference of float32 rounding can move a key or value to the next fp16 number (5e-4 of it)."""
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 288, 21)]


def compute_dense(plan: Path) -> np.ndarray:
    """Logits of `TOKENS` in one chunk, with every neuron in memory."""
    settings = {"layers.hot": 1.0, "decode.predictor": "none", "prefill.chunk": 64}
    with pi2.load(plan, set=settings) as model:
        return model.logits(TOKENS)


def compute_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


VARIANTS: dict[str, dict[str, Any]] = {
    "drelu": {},
    "relu, untied head, qkv bias": {
        "ffn": {"activation": "relu"},
        "tied_head": False,
        "attention": {"qkv_bias": True},
    },
    "fatrelu, window": {
        "ffn": {"activation": "fatrelu", "threshold": 0.3},
        "attention": {"sliding_window": 5},
    },
    "relu2, no grouping": {"ffn": {"activation": "relu2"}, "shape": {"kv_heads": 4}},
    "silu, one key head": {"ffn": {"activation": "silu"}, "shape": {"kv_heads": 1}},
}


@pytest.mark.parametrize("name", [name for name in VARIANTS if "silu" not in name])
def test_gates_name_all_that_is_active(tmp_path: Path, name: str) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path, {**FP16, **VARIANTS[name]}))
    expected = compute_dense(plan)
    for predictor in ("none", "gate"):
        with pi2.load(plan, set={"decode.predictor": predictor}) as model:
            assert compute_error(model.logits(TOKENS), expected) < KV_ROUNDING
            assert compute_error(model.logits(TOKENS, mode="decode"), expected) < KV_ROUNDING


@pytest.mark.parametrize("look_ahead", ["none", "attention", "layer"])
@pytest.mark.parametrize("hot", [mark_slow(0.0), 0.35, mark_slow(1.0)])
def test_looking_ahead_costs_nothing_where_every_neuron_is_named(
    tmp_path: Path, look_ahead: str, hot: float
) -> None:
    # 128 neurons a layer and 64 cold slots: two layers' waves share them, or take turns.
    tiny = make_tiny(tmp_path, FP16)
    decode = {"predictor": "low-rank", "threshold": -1e9, "look_ahead": look_ahead}
    plan = write_plan(tmp_path, tiny, {"decode": decode, "pipeline": {"cluster": 16}})
    with pi2.load(plan, set={"layers.hot": hot}) as model:
        got = model.logits(TOKENS, mode="decode")
        assert compute_error(got, compute_dense(plan)) < KV_ROUNDING
        cache = model._parts.cache
        assert cache.free_capacity == cache.cold_capacity, "nothing is held in the end"


def test_missing_neurons_with_low_scores_are_left_out_and_others_computed(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"layers": {"hot": 0.25}})
    threshold = {"decode.threshold": -1e9, "cache.fill": False}
    with pi2.load(plan, set=threshold) as model:
        everything = model.logits(TOKENS[:3], mode="decode")
        all_misses = model.stats.cache_misses
    with pi2.load(plan, set={**threshold, "decode.missing_threshold": 0.0}) as model:
        model.logits(TOKENS[:3], mode="decode")
        stats = model.stats
        assert 0 < stats.cache_misses < all_misses and stats.cache_skips > 0
        assert stats.predicted_neurons + stats.cache_skips == stats.possible_neurons
    with pi2.load(plan, set={**threshold, "decode.missing_threshold": -1e8}) as model:
        assert compute_error(model.logits(TOKENS[:3], mode="decode"), everything) < KV_ROUNDING
        assert model.stats.cache_skips == 0
    with pi2.load(plan, set={**threshold, "decode.missing_threshold": 1e9}) as model:
        model.logits(TOKENS[:3], mode="decode")
        assert model.stats.cache_misses == 0, "only what is in memory is computed"
        assert model.stats.predicted_neurons > 0


@pytest.mark.parametrize("batch", [1, 2])
def test_a_stated_share_of_scores_is_left_out_instead_of_read(tmp_path: Path, batch: int) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"layers": {"hot": 0.25}})
    # So few cold slots that many neurons are missing.
    base = {"memory.segments.cold": "64 KiB", "cache.fill": False, "decode.batch": batch}
    base |= {"backends.cpu": "reference", "memory.budget": "1 GiB"}
    found = []
    for settings in ({}, {"decode.leave_out": 0.02}, {"decode.leave_out": 0.2}):
        with pi2.load(plan, set={**base, **settings}) as model:
            prompts = ["some words", "and others"][:batch]
            list(model.generate_batch(prompts, max_tokens=24, temperature=0.0))
            found.append(model.stats)
    everything, few, many = found
    assert everything.left_out_mass_share is None and everything.cache_skips == 0
    assert few.left_out_mass_share is not None and many.left_out_mass_share is not None
    assert 0.01 < few.left_out_mass_share <= 0.02
    assert 0.1 < many.left_out_mass_share <= 0.2
    assert everything.cache_misses > few.cache_misses > many.cache_misses


def test_a_summary_and_an_evaluation_say_what_share_of_scores_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path), {"layers": {"hot": 0.25}})
    base = {"memory.segments.cold": "64 KiB", "cache.fill": "false", "memory.budget": "1 GiB"}
    base |= {"backends.cpu": "reference", "decode.leave_out": "0.05"}
    options = [part for item in base.items() for part in ("--set", "=".join(item))]
    assert cli(["run", str(plan), "--prompt", "some", "--max-tokens", "24", *options]) == 0
    summary = capsys.readouterr().err
    assert "% of the predictor's scores, instead of read" in summary
    assert "(decode.leave_out = 0.05)" in summary
    text = tmp_path / "text.txt"
    text.write_text("some words " * 12)
    command = ["evaluate", str(plan), "--text", str(text), "--context", "32", "--json", *options]
    assert cli(command) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["scores_left_out"] is None for run in runs] == [True, False]
    assert 0.01 < runs[1]["scores_left_out"] <= 0.05


@pytest.mark.parametrize("look_ahead", ["attention", "layer"])
def test_a_failure_in_attention_leaves_no_neuron_half_read(plan: Path, look_ahead: str) -> None:
    settings = {"decode.look_ahead": look_ahead, "layers.hot": 0.0}
    with pi2.load(plan, set=settings) as model:
        expected = model.logits(TOKENS, mode="decode")
    with pi2.load(plan, set=settings) as model:
        executor = model._parts.executor
        attend, calls = executor.attend, []

        def fail_once(layer: int, position: int) -> None:
            calls.append(layer)
            if len(calls) == 9:
                raise KeyboardInterrupt
            attend(layer, position)

        executor.attend = fail_once
        with pytest.raises(KeyboardInterrupt):
            model.logits(TOKENS, mode="decode")
        again = model.logits(TOKENS, mode="decode")
    assert compute_error(again, expected) < KV_ROUNDING


@pytest.mark.parametrize("look_ahead", ["none", "layer"])
def test_neurons_whose_reads_could_not_begin_are_read_the_next_time(
    plan: Path, look_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"decode.look_ahead": look_ahead, "layers.hot": 0.0, "cache.fill": False}
    with pi2.load(plan, set=settings) as model:
        expected = model.logits(TOKENS, mode="decode")
    with pi2.load(plan, set=settings) as model:
        parts = model._parts
        engine: Any = parts.reader._engine  # type: ignore[union-attr]
        is_ring = isinstance(engine, UringEngine)
        owner, name = (engine._loops, "submit_reads") if is_ring else (engine, "submit")
        submit, calls = getattr(owner, name), []

        def fail_once(*arguments: Any, **keywords: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return submit(*arguments, **keywords)

        monkeypatch.setattr(owner, name, fail_once)
        with pytest.raises(KeyboardInterrupt):
            model.logits(TOKENS, mode="decode")
        assert parts.cache.free_capacity == parts.cache.cold_capacity, "nothing is held"
        again = model.logits(TOKENS, mode="decode")
    assert compute_error(again, expected) < KV_ROUNDING


def test_layers_may_go_first(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, FP16)
    plan = write_plan(tmp_path, tiny, {"prefill": {"chunk": 4}})
    shares: dict[str, list[float]] = {}
    results, read_bytes = {}, {}
    for order in ("chunks-first", "layers-first"):
        with pi2.load(plan, set={"pipeline.prefill": order, "cache.fill": False}) as model:
            before, told = model.stats.flash_read_bytes, shares.setdefault(order, [])
            forward, ids = model._parts.forward, np.array(TOKENS, np.int32)
            results[order] = forward.prefill(ids, all_logits=True, progress=told.append)
            read_bytes[order] = model.stats.flash_read_bytes - before
            # The next token sees what the prompt has left.
            results[f"{order}, next"] = forward.decode(7).copy()
    assert compute_error(results["layers-first"], compute_dense(plan)) < KV_ROUNDING
    for name in ("layers-first", "layers-first, next"):
        same = name.replace("layers", "chunks")
        assert compute_error(results[name], results[same]) < KV_ROUNDING
    assert read_bytes["chunks-first"] == 6 * read_bytes["layers-first"]
    for told in shares.values():
        assert told == sorted(told) and told[-1] == pytest.approx(1)


def test_rows_of_the_embedding_may_come_from_flash(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"tied_head": False})
    plan = write_plan(tmp_path, tiny, {"prefill": {"chunk": 8}})
    results, sizes = [], []
    for place in ("resident", "flash"):
        with pi2.load(plan, set={"memory.embedding": place}) as model:
            forward = model._parts.forward
            logits = forward.prefill(np.array(TOKENS, np.int32), all_logits=True)
            results.append([logits, forward.decode(7).copy(), forward.decode(287).copy()])
            sizes.append(model._parts.budget.used_bytes["attention"])
            sizes.append(model.plan.needs.attention.bytes)
    for resident, read in zip(*results, strict=True):
        np.testing.assert_array_equal(read, resident)
    # 288 rows of 64 int8 elements and 2 scales, and 8 of them.
    assert sizes[0] - sizes[2] == (288 - 8) * 68
    assert sizes[2] <= sizes[3] < sizes[1]


def test_store_that_is_cut_while_running_gives_no_wrong_row_of_embedding(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, make_tiny(tmp_path, {"tied_head": False}))
    with pi2.load(plan, set={"memory.embedding": "flash"}) as model:
        forward = model._parts.forward
        forward.prefill(np.array(TOKENS, np.int32))
        with (model.store.path / "dense.arrow").open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(UserError) as caught:
            forward.decode(287)
        assert [finding.code for finding in caught.value.diagnostics] == ["P506"]


def test_what_the_context_does_not_use_yet_holds_cold_neurons(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {**FP16, "shape": {"context": 512, "ffn": 640}})
    stride = 512
    plan = write_plan(
        tmp_path,
        tiny,
        {"kv": {"context": 512}, "layers": {"hot": 0.0}, "decode": {"threshold": -1e9}},
    )
    settings = {"kv.lend": True, "memory.segments.cold": f"{200 * stride} B"}
    with pi2.load(plan, set=settings) as model:
        forward, cache = model._parts.forward, model._parts.cache
        lent = cache.cold_capacity - 200
        assert lent > 0
        got = model.logits(TOKENS, mode="decode")
        assert compute_error(got, compute_dense(plan)) < KV_ROUNDING
        first_step = cache.cold_capacity
        assert 200 < first_step < 200 + lent
        for start in range(0, 512 - len(TOKENS), 64):
            forward.prefill(np.zeros(min(64, 512 - len(TOKENS) - start), np.int32))
        assert cache.cold_capacity == 200, "a full context has all of its segment"

        def list_resident() -> list[int]:
            slots = [
                cache.find_slots(layer, 0, cache.neurons) for layer in range(len(cache.hot_slots))
            ]
            return np.flatnonzero(np.concatenate(slots) >= 0).tolist()

        # With a new sequence the room is back, and what has stayed is still there.
        resident = list_resident()
        assert len(resident) == 200
        forward.reset()
        assert list_resident() == resident
        assert cache.cold_capacity == 200 + lent
        assert compute_error(model.logits(TOKENS[:2], mode="decode"), got[:2]) < KV_ROUNDING


def test_a_prompt_reads_nothing_that_is_in_memory(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, FP16)
    plan = write_plan(tmp_path, tiny, {"prefill": {"chunk": 64}})
    expected = compute_dense(plan)
    for fill in (False, True):
        with pi2.load(plan, set={"cache.fill": fill}) as model:
            parts = model._parts
            # A stretch in memory saves a read, however short it is.
            parts.feed_forward._stream.shortest_gap = 1
            cache, width = parts.cache, parts.cache.arena.shape[1]
            model.logits(TOKENS, mode="decode")  # brings in some, in no order
            absent = sum(
                int((cache.find_slots(layer, 0, cache.neurons) < 0).sum())
                for layer in range(len(cache.hot_slots))
            )
            assert 0 < absent < cache.neurons * len(cache.hot_slots)
            before = model.stats.flash_read_bytes
            assert compute_error(model.logits(TOKENS), expected) < KV_ROUNDING
            assert model.stats.flash_read_bytes - before == absent * width


@pytest.mark.parametrize("prompt", ["", [], [288], [-1]])
def test_impossible_prompts_are_diagnostics(tmp_path: Path, prompt: str | list[int]) -> None:
    tiny = make_tiny(tmp_path, {"tokenizer": {"add_bos": False}})
    with pi2.load(write_plan(tmp_path, tiny)) as model, pytest.raises(pi2.UserError, match="P60"):
        model.generate(prompt)
