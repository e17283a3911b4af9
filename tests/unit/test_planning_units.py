"""`pi2 plan` for devices with several units: shares, hot neurons and memories agree."""

from collections.abc import Iterable
from pathlib import Path

import pytest

import pi2
from pi2.cli.main import run
from pi2.fitting import count_unit_needs, describe_unit
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
GPU = ("--device", "small-card.device.toml")
PHONE = ("--device", "oneplus-12", "--memory", "5GiB")


@pytest.fixture(autouse=True)
def folder_with_a_small_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the test has a PC whose card has no room for the whole model."""
    text = (ROOT / "plans/devices/pc-rtx-4090.device.toml").read_text()
    assert 'capacity = "24 GiB"' in text
    text = text.replace('capacity = "24 GiB"', 'capacity = "3900 MiB"')
    text = text.replace('id = "pc-rtx-4090"', 'id = "small-card"')
    (tmp_path / "small-card.device.toml").write_text(text)
    monkeypatch.chdir(tmp_path)


def write(folder: Path, *wish: str) -> ResolvedPlan:
    """Plan for a 7B; loading checks every rule."""
    path = folder / "my.plan.toml"
    arguments = ["plan", "--model", "bamboo-7b", "--context", "512", *wish, "-o", str(path)]
    assert run([*arguments, "--force"]) == 0
    return load_plan(path)


@in_table
def test_a_plan_for_several_units_validates_and_runs_dry(
    wish: Iterable[str], tmp_path: Path, ask: Ask
) -> None:
    resolved = write(tmp_path, *wish)
    assert "no findings" in ask(["validate", str(resolved.path)]).err
    (unit,) = resolved.dense_units
    for layer in resolved.layers:
        assert layer.dense is not None and 0 < layer.dense.kept <= layer.hot_neurons
    kind = resolved.device.units[unit].kind
    with pi2.load(resolved.path, set={"backends": {"cpu": "null", kind: "null"}}) as model:
        assert len(model.generate("Hello", max_tokens=2).result.token_ids) == 2


def test_neurons_of_a_unit_in_main_memory_are_part_of_the_segment_hot(tmp_path: Path) -> None:
    resolved = write(tmp_path, *PHONE)
    assert resolved.plan.memory.units == {}
    own = sum(len(layer.own_hot) for layer in resolved.layers)
    need = count_unit_needs(resolved)["npu"].bytes
    assert need > 0
    assert resolved.needs.hot.bytes == own * resolved.bundle.stride + need
    assert 0 <= resolved.plan.memory.segments.hot - resolved.needs.hot.bytes < MIB


def test_a_gpu_has_all_hot_neurons_that_it_is_faster_with(tmp_path: Path) -> None:
    plans = [write(tmp_path, *GPU, "--memory", f"{size} MiB") for size in (6600, 3600, 2800)]
    shares = [item.layers[0].split["gpu"] for item in plans]
    assert shares == sorted(shares) and shares[0] > 0.9
    for resolved in plans:
        own, hot = resolved.plan.memory.units["gpu"].budget, resolved.plan.memory.segments.hot
        need = count_unit_needs(resolved)["gpu"].bytes
        assert need <= own < need + MIB
        share = describe_unit(resolved, "gpu").share
        assert share is not None
        bundle, kept = share.bundle, sum(share.neurons)
        others = resolved.model.layer_neurons * len(resolved.layers) - kept
        every = kept * bundle.used_bytes + others * bundle.stride
        # The GPU needs room for inputs, sums and neurons on their way, too.
        assert every <= own + hot < every + 48 * MIB, "each neuron is in one of the memories"


def test_the_gpu_gets_no_more_than_it_may_have(tmp_path: Path) -> None:
    wish = (*GPU, "--memory", "5472 MiB")
    free = write(tmp_path, *wish)
    limited = write(tmp_path, *wish, "--unit-memory", "gpu=200 MiB")
    assert count_unit_needs(free)["gpu"].bytes > 200 * MIB
    assert limited.plan.memory.units["gpu"].budget == 200 * MIB
    assert 190 * MIB < count_unit_needs(limited)["gpu"].bytes <= 200 * MIB


@pytest.mark.parametrize("size", ["cpu=1GiB", "tpu=1GiB", "gpu=1TiB", "gpu", "gpu=much"])
def test_memory_of_units_that_do_not_have_it_is_refused(size: str, ask: Ask) -> None:
    wish = ["plan", *GPU, "--model", "bamboo-7b", "--memory", "4GiB", "--unit-memory", size]
    assert "error[P105]: --unit-memory" in ask(wish, 2).err
