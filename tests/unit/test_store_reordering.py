"""`pi2 store reorder`: the same model with its neurons in another order."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pi2
from pi2.arrays import F32, I32, I64
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.measuring.ordering import order_by_coactivation, reorder_store
from pi2.store.manifest import read_manifest
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from synthesis.additions import add_files
from synthesis.blueprint import draw_blueprint
from synthesis.generation import write_synthetic_store
from synthesis.recipe import Recipe
from tests.helpers.checkpoints import write_counts
from tests.helpers.models import MIXTURE, TinyModel, make_model
from tests.helpers.plans import write_plan

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 256, 12)]


def draw_orders(tiny: TinyModel, seed: int = 7) -> I32:
    return np.random.default_rng(seed).permuted(np.sort(tiny.original), axis=1)


def run_both(plan: Path, store: str) -> list[F32]:
    """Logits of a prompt, and of decoding with the plan's predictor."""
    with pi2.load(plan, set={"weights": store}) as model:
        return [model.logits(TOKENS), model.logits(TOKENS, mode="decode")]


def test_the_model_computes_the_same(tmp_path: Path, tiny: TinyModel) -> None:
    orders = draw_orders(tiny)
    plan = write_plan(tmp_path, tiny)
    reorder_store(tiny.store, orders, "hotness", output=tmp_path / "new")
    with NeuronStore.open(tmp_path / "new", model=tiny.model) as store:
        assert np.array_equal(np.stack([layer.original for layer in store.layers]), orders)
    assert verify_store(tmp_path / "new") == []
    for old, new in zip(run_both(plan, "store"), run_both(plan, "new"), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5 * float(np.abs(old).max()))


def read_predictors(store: NeuronStore, layer: int, experts: int) -> dict[int, bytes]:
    original = store.layers[layer].original
    owners = original * experts // len(original)
    # Expert by expert, in stored order within each.
    neurons = np.concatenate([original[owners == expert] for expert in range(experts)])
    outer = store.tensors[f"layers.{layer}.predictor_out"]
    bias = store.tensors[f"layers.{layer}.predictor_bias"].weights[0]
    assert outer.scales is not None
    return {
        neuron: outer.weights[row].tobytes() + outer.scales[row].tobytes() + bias[row].tobytes()
        for row, neuron in enumerate(neurons.tolist())
    }


def test_predictors_of_experts_follow_their_neurons(tmp_path: Path) -> None:
    model = make_model({"shape": {"layers": 2, "hidden": 128}, **MIXTURE})
    write_synthetic_store(tmp_path / "old", draw_blueprint(model, Recipe(active=0.3, skew=0.4)))
    random = np.random.default_rng(2)
    orders = random.permuted(np.tile(np.arange(4 * 96, dtype=np.int32), (2, 1)), axis=1)
    reorder_store(tmp_path / "old", orders, "coactivation", output=tmp_path / "new")
    with NeuronStore.open(tmp_path / "old") as old, NeuronStore.open(tmp_path / "new") as new:
        for layer in range(2):
            known = read_predictors(old, layer, 4)
            assert len(set(known.values())) == 4 * 96
            assert read_predictors(new, layer, 4) == known


def test_in_place_other_files_stay(tmp_path: Path, tiny: TinyModel) -> None:
    add_files(tiny.store, {"activations.parquet": b"statistics"})
    (tiny.store / "default.plan.toml").write_text("# mine")
    reorder_store(tiny.store, draw_orders(tiny), "coactivation")
    assert (tiny.store / "activations.parquet").read_bytes() == b"statistics"
    assert (tiny.store / "default.plan.toml").read_text() == "# mine"
    assert read_manifest(tiny.store).order == "coactivation"
    assert verify_store(tiny.store) == []
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_an_interrupted_job_goes_on(tmp_path: Path, tiny: TinyModel) -> None:
    orders = draw_orders(tiny)
    before = read_manifest(tiny.store)

    def stop(label: str, share: float) -> None:
        if share > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reorder_store(tiny.store, orders, "hotness", progress=stop)
    assert read_manifest(tiny.store) == before
    written = (tmp_path / ".store.partial" / "layers/ffn-000.arrow").stat().st_ino
    reorder_store(tiny.store, orders, "hotness")
    assert (tiny.store / "layers/ffn-000.arrow").stat().st_ino == written
    assert verify_store(tiny.store) == []


def test_a_damaged_neuron_is_a_finding_and_changes_nothing(tmp_path: Path, tiny: TinyModel) -> None:
    with NeuronStore.open(tiny.store) as store:
        layer = store.layers[1]
        place = layer.bundles_offset + 5 * layer.stride
    file = tiny.store / "layers/ffn-001.arrow"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="P507"):
        reorder_store(tiny.store, draw_orders(tiny), "hotness")
    assert file.read_bytes() == bytes(data)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


# Orders
def write_statistics(folder: Path, counts: I64, pairs: list[tuple[int, int, int, int]]) -> Path:
    folder.mkdir()
    write_counts(folder / "activations.parquet", counts)
    columns = zip(*pairs, strict=True) if pairs else ((), (), (), ())
    names = ("layer", "first", "second", "count")
    values = {name: np.array(column, np.int64) for name, column in zip(names, columns, strict=True)}
    pq.write_table(pa.table(values), folder / "coactivations.parquet")
    return folder


@pytest.mark.parametrize("pair", [(0, 1, 64, 5), (3, 1, 2, 5), (0, -1, 2, 5), (0, 1, 2, -5)])
def test_pairs_of_another_model_are_findings(
    tmp_path: Path, pair: tuple[int, int, int, int]
) -> None:
    stats = write_statistics(tmp_path / "stats", np.ones((1, 64), np.int64), [pair])
    with pytest.raises(UserError, match="P540"):
        order_by_coactivation(stats, 1, 64)


def test_the_command_reorders(tmp_path: Path, tiny: TinyModel) -> None:
    counts = np.random.default_rng(1).integers(0, 99, tiny.original.shape)
    stats = write_statistics(tmp_path / "stats", counts, [(0, 1, 2, 5)])
    command = ["store", "reorder", str(tiny.store), "--statistics", str(stats)]
    assert run([*command, "--by", "coactivation", "-o", str(tmp_path / "new")]) == 0
    assert read_manifest(tmp_path / "new").order == "coactivation"
    assert run([*command, "--by", "hotness"]) == 0
    with NeuronStore.open(tiny.store) as store:
        assert (np.diff(counts[0][store.layers[0].original]) <= 0).all()
    (stats / "coactivations.parquet").unlink()
    assert run([*command, "--by", "coactivation"]) == 2


def test_neurons_lie_another_distance_apart(tmp_path: Path, tiny: TinyModel) -> None:
    old = read_manifest(tiny.store).bundle
    wanted = old.stride + 512
    new = tmp_path / "new"
    assert run(["store", "repack", str(tiny.store), "--stride", f"{wanted} B", "-o", str(new)]) == 0
    assert read_manifest(new).bundle.stride == wanted
    assert verify_store(new) == []
    plan = write_plan(tmp_path, tiny)
    with pi2.load(plan) as model:
        before = model.logits(TOKENS)
    settings = {"weights": "new", "bundle.stride": f"{wanted} B", "memory.segments.cold": "64 KiB"}
    with pi2.load(plan, set=settings) as model:
        assert np.array_equal(model.logits(TOKENS), before)
    with pytest.raises(UserError, match="pi2 store repack") as caught:
        pi2.load(plan, set={"weights": "new"})
    assert caught.value.diagnostics[0].code == "P520"
    reorder_store(new, stride=old.stride)
    assert (new / "layers").exists() and read_manifest(new).bundle.stride == old.stride
    with NeuronStore.open(new) as packed, NeuronStore.open(tiny.store) as first:
        assert np.array_equal(packed.layers[0].bundles, first.layers[0].bundles)


@pytest.mark.parametrize("stride", [0, 64, 700, 1000])
def test_a_distance_that_holds_no_neuron_is_refused(tiny: TinyModel, stride: int) -> None:
    with pytest.raises(UserError, match="is the least") as caught:
        reorder_store(tiny.store, stride=stride)
    assert caught.value.diagnostics[0].code == "P105"
