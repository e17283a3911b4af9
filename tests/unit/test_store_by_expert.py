"""Neuron stores of mixtures ordered by expert, and statistics that are of another model."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import pi2
from pi2.arrays import I32
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.importing.conversion_job import EXPERT_BANDS, group_experts, note_identity
from pi2.measuring.ordering import choose_orders, reorder_store
from pi2.plan.documents.model import Model
from pi2.store.manifest import read_manifest
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from synthesis.blueprint import draw_blueprint
from synthesis.generation import write_synthetic_store
from synthesis.recipe import Recipe
from tests.helpers.checkpoints import write_counts
from tests.helpers.models import MIXTURE, TinyModel, make_model, make_tiny
from tests.helpers.plans import write_plan

EXPERTS, FFN = 4, 256
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 256, 6)]


@pytest.fixture(scope="module")
def mixture() -> Model:
    return make_model({"shape": {"layers": 2, "hidden": 128, "ffn": FFN}, **MIXTURE})


@pytest.fixture(scope="module")
def by_hotness(tmp_path_factory: pytest.TempPathFactory, mixture: Model) -> Path:
    store = tmp_path_factory.mktemp("mixture") / "store"
    write_synthetic_store(store, draw_blueprint(mixture, Recipe(active=0.3, skew=0.4)))
    return store


@pytest.fixture
def store(tmp_path: Path, by_hotness: Path) -> Path:
    return Path(shutil.copytree(by_hotness, tmp_path / "store"))


def read_orders(path: Path) -> I32:
    with NeuronStore.open(path) as store:
        return np.stack([layer.original for layer in store.layers])


def test_in_every_band_of_hotness_an_expert_lies_together() -> None:
    order = np.random.default_rng(1).permutation(EXPERTS * FFN).astype(np.int32)
    grouped = group_experts(order, FFN)
    size = len(order) // EXPERT_BANDS
    rank = np.argsort(order)
    for band in range(EXPERT_BANDS):
        mine = grouped[band * size : (band + 1) * size]
        assert sorted(mine) == sorted(order[band * size : (band + 1) * size])
        owners = mine // FFN
        assert (np.diff(owners) >= 0).all()
        for expert in range(EXPERTS):
            # The most active first.
            assert (np.diff(rank[mine[owners == expert]]) > 0).all()


def test_the_command_groups_a_store_by_hotness_without_statistics(store: Path) -> None:
    wanted = np.stack([group_experts(order, FFN) for order in read_orders(store)])
    dense = (store / "dense.arrow").stat().st_ino
    assert run(["store", "reorder", str(store), "--by", "expert"]) == 0
    assert read_manifest(store).order == "expert"
    assert np.array_equal(read_orders(store), wanted)
    assert verify_store(store) == []
    # What does not change is not written again.
    assert (store / "dense.arrow").stat().st_ino == dense


def test_a_model_by_expert_computes_and_names_the_same(
    tmp_path: Path, store: Path, mixture: Model
) -> None:
    reorder_store(store, choose_orders(store, "expert", None), "expert", output=tmp_path / "new")
    tiny = TinyModel(model=mixture, store=store, weights={}, original=read_orders(store))
    plan = write_plan(tmp_path, tiny)
    found = []
    for name in ("store", "new"):
        with pi2.load(plan, set={"weights": name, "memory.segments.cold": "64 KiB"}) as model:
            logits = model.logits(TOKENS, mode="decode")
            stats = model.stats
            found.append((logits, stats.predicted_neurons, stats.active_neurons or 0))
    (old, *counted), (new, *counted_anew) = found
    assert counted == counted_anew and counted[0] > 0
    np.testing.assert_allclose(new, old, atol=1e-5 * float(np.abs(old).max()))


def test_a_store_is_made_by_expert_as_one_is_reordered(
    tmp_path: Path, store: Path, mixture: Model
) -> None:
    reorder_store(store, choose_orders(store, "expert", None), "expert")
    blueprint = draw_blueprint(mixture, Recipe(active=0.3, skew=0.4))
    write_synthetic_store(tmp_path / "made", blueprint, order="expert")
    assert read_manifest(tmp_path / "made") == read_manifest(store)


def test_order_that_says_nothing_of_hotness_needs_statistics(tmp_path: Path, store: Path) -> None:
    orders = np.sort(read_orders(store))
    reorder_store(store, orders, "index")
    with pytest.raises(UserError, match=r"P524.*order is by index"):
        choose_orders(store, "expert", None)
    counts = np.random.default_rng(2).integers(0, 99, orders.shape)
    file = write_counts(tmp_path / "counts.parquet", counts)
    wanted = [
        group_experts(np.argsort(-row, kind="stable").astype(np.int32), FFN) for row in counts
    ]
    assert np.array_equal(choose_orders(store, "expert", file), np.stack(wanted))


def test_other_orders_need_statistics(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "reorder", str(store), "--by", "hotness"]) == 2
    assert "needs --statistics" in capsys.readouterr().err


# Statistics of another model


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two stores of one shape and name, of other weights."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    one, two = (make_tiny(folder, seed=seed).store for seed, folder in enumerate(folders))
    return one, two


def note(store: Path) -> dict[str, str]:
    with NeuronStore.open(store) as opened:
        return note_identity(opened)


def test_statistics_of_other_weights_are_refused(tmp_path: Path, others: tuple[Path, Path]) -> None:
    one, two = others
    before = read_manifest(two)
    counts = np.random.default_rng(2).integers(0, 99, (3, 96))
    file = write_counts(tmp_path / "counts.parquet", counts, note(one))
    command = ["store", "reorder", "--by", "hotness", "--statistics", str(file), "-o"]
    assert run([*command, str(tmp_path / "new"), str(two)]) == 2
    assert not (tmp_path / "new").exists() and read_manifest(two) == before
    with pytest.raises(UserError, match=r"P540.*of another 'tiny', by its weights"):
        choose_orders(two, "hotness", file)
    assert choose_orders(one, "hotness", file).shape == (3, 96)


def test_statistics_of_a_model_are_good_for_its_store_in_any_order(
    tmp_path: Path, others: tuple[Path, Path]
) -> None:
    one, _ = others
    mine = note(one)
    reorder_store(one, np.sort(read_orders(one)), "index", output=tmp_path / "new")
    assert note(tmp_path / "new") == mine


def test_a_folder_whose_summary_names_another_model_is_refused(
    tmp_path: Path, others: tuple[Path, Path]
) -> None:
    counts = np.random.default_rng(2).integers(0, 99, (3, 96))
    write_counts(tmp_path / "activations.parquet", counts)
    summary = '{"model": "other", "job": "", "tokens": 1, "active": 0, "skew": 0, "layers": []}'
    (tmp_path / "statistics.json").write_text(summary)
    with pytest.raises(UserError, match=r"P540.*of model 'other'"):
        choose_orders(others[0], "hotness", tmp_path)
    (tmp_path / "statistics.json").write_text(summary.replace("other", "tiny"))
    assert choose_orders(others[0], "hotness", tmp_path).shape == (3, 96)


def test_pairs_of_other_weights_are_refused(tmp_path: Path, others: tuple[Path, Path]) -> None:
    one, two = others
    counts = np.random.default_rng(2).integers(0, 99, (3, 96))
    write_counts(tmp_path / "activations.parquet", counts, note(one))
    write_counts(tmp_path / "coactivations.parquet", counts, note(two))
    with pytest.raises(UserError, match=r"P540.*coactivations.parquet"):
        choose_orders(one, "coactivation", tmp_path)
