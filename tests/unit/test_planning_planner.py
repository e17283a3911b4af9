"""`pi2 plan`: from a wish to a plan that validates, and impossible wishes explained."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.authoring.drafting import Wish as DraftWish
from pi2.authoring.drafting import draft_plan
from pi2.backends.hexagon import backend as hexagon
from pi2.cli.main import run
from pi2.costs.cost import cost_resolved
from pi2.costs.rates import read_rates
from pi2.diagnostics import UserError
from pi2.fitting import describe_unit
from pi2.fitting.budget import fit_plan
from pi2.fitting.check import check_plan
from pi2.fitting.completion import StoreOrigin, complete_plan, resolve_values
from pi2.phone.building import describe_npu
from pi2.plan.documents.device import Device
from pi2.plan.documents.quantities import approximate_bytes
from pi2.planning.planner import PlannedPlan, plan, trace_pareto
from pi2.planning.text import describe_choices, draw_curve, write_planned
from pi2.planning.wish import Wish
from tests.helpers.programs import Ask
from tests.helpers.shipped_plans import BOX, ORIGIN, make_box, read_device, read_model
from tests.helpers.tables import in_table

GIB, MIB = 1 << 30, 1 << 20
RANDOM = {"pattern": "random", "block": "8 KiB", "threads": 1, **ORIGIN}
CPU = {**BOX["units"]["cpu"], "compute": [{"giga_ops": 200, "precision": "int8", **ORIGIN}]}
STORAGE: dict[str, Any] = {
    "block_size": "512 B",
    "reads": [
        {"pattern": "sequential", "block": "1 MiB", "rate": "1 GB/s", **ORIGIN},
        {**RANDOM, "rate": "100 MB/s", "depth": 8},
        {**RANDOM, "rate": "300 MB/s", "depth": 64},
    ],
}


def make_device(changes: Mapping[str, Any] | None = None) -> Device:
    return make_box({"units": {"cpu": CPU}, "storage": STORAGE, **(changes or {})})


def make_wish(**changes: Any) -> Wish:
    wish = Wish(device=make_device(), model=read_model("bamboo-7b"), memory_bytes=3 * GIB)
    return dataclasses.replace(wish, **changes)


@pytest.fixture(scope="module")
def planned() -> PlannedPlan:
    return plan(make_wish())


def test_the_memory_is_kept_and_used(planned: PlannedPlan) -> None:
    segments = planned.resolved.plan.memory.segments
    total = sum(getattr(segments, name) for name in type(segments).model_fields)
    assert 3 * GIB - 64 * MIB < total <= 3 * GIB


def test_the_fastest_reads_are_chosen(planned: PlannedPlan) -> None:
    io = planned.resolved.plan.io
    assert (io.engine, io.depth) == ("io_uring", 64)


def test_the_embedding_and_the_unused_context_make_room_for_neurons(planned: PlannedPlan) -> None:
    chosen = planned.resolved.plan
    assert (chosen.memory.embedding, chosen.kv.lend) == ("flash", True)
    text = write_planned(planned, device="d", model="m", store="s", name="A plan")
    assert "Rows of the embedding are read when their tokens come: 133 MiB more" in text
    assert "the free part of the context" in text
    assert planned.full_tokens_s is not None and planned.full_tokens_s < planned.cost.tokens_s
    assert f"once the context of 4096 is full, {planned.full_tokens_s:.3g} tokens/s" in text
    rates, wish = read_rates(make_device()), planned.wish
    freed = 132 * MIB
    for table, key, value, cold in (
        ("memory", "embedding", "resident", chosen.memory.segments.cold - freed),
        ("kv", "lend", False, chosen.memory.segments.cold),
    ):
        values = json.loads(json.dumps(planned.values))
        values[table][key] = value
        values["memory"]["segments"]["cold"] = f"{cold} B"
        other = cost_resolved(resolve_values(values, wish.device, wish.model), rates)
        assert other.token_s > planned.cost.token_s * 1.01, key


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 8 * GIB},
        {"device": make_device({"storage": {**STORAGE, "latency": "50 ms"}})},
    ],
    ids=["everything fits", "a row takes longer than what it saves"],
)
def test_the_embedding_stays_where_reading_it_does_not_pay(changes: dict[str, Any]) -> None:
    assert plan(make_wish(**changes)).resolved.plan.memory.embedding == "resident"


def test_a_plan_that_may_leave_scores_out_reads_less_and_is_faster(planned: PlannedPlan) -> None:
    found = plan(make_wish(leave_out=0.02))
    assert found.resolved.plan.decode.leave_out == 0.02
    assert found.cost.tokens_s > 1.05 * planned.cost.tokens_s
    text = write_planned(found, device="d", model="m", store="s", name="A plan")
    assert "leave_out = 0.02" in text and "0.02 of the predictor's scores" in text


def test_scores_are_left_out_of_plans_that_have_some(ask: Ask) -> None:
    command = ["plan", "--device", "cloud-vm-zen5", "--memory", "8GiB", "--leave-out", "0.02"]
    assert "P292" in ask([*command, "--model", "mistral-7b"], 2).err
    assert "not with --exact" in ask([*command, "--model", "bamboo-7b", "--exact"], 2).err


def test_text_validates_and_is_the_same_every_time(planned: PlannedPlan, tmp_path: Path) -> None:
    def write(item: PlannedPlan) -> str:
        return write_planned(
            item, device="./box.device.toml", model="bamboo-7b", store="stores/x", name="A plan"
        )

    text = write(planned)
    assert text == write(plan(make_wish()))
    assert all(len(line) <= 120 for line in text.splitlines())
    from pi2.authoring.writing import write_document

    (tmp_path / "box.device.toml").write_text(write_document(make_device()))
    report = check_plan(tmp_path / "my.plan.toml", text=text)
    assert report.resolved is not None, report.diagnostics
    assert not report.diagnostics


def test_no_random_plan_within_the_memory_is_faster(planned: PlannedPlan) -> None:
    """Twenty plans that spend the memory otherwise."""
    random = np.random.default_rng(0)
    rates, wish = read_rates(make_device()), planned.wish
    tried = 0
    while tried < 20:
        values = json.loads(json.dumps(planned.values))
        values["layers"] = {"split": {"cpu": 1.0}, "hot": round(float(random.uniform(0, 0.5)), 3)}
        values["kv"]["type"] = str(random.choice(["fp16", "int8"]))
        values["decode"]["predictor"] = str(random.choice(["gate", "low-rank"]))
        values["decode"]["look_ahead"] = "none"
        values["io"]["depth"] = int(random.choice([8, 64]))
        values["prefill"]["chunk"] = int(random.choice([32, 128]))
        needs = dict(resolve_values(values, wish.device, wish.model).needs.items())
        spent = 160 * MIB + sum(item.bytes for name, item in needs.items() if name != "cold")
        cold = 3 * GIB - spent
        if cold < needs["cold"].bytes:
            continue
        values["memory"]["segments"]["cold"] = f"{cold} B"
        cost = cost_resolved(resolve_values(values, wish.device, wish.model), rates)
        assert planned.cost.token_s <= cost.token_s * 1.001, values
        tried += 1


def test_a_curve_is_a_picture_of_a_type_that_can_be_drawn() -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra plot")
    plans = trace_pareto(make_wish(memory_bytes=None), 2)
    assert draw_curve(plans, "png").startswith(b"\x89PNG")
    with pytest.raises(UserError, match="P633"):
        draw_curve(plans, "spreadsheet")


@pytest.mark.parametrize("memory_mib", [103, 108])
def test_no_drafted_plan_is_faster_where_all_neurons_fit(memory_mib: int) -> None:
    device, model = make_device(), read_model("pi2-demo")
    found = plan(Wish(device=device, model=model, memory_bytes=memory_mib * MIB, context=1024))
    draft = DraftWish(
        device="box",
        model="pi2-demo",
        store="stores/pi2-demo",
        budget_bytes=memory_mib * MIB,
        context=1024,
        name="drafted",
    )
    values = complete_plan(
        tomllib.loads(draft_plan(draft, device, model)), device, StoreOrigin(model)
    ).values
    drafted = resolve_values(values, device, model)
    assert drafted.plan.layers.hot == 1.0, "not all neurons fit"
    assert found.resolved.plan.memory.segments.cold == 0, "nothing needs to be looked up"
    rates = read_rates(device, model.shape.hidden)
    assert found.cost.tokens_s >= cost_resolved(drafted, rates).tokens_s * (1.0 - 1e-9)


def test_layers_keep_neurons_by_how_often_they_are_used(tmp_path: Path) -> None:
    few = {"active": 0.03, "gate_positive": 0.06, "predicted": 0.05, "skew": 0.08}
    many = {"active": 0.2, "gate_positive": 0.3, "predicted": 0.25, "skew": 0.4}
    layers = [few] * 16 + [many] * 16
    (tmp_path / "statistics.json").write_text(json.dumps({"layers": layers}))
    wish = make_wish(store=tmp_path)
    found = plan(wish)
    hots = [layer.hot for layer in found.resolved.layers]
    assert max(hots[:16]) < 0.5 * min(hots[16:])
    values = json.loads(json.dumps(found.values))
    values["layers"] = {"split": {"cpu": 1.0}, "hot": round(sum(hots) / 32, 3)}
    even = fit_plan(resolve_values(values, wish.device, wish.model), 3 * GIB)
    other = cost_resolved(even, read_rates(wish.device), store=tmp_path)
    assert found.cost.tokens_s > 1.05 * other.tokens_s


def test_exact_plans_change_no_result() -> None:
    found = plan(make_wish(exact=True, memory_bytes=6 * GIB)).resolved.plan
    assert (found.decode.predictor, found.kv.type, found.decode.look_ahead) == (
        "gate",
        "fp16",
        "none",
    )


def test_a_smooth_model_is_computed_whole() -> None:
    found = plan(make_wish(model=read_model("mistral-7b"), memory_bytes=3 * GIB))
    assert found.resolved.plan.decode.predictor == "none"
    assert found.resolved.plan.memory.segments.cold == 0
    assert 0.0 < found.resolved.layers[0].hot < 1.0


def test_an_npu_gets_neurons_where_it_is_faster() -> None:
    document = read_device("oneplus-12")
    found = plan(make_wish(device=document, memory_bytes=5 * GIB))
    shares = [layer.split.get("npu", 0.0) for layer in found.resolved.layers]
    hots = [layer.hot for layer in found.resolved.layers]
    assert max(shares) > 0.0
    assert all(share <= hot + 1e-9 for share, hot in zip(shares, hots, strict=True))
    # The segment of hot neurons has the unit's rows of projections, too; the text says neurons.
    neurons = sum(layer.hot_neurons for layer in found.resolved.layers)
    stay = neurons * found.resolved.bundle.stride
    assert stay < found.resolved.plan.memory.segments.hot
    assert f" of neurons, {approximate_bytes(stay)} stay; " in "\n".join(describe_choices(found))
    # Its backend can build that: shares, graphs within the NPU's own memory, and room for all.
    resolved, unit = found.resolved, document.units["npu"]
    assert resolved.name_backend("npu") == "hexagon"
    facts = describe_unit(resolved, "npu")
    assert not hexagon.find_limits(facts)
    assert unit.hexagon is not None and unit.hexagon.own_memory is not None
    graphs = hexagon.list_graphs(facts)
    assert graphs and max(graph.own_bytes for graph in graphs) <= unit.hexagon.own_memory
    need = hexagon.need_unit_memory(facts).bytes
    assert resolved.name_segment("npu") == "hot"
    assert need <= resolved.plan.memory.segments.hot
    names = {(graph.tokens, graph.neurons) for graph in graphs}
    assert names == {(item.tokens, item.neurons) for item in describe_npu(resolved, "npu").graphs}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_bytes": 600 * MIB}, ["at least", "--memory"]),
        ({"memory_bytes": None, "tokens_s": 1000.0}, ["the most", "--speed"]),
    ],
)
def test_an_impossible_wish_names_the_nearest(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        plan(make_wish(**changes))
    finding = caught.value.diagnostics[0]
    assert finding.code == "P350"
    for word in words:
        assert word in f"{finding.message} {finding.help}"


def test_the_nearest_wish_can_be_fulfilled() -> None:
    with pytest.raises(UserError) as caught:
        plan(make_wish(memory_bytes=600 * MIB))
    help_text = caught.value.diagnostics[0].help or ""
    size = int(help_text.split("'")[1].removesuffix(" MiB")) * MIB
    assert plan(make_wish(memory_bytes=size)).resolved.plan.memory.budget == size


def test_a_device_without_read_rates_says_how_to_measure_them() -> None:
    device = make_device({"storage": {}})
    with pytest.raises(UserError) as caught:
        plan(make_wish(device=device, memory_bytes=2 * GIB))
    finding = caught.value.diagnostics[0]
    assert finding.code == "P351"
    assert "storage.reads" in finding.message and "pi2 probe" in (finding.help or "")
    found = plan(make_wish(device=device, memory_bytes=8 * GIB))
    assert found.resolved.layers[0].hot == 1.0, "no reads are needed where everything stays"


def test_the_command_writes_a_plan_and_says_why(tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "my.plan.toml"
    arguments = ["plan", "--device", "oneplus-12", "--model", "bamboo-7b"]
    printed = ask([*arguments, "--memory", "4GiB", "-o", str(path)])
    assert "Predicted:" in printed.out and "tokens/s" in printed.out
    assert run(["validate", str(path)]) == 0
    assert run([*arguments, "--memory", "4GiB", "-o", str(path)]) == 2, "nothing is overwritten"


@in_table
def test_wishes_that_are_no_wishes(
    arguments: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--device", "oneplus-12", "--model", "bamboo-7b", *arguments]) != 0
    assert code in capsys.readouterr().err


def test_more_sequences_use_more_neurons_and_give_more_to_the_dense_unit() -> None:
    wish = make_wish(device=read_device("oneplus-12"), memory_bytes=8 * GIB, context=1024)
    one, four = plan(wish), plan(dataclasses.replace(wish, batch=4))
    assert four.cost.tokens_s > 1.5 * one.cost.tokens_s
    assert four.cost.token_s > one.cost.token_s
    assert sum(layer.used for layer in four.cost.layers) > 1.5 * sum(
        layer.used for layer in one.cost.layers
    )
    shares = [item.resolved.layers[0].split.get("npu", 0.0) for item in (one, four)]
    assert shares[1] > 1.3 * shares[0]
    assert four.resolved.plan.decode.batch == 4
    assert four.resolved.needs.kv.bytes == 4 * one.resolved.needs.kv.bytes


def test_energy_is_joules_of_the_power_figures() -> None:
    power = {"value": "10 W", "status": "estimated", "source": "a test"}
    device = make_device({"units": {"cpu": {**CPU, "power": power}}})
    found = plan(make_wish(device=device, objective="energy"))
    assert found.cost.token_j == pytest.approx(10.0 * found.cost.token_s)
    fastest = plan(make_wish(device=device))
    assert found.cost.token_j is not None and fastest.cost.token_j is not None
    assert found.cost.token_j <= fastest.cost.token_j * 1.01


def test_energy_does_not_start_a_unit_that_costs_more_than_it_saves() -> None:
    document = read_device("oneplus-12")
    values = json.loads(document.model_dump_json(exclude_none=True))
    wish = make_wish(device=document, memory_bytes=5 * GIB, context=1024, objective="energy")
    usual = plan(wish)
    values["power"]["value"] = "60 W"
    hungry = plan(dataclasses.replace(wish, device=Device.model_validate_json(json.dumps(values))))
    shares = [
        sum(layer.split.get("npu", 0.0) for layer in item.resolved.layers)
        for item in (usual, hungry)
    ]
    assert shares[0] > 0.0 and shares[1] == 0.0


def test_energy_without_power_figures_says_how_to_measure_them() -> None:
    with pytest.raises(UserError) as caught:
        plan(make_wish(objective="energy"))
    finding = caught.value.diagnostics[0]
    assert finding.code == "P351"
    assert "units.cpu.power" in finding.message and "battery" in (finding.help or "")


def test_a_plan_for_every_number_of_sequences_is_written_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--device", "oneplus-12", "--model", "bamboo-7b", "--memory", "5GiB"]
    output = str(tmp_path / "my.plan.toml")
    assert run([*arguments, "--context", "1024", "--batch", "1-2", "-o", output]) == 0
    assert "| sequences |" in capsys.readouterr().out
    names = sorted(item.name for item in tmp_path.iterdir())
    assert names == ["my.batch-1.plan.toml", "my.batch-2.plan.toml"]
    speeds = []
    for name in names:
        assert run(["simulate", str(tmp_path / name), "--tokens", "8", "--json"]) == 0
        speeds.append(json.loads(capsys.readouterr().out)["decode"]["tokens_s"])
    assert speeds[1] > 1.3 * speeds[0]
    assert run([*arguments, "--batch", "4-1"]) == 2
    assert "P105" in capsys.readouterr().err
