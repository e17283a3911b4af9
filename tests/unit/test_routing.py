"""Routing of mixtures: recorded, described, replayed through caches, and synthesised."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit
from click.testing import CliRunner

from pi2 import orchestrator
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.fitting.check import check_file
from pi2.measuring.routing import (
    POLICIES,
    RoutingTrace,
    encode_trace,
    measure_locality,
    observe_routing,
    read_trace,
    replay_trace,
)
from pi2.measuring.texts import Window
from pi2.plan.documents.device import Device
from pi2.plan.reading.references import find_document
from pi2.store.manifest import read_manifest
from synthesis.blueprint import draw_blueprint
from synthesis.generation import write_synthetic_store
from synthesis.plan_file import PlanWish, write_plan
from synthesis.recipe import Recipe
from synthesis.routers import simulate_choices, solve_correlation, solve_deviation
from synthesis.routing import Routing, publish_routing, read_routing
from tests.helpers.models import MIXTURE, PUBLISHED_HITS, make_model

EXPERTS, CHOSEN, LAYERS, TOKENS = 64, 4, 2, 480
WANTED = Routing(popular=(0.15, 0.4), reuse=0.45)


def make_plan(folder: Path, routing: Routing | None) -> Path:
    model = make_model(
        {
            "shape": {"layers": LAYERS, "hidden": 256, "ffn": 32, "vocab": 700, "context": 512},
            "ffn": {"activation": "silu"},
            **MIXTURE,
            "moe": {"experts": EXPERTS, "active_experts": CHOSEN},
            "predictor": None,
            "tied_head": False,
        }
    )
    write_synthetic_store(
        folder / "store", draw_blueprint(model, Recipe(routing=routing)), order="expert"
    )
    model_file = folder / "tiny.model.toml"
    model_file.write_text(tomlkit.dumps(model.model_dump(mode="json", exclude_none=True)))
    device = check_file(find_document("host", "device", Path())).document
    assert isinstance(device, Device)
    write_plan(
        folder / "tiny.plan.toml", model=model, model_file=model_file, device=device,
        store=folder / "store", bundle=read_manifest(folder / "store").bundle.layout, store_bytes=0,
        wish=PlanWish(context=512, backend="reference"),
    )  # fmt: skip
    return folder / "tiny.plan.toml"


def load(plan: Path) -> LoadedModel:
    return orchestrator.load(plan, make_observer=lambda executor, request: None)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plan(tmp_path_factory.mktemp("routed"), WANTED)


@pytest.fixture(scope="module")
def trace(plan: Path) -> RoutingTrace:
    with load(plan) as model:
        return observe_routing(model, [Window(tuple(range(100, 100 + TOKENS)), 1)])


def test_synthetic_routers_choose_as_they_are_asked_to(trace: RoutingTrace) -> None:
    assert trace.chosen.shape == (TOKENS, LAYERS, CHOSEN)
    for layer, popular in enumerate(WANTED.popular):
        assert measure_locality(trace, layer).popular == pytest.approx(popular, abs=0.03)
    found = measure_locality(trace)
    assert found.reuse[1] == pytest.approx(WANTED.reuse, abs=0.05)
    assert found.reuse[1] < found.reuse[4] < found.reuse[16]
    # What tokens next to each other have in common matters at short distances only.
    assert found.reuse[1] > found.shuffled[1] + 0.05
    assert found.reuse[16] == pytest.approx(found.shuffled[16], abs=0.05)


def test_nothing_asked_for_is_every_expert_alike(tmp_path: Path) -> None:
    with load(make_plan(tmp_path, None)) as model:
        found = measure_locality(observe_routing(model, [Window(tuple(range(100, 300)), 1)]))
    assert found.popular > 0.6
    assert found.reuse[1] == pytest.approx(CHOSEN / EXPERTS, abs=0.03)


@pytest.mark.parametrize(("experts", "chosen", "held", "hits"), PUBLISHED_HITS[:9])
def test_caches_of_synthetic_routing_hit_as_often_as_was_published(
    experts: int, chosen: int, held: float, hits: float
) -> None:
    asked = publish_routing(experts, chosen)
    deviation = solve_deviation(experts, chosen, asked.popular[0])
    correlation = solve_correlation(experts, chosen, deviation, asked.reuse)
    choices = simulate_choices(experts, chosen, deviation, correlation)
    found = replay_trace(choices, "lru", round(held * experts), skip=256)
    assert found.hit_rate == pytest.approx(hits, abs=0.10)


def test_weights_are_those_of_the_router(trace: RoutingTrace) -> None:
    assert (np.diff(trace.weights, axis=2) <= 0).all()
    np.testing.assert_allclose(trace.weights.sum(axis=2), 1.0, atol=1e-5)


def test_a_trace_is_read_as_it_was_written(trace: RoutingTrace, tmp_path: Path) -> None:
    path = tmp_path / "routing.parquet"
    path.write_bytes(encode_trace(trace, {"pi2.model": "tiny"}))
    found = read_trace(path)
    for name in ("sequences", "chosen", "weights"):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name))
    assert (found.experts, found.expert_bytes) == (EXPERTS, trace.expert_bytes)
    assert read_routing(str(path), EXPERTS, CHOSEN) == Routing(
        popular=tuple(measure_locality(trace, layer).popular for layer in range(LAYERS)),
        reuse=measure_locality(trace).reuse[1],
    )
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="has no routing"):
        read_trace(path)


def test_statistics_come_from_a_name_or_a_file(tmp_path: Path) -> None:
    assert read_routing("uniform", EXPERTS, CHOSEN) is None
    published = read_routing("published", EXPERTS, CHOSEN)
    assert published == publish_routing(EXPERTS, CHOSEN) != publish_routing(8 * EXPERTS, CHOSEN)
    file = tmp_path / "routing.json"
    file.write_text('{"popular": [0.2, 0.3], "reuse": 0.4}')
    assert read_routing(str(file), EXPERTS, CHOSEN) == Routing(popular=(0.2, 0.3), reuse=0.4)
    for text in ('{"popular": 2, "reuse": 0.4}', '{"reuse": 0.4}', "no"):
        file.write_text(text)
        with pytest.raises(UserError, match="no statistics of routing"):
            read_routing(str(file), EXPERTS, CHOSEN)


def make_trace(*chosen: list[list[int]], experts: int = 6) -> RoutingTrace:
    array = np.array(chosen, np.int32)
    return RoutingTrace(
        experts=experts,
        expert_bytes=1 << 20,
        sequences=np.zeros(len(array), np.int32),
        chosen=array,
        weights=np.ones(array.shape, np.float32),
    )


def test_what_was_used_last_stays_or_what_is_used_most() -> None:
    # Expert 0 comes every other time; between them 1, 2, 3, ... once each.
    trace = make_trace(*[[[0]], [[1]], [[0]], [[2]], [[0]], [[3]], [[0]], [[4]], [[0]]])
    assert replay_trace(trace, "lru", 1).hit_rate == 0
    assert replay_trace(trace, "belady", 1).hit_rate == 4 / 9
    for policy in POLICIES:
        assert replay_trace(trace, policy, 2).hit_rate == 4 / 9
        assert replay_trace(trace, policy, 2, skip=3).hit_rate == 3 / 6
    assert replay_trace(trace, "lru", 2).reads_token == 5 / 9


def test_no_policy_is_better_than_knowing_what_comes(trace: RoutingTrace) -> None:
    for slots in (LAYERS * CHOSEN, 20, 40, 80):
        found = {policy: replay_trace(trace, policy, slots).hit_rate for policy in POLICIES}
        assert max(found.values()) == found["belady"]
        assert max(found["lru-layer"], found["lfu-layer"]) <= found["belady-layer"] + 1e-9
    assert replay_trace(trace, "lfu", 40).hit_rate > replay_trace(trace, "lfu", 20).hit_rate


def test_neurons_that_never_rest_are_no_reason_not_to_count_experts(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 20)
    assert run(["activations", str(plan), "--text", str(text), "-o", str(tmp_path / "stats")]) == 2
    assert "--routing records its experts" in capsys.readouterr().err


def test_commands_record_and_replay(plan: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 20)
    folder, file = tmp_path / "stats", str(tmp_path / "tiny.gguf")
    source = [str(plan.parent / "store"), "--model", str(plan.parent / "tiny.model.toml")]
    assert run(["convert", *source, "-o", file]) == 0
    command = ["activations", file, "--text", str(text), "--routing", "-o", str(folder)]
    command += ["--set", "backends.cpu=reference"]
    assert run(command) == 0
    assert run(command) == 2
    picture = tmp_path / "hits.png"
    from pi2.cli.bench import replay_command as replay

    done = CliRunner().invoke(replay, [str(folder), "--memory", "20%", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert "belady-layer" in done.output and "2 layers x 4 experts = 8 experts" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(
        replay, [str(folder), "--policy", "lru", "--memory", "1 MiB", "--skip", "2", "--json"]
    )
    values: list[dict[str, Any]] = json.loads(done.output)
    assert [value["policy"] for value in values] == ["lru"]
    done = CliRunner().invoke(replay, [str(folder), "--memory", "1%"])
    assert isinstance(done.exception, UserError)
