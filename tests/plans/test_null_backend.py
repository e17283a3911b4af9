"""Shipped plans and the shortest run through the whole engine, if need be by null backends."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit

import pi2
from pi2.cli.main import run
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import make_model, make_tiny
from tests.helpers.programs import Ask
from tests.helpers.shipped_plans import PLANS, list_plans

SHIPPED = [path for path in list_plans() if "\nweights = " not in path.read_text("utf-8")]
NOTHING = {"backends": {"cpu": "null", "gpu": "null", "npu": "null"}}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(PLANS)))
def test_a_shipped_plan_runs_dry(path: Path) -> None:
    with pi2.load(path, set=NOTHING) as model:
        shape = model.plan.model.shape
        assert model.logits([1] * 8).shape == (8, shape.vocab)
        loaded = model.stats
        assert model.logits([1, 2, 3], mode="decode").shape == (3, shape.vocab)
        done = model.stats - loaded
        if model.plan.plan.decode.predictor == "none":
            assert done.flash_read_bytes > 0 or all(layer.hot == 1 for layer in model.plan.layers)
        else:
            moe = model.plan.model.moe
            # Predictors see the neurons of the experts that a token was routed to.
            seen = shape.ffn * (1 if moe is None else moe.active_experts)
            assert done.possible_neurons == 3 * shape.layers * seen
            assert done.cache_hits + done.cache_misses == done.predicted_neurons
            assert done.flash_read_bytes == done.cache_misses * model.plan.bundle.stride


def write_file(folder: Path) -> str:
    pytest.importorskip("gguf")
    from tests.unit.test_checkpoint_models import write_model

    return write_model(folder, "tiny", kind="Q4_1").name


def write_moe(folder: Path) -> str:
    make_mixture_plan(folder, "drelu")
    (folder / "tiny.model.toml").rename(folder / "store" / "tiny.model.toml")
    return "store"


def write_dense(folder: Path) -> str:
    make_tiny(folder, stride=4096)
    values = make_model().model_dump(mode="json", exclude_none=True)
    (folder / "store" / "tiny.model.toml").write_text(tomlkit.dumps(values))
    return "store"


@pytest.mark.parametrize(
    ("make_weights", "device"),
    [
        pytest.param(lambda folder: PLANS / "stores/pi2-demo", None, id="the demo's store"),
        pytest.param(write_file, None, id="a GGUF file"),
        pytest.param(write_moe, None, id="an MoE model", marks=pytest.mark.slow),
        pytest.param(write_dense, "oneplus-12", id="a phone"),
        pytest.param(write_dense, "oneplus-ace-2", id="another phone", marks=pytest.mark.slow),
    ],
)
def test_the_shortest_plan_validates_shows_simulates_and_runs(
    tmp_path: Path, ask: Ask, make_weights: Callable[[Path], object], device: str | None
) -> None:
    plan = tmp_path / "my.plan.toml"
    plan.write_text(
        f'schema_version = 3\nweights = "{make_weights(tmp_path)}"\n'
        + ("" if device is None else f'device = "{device}"\n')
        + '[memory]\nbudget = "300 MiB"\n'
    )
    dry = [] if device is None else ["--set", "backends.cpu=null"]
    assert run(["validate", str(plan), "--strict"]) == 0
    assert "# derived: " in ask(["show", str(plan)]).out
    assert "tokens/s" in ask(["simulate", str(plan), "--prompt", "8", "--tokens", "2"]).out
    assert "speed: " in ask(["run", str(plan), "--prompt", "ab", "--max-tokens", "2", *dry]).err
