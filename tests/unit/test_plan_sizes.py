"""The arithmetic of segments, against sums done by hand."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pi2.fitting import count_threads
from pi2.fitting.budget import LAYER_BYTES, UNIT_BYTES, count_libraries, count_runtime
from pi2.fitting.check import load_plan
from pi2.machine import detect_machine
from pi2.machine.cpu import list_features
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import IsaFeature
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Predictor
from pi2.plan.weights.layout import GROUP

DEMO = Path(__file__).parents[2] / "plans/demo.plan.toml"
AMX: tuple[IsaFeature, ...] = tuple(list_features("x86-64", "amx"))
VNNI = tuple(list_features("x86-64", "avx512vnni"))


@pytest.fixture(scope="module")
def demo() -> ResolvedPlan:
    """The demo plan with a predictor of rank 64 and a context of 1000."""
    resolved = load_plan(DEMO, overrides={"kv.context": 1000, "layers.hot": 0.125})
    return change_model(resolved, predictor=Predictor.model_validate({"rank": 64, "active": 0.2}))


def change_model(resolved: ResolvedPlan, **values: Any) -> ResolvedPlan:
    model: Model = resolved.model.model_copy(update=values)
    return replace(resolved, model=model)


def change_plan(resolved: ResolvedPlan, table: str, **values: Any) -> ResolvedPlan:
    changed = getattr(resolved.plan, table).model_copy(update=values)
    return replace(resolved, plan=resolved.plan.model_copy(update={table: changed}))


def test_every_need_is_explained(demo: ResolvedPlan) -> None:
    for name, need in demo.needs.items():
        assert need.explanation, name


def need_workspace(
    demo: ResolvedPlan, features: tuple[str, ...] | None, architecture: str | None, chunk: int
) -> int:
    cpu = demo.device.units["cpu"].model_copy(
        update={"features": features, "architecture": architecture}
    )
    device = demo.device.model_copy(update={"units": {"cpu": cpu}})
    resolved = replace(change_plan(demo, "prefill", chunk=chunk), device=device)
    return resolved.needs.workspace.bytes


def test_cores_with_amx_keep_tokens_and_rows_for_tiles(demo: ResolvedPlan) -> None:
    threads = 3
    need = partial(need_workspace, change_plan(demo, "threads", compute=threads))
    # 64 rows and the sums of a tile, for what neurons read, 256 long.
    rows = threads * (64 * 256 * (1 + 4 / GROUP) + 9 * 1024)
    for chunk, rounded in ((128, 128), (127, 128), (1, 16)):
        fewest = need(VNNI, "x86-64", chunk)
        tokens = rounded * 256 * (2 + 4 / GROUP)
        for features in (AMX, None):
            assert need(features, "x86-64", chunk) == fewest + rows + tokens


@pytest.mark.parametrize("chunk", [1, 128, 512])
def test_threads_of_an_unknown_machine_have_room_with_and_without_amx(
    demo: ResolvedPlan, chunk: int
) -> None:
    need = partial(need_workspace, change_plan(demo, "threads", compute=2), chunk=chunk)
    known = [need(VNNI, "x86-64"), need(AMX, "x86-64")]
    assert known[0] < known[1] == need(None, None)


def test_run_has_as_many_unstated_threads_as_its_workspace_has_room_for(demo: ResolvedPlan) -> None:
    here = detect_machine()
    cpu = replace(here.cpu, architecture="x86-64", features=frozenset(AMX), cores=64)
    count = count_threads(demo, replace(here, cpu=cpu))
    room = demo.plan.memory.segments.workspace

    def need(threads: int) -> int:
        return need_workspace(change_plan(demo, "threads", compute=threads), AMX, "x86-64", 128)

    assert 1 < count < 64
    assert need(count) <= room < need(count + 1)
    small = replace(here, cpu=replace(cpu, cores=2))
    assert count_threads(demo, small) == 2
    assert count_threads(change_plan(demo, "threads", compute=64), small) == 64


def test_large_models_and_budgets_leave_more_for_tables(demo: ResolvedPlan) -> None:
    small = count_runtime(demo.model, 100 << 20)
    assert small < 92 << 20, "100 MiB are enough for the demo model"
    shape = demo.model.shape.model_copy(update={"layers": 32, "ffn": 8 * 14336})
    mixture = demo.model.model_copy(update={"shape": shape})
    tables = 41 * (32 * 8 * 14336 - 8 * 1024) + ((19 << 30) - (100 << 20)) // 512
    grown = count_runtime(mixture, 19 << 30) - small
    assert abs(grown - tables - 24 * LAYER_BYTES) < 1 << 20


def test_tokenizers_of_many_tokens_take_memory(demo: ResolvedPlan) -> None:
    shape = demo.model.shape.model_copy(update={"vocab": 151_936})
    wordy = demo.model.model_copy(update={"shape": shape})
    more = count_libraries(wordy) - count_libraries(demo.model)
    assert more == 700 * (151_936 - 4096)
    # Of a file that is there, the bytes count.
    assert count_libraries(wordy, 1000) == count_libraries(demo.model, 1000)


def test_drivers_of_other_units_have_room(demo: ResolvedPlan) -> None:
    alone = count_runtime(demo.model, 1 << 30)
    for kind, size in UNIT_BYTES.items():
        assert count_runtime(demo.model, 1 << 30, units=[kind]) - alone == size
    assert UNIT_BYTES["gpu"] > UNIT_BYTES["npu"] > UNIT_BYTES["cpu"] == 0
