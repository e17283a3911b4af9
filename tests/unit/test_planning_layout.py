"""What the planner weighs: layouts of stores, whole models, streams, promises and thresholds."""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pi2.costs.cost import cost_plan, describe_promise, find_promise
from pi2.costs.settings import StoredLayout
from pi2.diagnostics import UserError
from pi2.fitting.check import check_plan, load_plan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.planning.planner import PlannedPlan, plan
from pi2.planning.refinement import describe_layout, list_bundles
from pi2.planning.text import describe_choices, write_planned
from pi2.planning.wish import Wish
from tests.helpers.shipped_plans import ORIGIN, make_box, read_device, read_model
from tests.helpers.tables import in_table

GIB = 1 << 30
SEQUENTIAL = {"pattern": "sequential", "block": "1 MiB", "rate": "1 GB/s", **ORIGIN}


def make_device(rates: Mapping[str, str], block: str = "512 B") -> Device:
    """A box of four cores whose random reads have these rates by size."""
    random = [
        {"pattern": "random", "block": size, "rate": rate, "depth": 64, **ORIGIN}
        for size, rate in rates.items()
    ]
    reads = [SEQUENTIAL, *random]
    return make_box({"storage": {"block_size": block, "reads": reads}})


def make_wish(device: Device, **changes: Any) -> Wish:
    model = read_model("bamboo-7b")
    return dataclasses.replace(
        Wish(device=device, model=model, memory_bytes=3 * GIB, context=512), **changes
    )


def list_layouts(
    device: Device, model: Model, stored: StoredLayout | None
) -> list[tuple[int, str]]:
    return [(bundle.stride, bundle.scales) for bundle in list_bundles(device, model, stored)]


def test_resident_scales_are_a_choice_where_they_save_whole_blocks() -> None:
    ufs = make_device({"8 KiB": "1 GB/s", "12 KiB": "1.2 GB/s"}, block="4 KiB")
    model = read_model("relullama-13b")  # 8640 bytes a neuron, 7680 without scales
    both = [(12288, "inline"), (8192, "resident")]
    assert list_layouts(ufs, model, None) == both
    planned = plan(make_wish(ufs, model=model, memory_bytes=5 * GIB))
    bundle = planned.resolved.bundle
    assert (bundle.stride, bundle.scales) == (8192, "resident")
    text = "\n".join(describe_choices(planned))
    assert "neurons lie 8 KiB apart, 7680 bytes are used" in text
    assert "Their scales are apart, in memory." in text
    assert "`pi2 convert` leaves scales in the bundles" in text
    assert f"repack stores/{model.id} --scales resident --stride" in text
    assert "neurons 12 KiB apart makes" in text
    small = read_model("bamboo-7b")
    stored = StoredLayout(8192, "resident", "hotness")
    assert list_layouts(ufs, small, stored) == [(8192, "inline"), (8192, "resident")]
    assert "as in the store" in "\n".join(describe_layout(planned, stored))


@in_table
def test_memory_and_reads_are_weighed(rates: Mapping[str, str], chosen: int, reason: str) -> None:
    planned = plan(make_wish(make_device(rates)))
    assert planned.resolved.bundle.stride == chosen
    text = "\n".join(describe_choices(planned))
    assert reason in text
    other = {7168: "8 KiB", 8192: "7 KiB"}[chosen]
    assert f"The best plan with neurons {other} apart makes" in text
    assert planned.others is not None
    assert planned.others[0].cost.tokens_s < planned.cost.tokens_s


def test_a_store_is_not_written_anew_for_little() -> None:
    device = make_device({"7 KiB": "280 MB/s", "8 KiB": "320 MB/s"})
    free = plan(make_wish(device, memory_bytes=8 * GIB))  # nothing is read: both are equal
    assert free.resolved.bundle.stride == 7168
    lines = list(describe_layout(free, StoredLayout(8192, "inline", "index")))
    assert any("pi2 store repack stores/bamboo-7b --stride '7 KiB'" in line for line in lines)
    assert any("pi2 store reorder" in line for line in lines)


def test_a_stored_layout_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredLayout(8192, "inline", "hotness")
    for module in ("planner", "text"):
        monkeypatch.setattr(f"pi2.planning.{module}.read_stored", lambda store: stored)
    device = make_device({"7 KiB": "280 MB/s", "8 KiB": "320 MB/s"})
    kept = plan(make_wish(device, memory_bytes=8 * GIB, store=tmp_path))
    assert kept.resolved.bundle.stride == 8192
    text = "\n".join(describe_choices(kept))
    assert "as in the store" in text and "repack" not in text


def test_reads_across_gaps_are_chosen_for_a_store_by_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = StoredLayout(7168, "inline", "expert")
    for module in ("planning.planner", "planning.search", "planning.text", "costs.settings"):
        monkeypatch.setattr(f"pi2.{module}.read_stored", lambda store: stored)
    # 14 us for a read and 0.7 us for a KiB.
    device = make_device({"7 KiB": "379 MB/s", "28 KiB": "853 MB/s"})
    model = read_model("turbosparse-mixtral-47b")
    wish = make_wish(device, model=model, memory_bytes=8 * GIB, store=tmp_path)
    chosen = plan(wish)
    assert chosen.resolved.plan.io.merge_gap == 2
    by_gap = next(item for item in chosen.decisions if item.key == "io.merge_gap")
    assert by_gap.tokens_s[0][0] == "2"
    advice = "--by expert` puts each expert's neurons together"
    assert advice not in "\n".join(describe_choices(chosen))
    # By hotness the experts lie mixed: there is nothing to merge, and the plan is slower.
    stored = StoredLayout(7168, "inline", "hotness")
    mixed = plan(wish)
    assert mixed.resolved.plan.io.merge_gap == 0
    assert mixed.cost.tokens_s < 0.95 * chosen.cost.tokens_s
    assert advice in "\n".join(describe_choices(mixed))


def test_two_reads_are_chosen_where_they_are_quicker() -> None:
    """Only where another unit computes as well: pi2's own engine reads a neuron at once."""
    phone = read_device("oneplus-12")
    # Threads would wait for each read; no other storage makes a plan read with threads alone.
    phone = phone.model_copy(update={"storage": phone.storage.model_copy(update={"kind": "nvme"})})
    slow = [
        item.model_copy(update={"rate": item.rate / 30}) if item.block > 4096 else item
        for item in phone.storage.reads
    ]
    storage = phone.storage.model_copy(update={"reads": tuple(slow)})
    memory = int(4.0 * GIB)
    one = plan(make_wish(phone, memory_bytes=memory))
    two = plan(make_wish(phone.model_copy(update={"storage": storage}), memory_bytes=memory))
    assert one.resolved.plan.pipeline.phases == 1
    assert any("npu" in layer.split for layer in two.resolved.layers)
    assert two.resolved.plan.pipeline.phases == 2
    text = "\n".join(describe_choices(two))
    assert "pipeline.phases: 2; tokens/s would be" in text
    assert "backend 'hexagon' has run only on emulated units" in text


def wish_for(device: str, model: str, **changes: object) -> Wish:
    """A wish for shipped documents, with 8 GiB of main memory."""
    unit = read_device(device)
    found = Wish(device=unit, model=read_model(model), memory_bytes=8 * GIB)
    return replace(found, **changes)  # type: ignore[arg-type]


def is_whole(planned: PlannedPlan) -> bool:
    return bool(planned.resolved.source.whole_units)


def test_a_card_with_room_has_the_whole_model() -> None:
    planned = plan(wish_for("pc-rtx-4090", "bamboo-7b"))
    assert is_whole(planned)
    assert planned.values["layers"]["split"] == {"gpu": 1.0}
    # The reason is the other plan's speed.
    (decision,) = planned.decisions
    speeds = dict(decision.tokens_s)
    assert speeds["gpu alone"] == planned.cost.tokens_s
    assert speeds["the CPU and another unit"] < planned.cost.tokens_s


def test_a_card_without_room_computes_beside_the_cpu_or_not_at_all() -> None:
    planned = plan(wish_for("pc-rtx-4090", "bamboo-7b", unit_memory={"gpu": 3 * GIB}))
    assert not is_whole(planned)
    assert "cpu" in planned.values["layers"]["split"]


def test_the_plan_has_no_findings(tmp_path: Path) -> None:
    planned = plan(wish_for("server-h200", "llama-2-7b"))
    path = tmp_path / "whole.plan.toml"
    path.write_text(
        write_planned(planned, device="server-h200", model="llama-2-7b", store="s", name="Whole")
    )
    assert not check_plan(path).diagnostics


def test_figures_of_the_processor_are_not_missed() -> None:
    """Nothing is stated of the processor and of the flash beside an H200."""
    assert is_whole(plan(wish_for("server-h200", "llama-2-7b")))
    with pytest.raises(UserError) as error:
        plan(wish_for("server-h200", "llama-2-7b", unit_memory={"gpu": GIB}))
    assert [item.code for item in error.value.diagnostics] == ["P351"]


def test_units_in_main_memory_are_not_given_the_whole_model() -> None:
    assert not is_whole(plan(wish_for("oneplus-12", "bamboo-7b")))


PIECE, BYTE_S = 500, 1e-9
"""Neurons of a piece, of a megabyte each: a piece takes 0.5 s to read."""
MISTRAL = Path(__file__).parents[2] / "plans/cloud-vm-zen5/mistral-7b.plan.toml"


def test_dense_decoding_streams_what_is_not_hot_whatever_the_cache_has_room_for() -> None:
    def predict(cold: str) -> float:
        changes = {
            "layers.hot": 0.5,
            "memory.segments.hot": "1700 MiB",
            "memory.segments.cold": cold,
        }
        return cost_plan(load_plan(MISTRAL, overrides=changes)).tokens_s

    whole = cost_plan(load_plan(MISTRAL)).tokens_s
    assert predict("0 B") < 0.5 * whole
    assert predict("1000 MiB") == pytest.approx(predict("0 B"))


def test_a_longer_prompt_takes_longer_but_less_for_each_token() -> None:
    resolved = load_plan(MISTRAL)
    short, long = (cost_plan(resolved, prompt=tokens).prefill_tokens_s for tokens in (16, 256))
    assert short is not None and long is not None
    assert short < long < 16 * short


PLANS = Path(__file__).parents[2] / "plans"
PAPER = PLANS.parent / "tools/paper/plans"
PROBED = PAPER / "cloud-vm-zen5/bamboo-7b-60.plan.toml"
PHONE = PAPER / "oneplus-12/bamboo-7b-half.plan.toml"


def test_only_a_probed_device_promises_anything() -> None:
    assert find_promise(load_plan(PHONE), 100) is None


def test_a_run_that_is_far_from_its_promise_asks_for_another_probe() -> None:
    """What measured kernels were apart is what a prediction may miss by."""
    cost = cost_plan(load_plan(PROBED))
    near, slow, fast = (describe_promise(cost, cost.tokens_s * share) for share in (0.95, 0.5, 1.5))
    assert "as fast as that" in near and "pi2 probe" not in near
    assert "50% slower" in slow and "pi2 probe" in slow
    assert "50% faster" in fast
    assert cost.range_tokens_s.write() in near
