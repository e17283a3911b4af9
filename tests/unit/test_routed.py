"""A mixture computes the neurons of the experts that its router chose, and reads no others."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32, I32
from pi2.authoring.drafting import Wish, draft_plan
from pi2.cli.main import run
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.waves import Wave
from pi2.fitting.check import check_file
from pi2.fitting.completion import complete_plan
from pi2.importing.new_model import draft_first_plan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import BYTE_UNITS, parse_quantity
from pi2.plan.reading.references import find_document
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import MIXTURE, make_model

TOKENS = [7, 100, 8, 290, 3, 3, 41, 250, 12, 77, 5]
ROUTER = {"decode.predictor": "router", "backends.cpu": "reference"}
LAYERS, EXPERTS, CHOSEN, FFN = 2, 4, 2, 200
SAME = 2e-6
"""Of the largest logit: the order of additions differs."""
CACHES: Mapping[str, Mapping[str, Any]] = {
    "a token's experts of a layer": {"layers.hot": 0.0, "slots": CHOSEN * FFN},
    "two layers": {"layers.hot": 0.0, "slots": 2 * CHOSEN * FFN + 17},
    "some of them hot": {"layers.hot": 0.3, "slots": CHOSEN * FFN + 100},
    "least recently used": {"layers.hot": 0.05, "slots": 3 * FFN, "cache.policy": "lru"},
}


@pytest.fixture(scope="module")
def silu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"predictor": None}
    return make_mixture_plan(tmp_path_factory.mktemp("silu"), "silu", changes)


@pytest.fixture(scope="module")
def by_expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in the checkpoint's order: one expert's neurons after the other's."""
    folder = tmp_path_factory.mktemp("ordered")
    return make_mixture_plan(folder, "silu", {"predictor": None}, order="index")


def load(plan: Path, *settings: Mapping[str, Any]) -> LoadedModel:
    """The plan with a router; ``slots`` stands for as many cold neurons."""
    chosen: dict[str, Any] = dict(ROUTER)
    for some in settings:
        chosen |= some
    slots = chosen.pop("slots", None)
    if slots is not None:
        with pi2.load(plan, set=ROUTER) as model:
            stride = model._parts.resolved.bundle.stride
        chosen |= {"memory.segments.cold": f"{slots * stride} B", "memory.budget": "2 GiB"}
    return pi2.load(plan, set=chosen)


def compute(model: LoadedModel) -> tuple[F32, F32]:
    found = model.logits(TOKENS), model.logits(TOKENS, mode="decode")
    cache = model._parts.cache
    assert not cache._held.any() and cache.free_capacity == cache.cold_capacity
    return found


@pytest.fixture(scope="module")
def whole(silu: Path) -> tuple[F32, F32]:
    with load(silu) as model:
        found = compute(model)
        assert model.stats.cache_misses == 0
    return found


@pytest.mark.parametrize("look_ahead", ["none", "attention", "layer"])
@pytest.mark.parametrize("cache", CACHES)
def test_what_is_in_memory_changes_no_bit(
    silu: Path, whole: tuple[F32, F32], cache: str, look_ahead: str
) -> None:
    with load(silu, CACHES[cache], {"decode.look_ahead": look_ahead}) as model:
        found = compute(model)
        assert model.stats.cache_misses > 0
    for ours, truth in zip(found, whole, strict=True):
        np.testing.assert_array_equal(ours, truth)


@pytest.mark.parametrize("settings", [{}, {"layers.hot": 0.2, "memory.segments.cold": "0 B"}])
def test_without_a_cache_the_same_neurons_are_computed(
    silu: Path, whole: tuple[F32, F32], settings: dict[str, Any]
) -> None:
    with load(silu, settings, {"decode.predictor": "none"}) as model:
        for ours, truth in zip(compute(model), whole, strict=True):
            assert float(np.abs(ours - truth).max()) <= SAME * float(np.abs(truth).max())


def test_a_token_reads_its_experts_only(by_expert: Path) -> None:
    nothing = {"layers.hot": 0.0, "memory.segments.cold": "0 B", "decode.predictor": "none"}
    with load(by_expert, nothing) as model:
        stride = model._parts.resolved.bundle.stride
        model._parts.feed_forward._stream.shortest_gap = 1
        model.logits(TOKENS[:1], mode="decode")
        assert model.stats.flash_read_bytes == LAYERS * CHOSEN * FFN * stride
        before = model.stats
        model.logits(TOKENS[:1])
        assert (model.stats - before).flash_read_bytes == LAYERS * CHOSEN * FFN * stride


@pytest.mark.parametrize("cache", CACHES)
def test_wrong_guesses_change_no_bit(silu: Path, whole: tuple[F32, F32], cache: str) -> None:
    with load(silu, CACHES[cache], {"decode.look_ahead": "layer"}) as model:
        feed_forward: Any = model._parts.feed_forward
        prefetch = feed_forward._prefetch

        def guess_others(layer: int, guessed: list[I32]) -> Wave:
            others = [np.sort((experts + 1) % EXPERTS).astype(np.int32) for experts in guessed]
            wave: Wave = prefetch(layer, others)
            return wave

        feed_forward._prefetch = guess_others
        for ours, truth in zip(compute(model), whole, strict=True):
            np.testing.assert_array_equal(ours, truth)
        assert feed_forward.counters.foreseen < feed_forward.counters.routed


@pytest.mark.parametrize("look_ahead", ["none", "layer"])
@pytest.mark.parametrize("predictor", ["router", "none"])
def test_sequences_share_reads_and_compute_their_own(
    silu: Path, predictor: str, look_ahead: str
) -> None:
    settings: dict[str, Any] = {
        "decode.batch": 3,
        "decode.predictor": predictor,
        "memory.segments.kv": "1 MiB",
    }
    settings |= {"memory.segments.workspace": "4 MiB", "memory.budget": "2 GiB"}
    if predictor == "router":
        settings["decode.look_ahead"] = look_ahead
    prompts = ["ab", "cd", "e"]

    def generate(cache: Mapping[str, Any] | None) -> dict[int, str]:
        texts = dict.fromkeys(range(3), "")
        with load(silu, cache or {}, settings) as model:
            for number, piece in model.generate_batch(prompts, max_tokens=6):
                texts[number] += piece
        return texts

    assert generate(CACHES["a token's experts of a layer"]) == generate(None)


def test_an_interrupt_leaves_nothing_under_way(silu: Path, whole: tuple[F32, F32]) -> None:
    with load(silu, CACHES["two layers"], {"decode.look_ahead": "layer"}) as model:
        executor: Any = model._parts.executor
        add, calls = executor.add_neurons, []

        def interrupt(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 11:
                raise KeyboardInterrupt
            add(*arguments)

        executor.add_neurons = interrupt
        with pytest.raises(KeyboardInterrupt):
            model.logits(TOKENS, mode="decode")
        for ours, truth in zip(compute(model), whole, strict=True):
            np.testing.assert_array_equal(ours, truth)


def test_plans_run_dry(silu: Path) -> None:
    for settings in ({"decode.look_ahead": "layer"}, {"decode.predictor": "none"}):
        with load(silu, CACHES["two layers"], {"backends.cpu": "null"}, settings) as model:
            compute(model)
            assert model.stats.flash_read_bytes > 0


@pytest.mark.parametrize("activation", ["silu", "drelu"])
def test_plans_of_mixtures_without_predictors_get_a_router(activation: str) -> None:
    model = make_model(
        {"ffn": {"activation": activation}, **MIXTURE, "predictor": None, "tied_head": False}
    )
    device = check_file(find_document("host", "device", Path())).document
    assert isinstance(device, Device)
    draft = tomllib.loads(draft_first_plan(model, device, 0, "./store"))
    decode = complete_plan(draft, device, model).values["decode"]
    assert decode == {"predictor": "router", "look_ahead": "layer"}
    # Nobody knows which experts will be used: what does not fit is left to the cache.
    wish = Wish(device="host", model="./m", store="./s", budget_bytes=512 << 20)
    large = model.model_copy(
        update={"shape": model.shape.model_copy(update={"layers": 40, "ffn": 8192})}
    )
    plan = complete_plan(tomllib.loads(draft_plan(wish, device, large)), device, large).values
    assert (plan["layers"]["hot"], plan["memory"]["segments"]["hot"]) == (0.0, "0 B")


@pytest.mark.parametrize(("budget", "chunk"), [("9 GiB", 512), ("2030 MiB", 128), (None, 512)])
def test_prompts_of_many_experts_have_long_chunks_where_these_take_little(
    budget: str | None, chunk: int
) -> None:
    model = check_file(find_document("qwen3-30b-a3b", "model", Path())).document
    device = check_file(find_document("host", "device", Path())).document
    assert isinstance(model, Model) and isinstance(device, Device)
    size = None if budget is None else int(parse_quantity(budget, BYTE_UNITS))
    wish = Wish(device="host", model="./m", store="./s", budget_bytes=size)
    draft = tomllib.loads(draft_plan(wish, device, model))
    assert complete_plan(draft, device, model).values["prefill"]["chunk"] == chunk


def test_the_planner_lets_reads_of_experts_begin_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--device", "oneplus-12", "--model", "mixtral-8x7b", "--memory", "12GiB"]
    assert run([*command, "-o", str(tmp_path / "found.plan.toml")]) == 0
    plan = tomllib.loads((tmp_path / "found.plan.toml").read_text())
    device = check_file(find_document("oneplus-12", "device", Path())).document
    model = check_file(find_document("mixtral-8x7b", "model", Path())).document
    assert isinstance(model, Model) and isinstance(device, Device)
    whole = complete_plan(plan, device, model).values
    decode = whole["decode"]
    assert (decode["predictor"], decode["look_ahead"]) == ("router", "layer")
    assert whole["layers"]["hot"] == 0.0, "all of it is a cache, of a token's demand and more"
    assert "all neurons of the chosen experts" in capsys.readouterr().out
    assert not check_file(tmp_path / "found.plan.toml").diagnostics
