"""What a plan derived gives way to what is wanted now: --set and --memory in every command."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import pi2
from pi2.authoring.drafting import Wish, draft_plan
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.fitting.completion import StoreOrigin, complete_plan
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import BYTE_UNITS, parse_quantity
from pi2.plan.reading.references import list_shipped
from pi2.refit import FittedPlan, read_plan
from tests.helpers.compiling import use_own_data
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.shipped_plans import read_device, read_model

DEMO = list_shipped("plan")["demo"]
PLANS = ("demo", "oneplus-12/turbosparse-mixtral-47b", "cloud-vm-zen5/bamboo-7b")
MIB = 1 << 20


def read(plan: Path, memory_bytes: int | None = None, **values: object) -> FittedPlan:
    given = {key.replace("__", "."): value for key, value in values.items()}
    return read_plan(plan, overrides=given, memory_bytes=memory_bytes)


def draft(folder: Path, model: str) -> Path:
    device = read_device("host")
    described = read_model(model)
    path = folder / "default.plan.toml"
    wish = Wish(device="host", model=model, store=".", budget_bytes=None)
    path.write_text(draft_plan(wish, device, described, lambda: (8 << 30, 8 << 30)))
    return path


def find_least(error: UserError) -> int:
    (item,) = error.diagnostics
    option = (item.help or "").split("`")[1]
    assert option.startswith("--memory ")
    return int(parse_quantity(option.removeprefix("--memory ").strip("'"), BYTE_UNITS))


@pytest.mark.parametrize(
    "wish",
    [{"kv__context": 2048}, {"kv__context": 16}, {"decode__batch": 3}, {"prefill__chunk": 256}],
    ids=str,
)
@pytest.mark.parametrize("name", PLANS)
def test_sizes_follow_what_is_set(name: str, wish: dict[str, Any]) -> None:
    """Every plan fits, or one finding says what is wrong or the least budget."""
    try:
        resolved = read(list_shipped("plan")[name], **wish).resolved
    except UserError as error:
        (item,) = error.diagnostics
        assert item.code in ("P026", "P231", "P611")
        return
    assert resolved.plan.memory.budget == load_plan(list_shipped("plan")[name]).plan.memory.budget
    for segment, need in resolved.needs.items():
        assert getattr(resolved.plan.memory.segments, segment) >= need.bytes


def test_the_least_budget_is_one_that_works() -> None:
    plan = list_shipped("plan")["oneplus-12/bamboo-7b-half"]
    with pytest.raises(UserError, match=r"P611|P026") as caught:
        _ = read(plan, kv__context=4096, decode__batch=16).resolved
    least = find_least(caught.value)
    assert read(plan, least, kv__context=4096, decode__batch=16).report.is_sound
    with pytest.raises(UserError, match=r"P611|P026"):
        _ = read(plan, least - 64 * MIB, kv__context=4096, decode__batch=16).resolved


def test_what_was_derived_and_gave_way_adds_up_to_the_budget() -> None:
    found = read(list_shipped("plan")["oneplus-12/bamboo-7b-half"], 3905 * MIB).resolved.plan.memory
    assert sum(size for _, size in found.segments) <= found.budget == 3905 * MIB


def test_what_somebody_set_is_kept() -> None:
    found = read(DEMO, decode__batch=4, memory__segments__kv="4 MiB")
    with pytest.raises(UserError, match="P202"):
        _ = found.resolved


def test_what_is_wrong_otherwise_is_said_without_the_sizes_that_follow_from_it() -> None:
    assert [item.code for item in read(DEMO, kv__context=8192).report.diagnostics] == ["P231"]


def test_a_mixture_is_computed_whole_if_somebody_says_so(tmp_path: Path) -> None:
    plan = draft(tmp_path, "qwen3-30b-a3b")
    assert read(plan, decode__predictor="none").resolved.plan.decode.look_ahead == "none"
    with pytest.raises(UserError, match="P254"):
        _ = read(plan, decode__predictor="none", decode__look_ahead="layer").resolved
    assert load_plan(plan).plan.decode.look_ahead == "layer"


def test_the_engine_loads_what_was_fitted(tmp_path: Path) -> None:
    plan = make_mixture_plan(tmp_path, "silu", {"predictor": None})
    settings = {"backends.cpu": "reference", "decode.batch": 3, "decode.predictor": "none"}
    with pi2.load(plan, set=settings) as model:
        assert model.plan.plan.decode.batch == 3
        assert any(change.startswith("kv: ") for change in model.changes)


def test_a_fitted_plan_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.plan.toml"
    command = ["fit", str(DEMO), "--memory", "124MiB", "--set", "decode.batch=2", "-o", str(file)]
    assert run(command) == 0
    kept = load_plan(file)
    assert (kept.plan.memory.budget, kept.plan.decode.batch) == (124 * MIB, 2)
    wanted = read(DEMO, 124 * MIB, decode__batch=2).resolved.plan
    assert (kept.plan.memory, kept.plan.layers) == (wanted.memory, wanted.layers)
    assert run(command) == 2 and "P027" in capsys.readouterr().err
    assert run([*command, "--force"]) == 0
    assert run(["fit", str(file), "--memory", "1GiB", "-o", str(file), "--force"]) == 2
    assert load_plan(file).digest == kept.digest


def test_fitted_file_of_weights_is_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_data(tmp_path, monkeypatch)
    from tests.unit.test_checkpoint_models import write_model

    file = write_model(tmp_path, "tiny")
    target = tmp_path / "plans/small.plan.toml"
    command = ["fit", str(file), "--memory", "200MiB", "--set", "kv.context=32"]
    assert run([*command, "-o", str(target)]) == 0
    assert 'weights = "../tiny.gguf"' in target.read_text()
    assert run(["validate", str(target), "--strict"]) == 0
    assert run(["show", str(target), "--set", "kv.context=16"]) == 0
    if read(target).report.runs_file:
        assert read(target).resolved.plan.memory.budget == 200 * MIB


def test_what_gave_way_and_items_of_arrays_are_kept_too(tmp_path: Path) -> None:
    plan = tmp_path / "plan.plan.toml"
    plan.write_text(
        'schema_version = 3\nextends = ["demo"]\ndecode.predictor = "low-rank"\n'
        'decode.look_ahead = "layer"\nmemory.segments.hot = "3 MiB"\n'
        'memory.segments.cold = "768 KiB"\n[[layers.overrides]]\nselect = "0-3"\nhot = 0.9\n'
    )
    file = tmp_path / "fitted.plan.toml"
    with pytest.raises(UserError, match="P611") as caught:
        read(plan, MIB, decode__predictor="gate")
    least = find_least(caught.value)
    given = ["--memory", f"{least}B", "--set", "decode.predictor=gate"]
    assert run(["fit", str(plan), *given, "-o", str(file)]) == 0
    kept, wanted = load_plan(file).plan, read(plan, least, decode__predictor="gate")
    assert kept.decode.look_ahead == "none" and kept.layers == wanted.resolved.plan.layers
    assert kept.layers.overrides[0].hot != 0.9


def test_a_first_plan_has_a_shorter_context_where_the_usual_one_does_not_fit() -> None:
    """90 MiB of weights in a group of 300 MiB, of which a long context would take 90."""
    device = read_device("host")
    shape = {
        "layers": 30, "hidden": 576, "ffn": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64,
        "vocab": 49152, "context": 8192,
    }  # fmt: skip
    model = Model.model_validate_json(
        json.dumps(
            {
                "schema_version": 3, "name": "small", "id": "small", "shape": shape,
                "ffn": {"activation": "silu"}, "tied_head": True,
                "quantization": dict.fromkeys(("ffn", "attention", "embedding", "head"), "int8"),
            }
        )
    )  # fmt: skip
    wish = Wish(device="host", model="small", store=".", budget_bytes=None)

    def draft(free: int) -> dict[str, Any]:
        return tomllib.loads(draft_plan(wish, device, model, lambda: (1 << 40, free * MIB)))

    plans = {free: draft(free) for free in (1024, 300, 260)}
    whole = [complete_plan(plan, device, StoreOrigin(model)).values for plan in plans.values()]
    assert [plan["kv"]["context"] for plan in whole] == [4096, 2048, 1024]
    for free, plan in plans.items():
        assert parse_quantity(plan["memory"]["budget"], BYTE_UNITS) <= 0.8 * free * MIB
    with pytest.raises(UserError, match=r"P026.*needs at least \d+ MiB") as caught:
        draft(150)
    assert "--memory" in str(caught.value)
