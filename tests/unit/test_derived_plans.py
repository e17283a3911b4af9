"""Plans state wishes; what they leave out is derived, shown with its reason, and derived anew."""

from pathlib import Path

import pytest

from pi2.cli.main import run
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.reading.references import find_shipped_folder
from pi2.refit import FittedPlan, read_plan
from tests.helpers.slow import mark_slow
from tests.unit.test_checkpoint_models import write_model

STORE = find_shipped_folder() / "stores" / "pi2-demo"
MIB = 2**20


def write_plan(folder: Path, text: str, model: str = "pi2-demo", device: str = "host") -> Path:
    path = folder / "my.plan.toml"
    store = STORE if model == "pi2-demo" else "store"
    head = f'schema_version = 3\ndevice = "{device}"\nmodel = "{model}"\nweights = "{store}"\n'
    path.write_text(head + text)
    return path


def read(path: Path, memory: int | None = None, **settings: object) -> FittedPlan:
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    return read_plan(path, overrides=overrides, memory_bytes=memory)


def add_up(plan: ResolvedPlan) -> int:
    return sum(size for _, size in plan.plan.memory.segments)


def test_what_is_stated_is_kept(tmp_path: Path) -> None:
    path = write_plan(
        tmp_path,
        '[memory]\nbudget = "126 MiB"\nsegments = { runtime = "100 MiB", cold = "1 MiB" }\n'
        "[layers]\nhot = 0.125\n",
    )
    found = read(path).resolved
    segments = found.plan.memory.segments
    assert (segments.runtime, segments.cold) == (100 * MIB, MIB)
    assert found.plan.layers.hot == 0.125
    assert segments.hot == found.needs.hot.bytes
    assert ("memory", "segments", "hot") in found.derived
    assert ("memory", "segments", "cold") not in found.derived


def test_a_stated_segment_of_hot_neurons_says_how_many_are_hot(tmp_path: Path) -> None:
    path = write_plan(
        tmp_path, '[memory]\nbudget = "126 MiB"\nsegments = { hot = "1 MiB", runtime = "87 MiB" }\n'
    )
    found = read(path).resolved
    assert found.needs.hot.bytes <= MIB
    assert 0.2 < found.plan.layers.hot <= 0.25


def test_another_budget_is_fitted_anew_and_leaves_what_is_stated(tmp_path: Path) -> None:
    path = write_plan(tmp_path, '[memory]\nbudget = "126 MiB"\nsegments = { runtime = "96 MiB" }\n')
    found = read(path, memory=110 * MIB).resolved
    assert found.plan.memory.segments.runtime == 96 * MIB
    assert add_up(found) <= found.plan.memory.budget == 110 * MIB
    assert found.plan.layers.hot < 1.0


def test_a_budget_may_be_a_share_of_the_memory(tmp_path: Path) -> None:
    path = write_plan(tmp_path, '[memory]\nbudget = "40 %"\n', "bamboo-7b", "oneplus-12")
    found = read(path).resolved
    memory = found.device.memory
    assert memory is not None
    whole = memory.usable or memory.capacity or 0
    assert whole * 0.4 - MIB < found.plan.memory.budget <= whole * 0.4
    assert found.derived["memory", "budget"].startswith("40 % of ")


def test_a_plan_without_a_budget_keeps_all_in_memory(tmp_path: Path) -> None:
    found = read(write_plan(tmp_path, "")).resolved
    assert found.plan.layers.hot == 1.0
    assert add_up(found) <= found.plan.memory.budget


@pytest.mark.parametrize("device", ["oneplus-12", "oneplus-ace-2"])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", mark_slow("turbosparse-mixtral-47b")])
def test_a_mixture_on_a_phone_needs_no_more(tmp_path: Path, device: str, model: str) -> None:
    path = write_plan(tmp_path, '[memory]\nbudget = "9 GiB"\n', model, device)
    assert run(["validate", str(path), "--strict"]) == 0
    assert run(["simulate", str(path)]) == 0
    found = read(path).resolved
    assert found.plan.decode.predictor == ("router" if model.startswith("qwen3") else "low-rank")
    assert add_up(found) <= found.plan.memory.budget


def test_units_that_are_given_work_have_their_usual_backends(tmp_path: Path) -> None:
    text = '[memory]\nbudget = "4 GiB"\n[layers]\nsplit = { npu = 0.3, cpu = 0.7 }\n'
    found = read(write_plan(tmp_path, text, "bamboo-7b", "oneplus-12")).resolved
    assert dict(found.plan.backends) == {"cpu": "cpu", "npu": "hexagon"}
    assert found.plan.layers.split == {"npu": 0.3, "cpu": 0.7}


def test_the_shortest_plan_of_a_store_has_the_store_s_model(tmp_path: Path) -> None:
    path = tmp_path / "my.plan.toml"
    path.write_text(f'schema_version = 3\nweights = "{STORE}"\nmemory.budget = "128 MiB"\n')
    resolved = read(path).resolved
    assert (resolved.model.id, resolved.device.id) == ("pi2-demo", "host")
    assert resolved.derived[("model",)] == "the store's model"
    digest = resolved.digest
    path.write_text(path.read_text().replace("128 MiB", "160 MiB"))
    assert read(path).resolved.digest == digest, "the room decides nothing that is computed"


@pytest.mark.parametrize(
    ("quality", "model", "settings"),
    [
        ("exact", "bamboo-7b", {"decode.predictor": "gate"}),
        ("exact", "qwen3-30b-a3b", {"decode.predictor": "router", "kv.type": "fp16"}),
        ("near", "bamboo-7b", {"decode.predictor": "low-rank", "decode.leave_out": None}),
        ("fast", "bamboo-7b", {"decode.leave_out": 0.02, "kv.type": "int8"}),
        ("fast", "qwen3-30b-a3b", {"experts.prefer_cached": 0.2}),
        ("fast", "llama-2-7b", {"prefill.activations": "int8", "decode.predictor": "none"}),
    ],
)
def test_quality_is_a_name_for_settings(
    tmp_path: Path, quality: str, model: str, settings: dict[str, object]
) -> None:
    text = f'quality = "{quality}"\nmemory.budget = "8 GiB"\n'
    resolved = read(write_plan(tmp_path, text, model, "oneplus-12")).resolved
    for key, value in settings.items():
        table, _, name = key.partition(".")
        assert getattr(getattr(resolved.plan, table), name) == value, key


def test_a_stated_setting_counts_before_quality(tmp_path: Path) -> None:
    text = 'quality = "fast"\nkv.type = "fp16"\nmemory.budget = "8 GiB"\n'
    resolved = read(write_plan(tmp_path, text, "bamboo-7b", "oneplus-12")).resolved
    assert resolved.plan.kv.type == "fp16"
    assert resolved.derived[("decode", "leave_out")] == 'quality = "fast"'


def test_weights_may_be_a_file_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is not imported."""
    pytest.importorskip("gguf")
    package = tmp_path / "some_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError\n")
    write_model(package, "tiny", kind="Q4_1").rename(package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "my.plan.toml"
    path.write_text('schema_version = 3\nweights = "package:some_weights/tiny.gguf"\n')
    found = read(path).resolved
    assert found.file is not None and found.file.path == package / "tiny.gguf"
