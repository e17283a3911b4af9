"""Plans of mixtures whose router chooses whole experts, and what refuses their stores."""

import tomllib
from pathlib import Path

import pytest

from pi2.authoring.drafting import Wish, draft_plan
from pi2.cli.main import run
from pi2.fitting.check import check_file
from pi2.fitting.completion import StoreOrigin, complete_plan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import BYTE_UNITS, parse_quantity
from pi2.plan.reading.references import find_document
from tests.helpers.goldens import copy_checkpoint
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import MIXTURE, make_model


@pytest.mark.parametrize("activation", ["silu", "drelu"])
def test_plans_of_mixtures_without_predictors_get_a_router(activation: str) -> None:
    model = make_model(
        {"ffn": {"activation": activation}, **MIXTURE, "predictor": None, "tied_head": False}
    )
    device = check_file(find_document("host", "device", Path())).document
    assert isinstance(device, Device)
    first = Wish(device="host", model="./m", store="./store", budget_bytes=None)
    draft = tomllib.loads(draft_plan(first, device, model))
    decode = complete_plan(draft, device, StoreOrigin(model)).values["decode"]
    assert decode == {"predictor": "router", "look_ahead": "layer"}
    # Nobody knows which experts will be used: what does not fit is left to the cache.
    wish = Wish(device="host", model="./m", store="./s", budget_bytes=512 << 20)
    large = model.model_copy(
        update={"shape": model.shape.model_copy(update={"layers": 40, "ffn": 8192})}
    )
    plan = complete_plan(
        tomllib.loads(draft_plan(wish, device, large)), device, StoreOrigin(large)
    ).values
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
    assert complete_plan(draft, device, StoreOrigin(model)).values["prefill"]["chunk"] == chunk


def test_the_planner_lets_reads_of_experts_begin_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--device", "oneplus-12", "--model", "mixtral-8x7b", "--memory", "12GiB"]
    store = ["--store", str(tmp_path / "store")]
    assert run([*command, *store, "-o", str(tmp_path / "found.plan.toml")]) == 0
    plan = tomllib.loads((tmp_path / "found.plan.toml").read_text())
    device = check_file(find_document("oneplus-12", "device", Path())).document
    model = check_file(find_document("mixtral-8x7b", "model", Path())).document
    assert isinstance(model, Model) and isinstance(device, Device)
    whole = complete_plan(plan, device, StoreOrigin(model)).values
    decode = whole["decode"]
    assert (decode["predictor"], decode["look_ahead"]) == ("router", "layer")
    assert whole["layers"]["hot"] == 0.0, "all of it is a cache, of a token's demand and more"
    assert "all neurons of the chosen experts" in capsys.readouterr().out
    assert not check_file(tmp_path / "found.plan.toml").diagnostics


def test_a_routed_store_says_which_command_makes_a_file_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_mixture_plan(tmp_path, "silu", {"predictor": None})
    assert run(["run", str(plan), "--prompt", "x", "--set", "backends.cpu=reference"]) == 2
    said = capsys.readouterr().err
    source = [str(tmp_path / "store"), "--model", str(tmp_path / "tiny.model.toml")]
    assert "error[P525]" in said and f"pi2 convert {' '.join(source)} -o tiny.gguf" in said
    assert run(["convert", *source, "-o", str(tmp_path / "tiny.gguf")]) == 0
    capsys.readouterr()
    found = tmp_path / "found.plan.toml"
    wanted = ["--device", "cloud-vm-zen5", "--model", source[2], "--memory", "300MiB"]
    assert run(["plan", *wanted, "-o", str(found)]) == 0
    assert "`pi2 convert CHECKPOINT -o tiny.gguf` makes it" in capsys.readouterr().out
    assert tomllib.loads(found.read_text())["weights"] == "tiny.gguf"
    assert run(["validate", str(found)]) == 0
    for plan in (tmp_path / "tiny.gguf", found):
        command = ["run", str(plan), "--prompt", "hello", "--max-tokens", "2"]
        assert run([*command, "--set", "backends.cpu=reference"]) == 0


def test_a_checkpoint_of_a_mixture_becomes_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = copy_checkpoint("mixtral", tmp_path / "checkpoint")
    assert run(["convert", str(checkpoint), "-o", str(tmp_path / "store")]) == 2
    said = capsys.readouterr().err
    assert "error[P525]" in said and "-o store.gguf" in said
    assert not (tmp_path / "store").exists()
    assert run(["convert", str(checkpoint), "-o", str(tmp_path / "model.gguf")]) == 0
