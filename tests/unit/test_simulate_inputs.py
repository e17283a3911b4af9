"""What is read from plans, devices and models, and what is said of missing figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pi2.costs.constants import Constants
from pi2.costs.description import Description
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.simulate import read_inputs, simulate

PLANS = Path(__file__).parents[2] / "plans"
PAPER = PLANS.parent / "tools/paper/plans"
BAMBOO = PAPER / "oneplus-12/bamboo-7b-half.plan.toml"


def read(path: Path, **overrides: object) -> Description:
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return read_inputs(load_plan(path, overrides=values))


def count_cached(inputs: Description) -> float:
    """Neurons that the cache has room for."""
    return sum(kind.cold * kind.count * kind.activity.neurons for kind in inputs.kinds)


def copy_documents(folder: Path, edit: dict[str, tuple[str, str]]) -> Path:
    """Copy the plan with its device and model; ``edit`` replaces text (pattern, by) by kind."""
    text = BAMBOO.read_text("utf-8")
    for kind, name in (("device", "oneplus-12"), ("model", "bamboo-7b")):
        document = (PLANS / f"{kind}s/{name}.{kind}.toml").read_text("utf-8")
        pattern, by = edit.get(kind, ("^", ""))
        changed, count = re.subn(pattern, by, document, flags=re.DOTALL)
        assert count, f"{pattern} is not in {name}"
        (folder / f"{name}.{kind}.toml").write_text(changed, "utf-8")
        text = text.replace(f'{kind} = "{name}"', f'{kind} = "{name}.{kind}.toml"')
    path = folder / BAMBOO.name
    path.write_text(text, "utf-8")
    return path


class TestShippedPlan:
    def test_rates_are_the_device_s(self) -> None:
        rates = read(BAMBOO).rates
        assert rates.dense is not None and rates.flash is not None
        assert (rates.bandwidth_bytes_s, rates.dense.bytes_s) == (43.9e9, 56e9)
        assert rates.shared_bytes_s == 59.6e9
        assert {point.core for point in rates.flash.points} == {"big", None}

    def test_sizes_are_those_of_the_fact_sheet(self) -> None:
        inputs = read(BAMBOO)
        sizes, layers = inputs.sizes, inputs.layers
        assert layers * sizes.projections / 1e9 == pytest.approx(0.75, abs=0.01)
        neurons = layers * inputs.kinds[0].activity.neurons * sizes.neuron / 1e9
        assert neurons == pytest.approx(3.17, abs=0.01)
        assert layers * sizes.predictor / 1e9 == pytest.approx(0.42, abs=0.01)

    def test_the_plan_decides_shares_threads_and_cache(self) -> None:
        inputs = read(BAMBOO)
        assert [(kind.dense, kind.hot) for kind in inputs.kinds] == [(0.45, 0.45)]
        reads = inputs.settings.reads
        assert reads is not None
        assert (inputs.settings.threads, reads.threads) == (5, 1)
        assert count_cached(inputs) == pytest.approx(173 * 2**20 / 8192)

    def test_the_cache_has_what_the_context_lends_and_rows_are_read(self) -> None:
        changed = read(BAMBOO, kv__lend=True, memory__embedding="flash")
        plain = read(BAMBOO)
        lent = (count_cached(changed) - count_cached(plain)) * plain.sizes.stride
        assert 200 * 2**20 < lent < 256 * 2**20
        assert plain.embedding_s == 0.0
        assert changed.embedding_s == pytest.approx(2 * 70e-6)

    def test_keys_and_values_are_as_large_as_their_type(self) -> None:
        sizes = {
            kind: read(
                BAMBOO, kv__type=kind, kv__context=512, memory__segments__kv="256 MiB"
            ).sizes.kv_token
            for kind in ("fp32", "fp16", "int8")
        }
        assert sizes == {"fp32": 2 * 8 * 128 * 4, "fp16": 2 * 8 * 128 * 2, "int8": 2 * 8 * 130}

    def test_two_phases_read_two_blocks_and_one_phase_one_bundle(self) -> None:
        two = read(BAMBOO, pipeline__phases=2).settings.reads
        assert two is not None and two.phases is not None
        assert two.phases.gate_bytes == 4096
        assert two.read_bytes == 4096 * (1.0 + Constants().up_down_share)
        one = read(BAMBOO, pipeline__phases=1).settings.reads
        assert one is not None
        assert (one.phases, one.read_bytes) == (None, 8192)

    def test_every_figure_says_where_it_is_from(self) -> None:
        inputs = read(BAMBOO)
        assert all(figure.status and figure.source for figure in inputs.figures)
        assert inputs.count_statuses()["published"] >= 10

    def test_layers_with_the_same_settings_are_taken_together(self) -> None:
        overrides = [{"select": "0-7", "hot": 0.3, "split": {"npu": 0.3, "cpu": 0.7}}]
        layers = read(BAMBOO, layers__overrides=overrides).kinds
        assert [(layer.dense, layer.hot, layer.count) for layer in layers] == [
            (0.3, 0.3, 8),
            (0.45, 0.45, 24),
        ]


class TestPrediction:
    def test_a_low_rank_predictor_names_more_neurons_than_are_active(self) -> None:
        active = read(BAMBOO).kinds[0].activity.named.active
        assert active == pytest.approx(0.10 * 1.5, rel=0.01)

    def test_more_active_neurons_are_never_faster(self, tmp_path: Path) -> None:
        speeds = []
        for share in (0.10, 0.18, 0.25, 0.28, 0.35, 0.6):
            edit = {"model": (r"active = 0\.10", f"active = {share}")}
            speeds.append(
                simulate(read_inputs(load_plan(copy_documents(tmp_path, edit))), tokens=32)
            )
        found = [item.tokens_s for item in speeds]
        assert found == sorted(found, reverse=True)
        assert found[0] > 1.1 * found[1] > 1.1 * found[2]

    def test_without_a_predictor_every_neuron_is_computed(self) -> None:
        inputs = read(BAMBOO, decode__predictor="none")
        assert inputs.kinds[0].activity.named.active == 1.0
        assert inputs.sizes.predictor == 0.0
        assert not inputs.settings.is_predicted


class TestMissingFigures:
    def find(self, path: Path) -> list[str]:
        with pytest.raises(UserError) as caught:
            read(path)
        assert caught.value.exit_code == 2
        assert {item.code for item in caught.value.diagnostics} == {"P330"}
        assert all(item.help for item in caught.value.diagnostics)
        return [item.message for item in caught.value.diagnostics]

    def test_the_demo_s_own_machine_states_nothing(self) -> None:
        messages = self.find(PLANS / "demo.plan.toml")
        assert any("units.cpu.read_bandwidth" in message for message in messages)
        assert any("storage.reads" in message for message in messages)

    def test_a_plan_that_reads_nothing_needs_no_flash_figures(self) -> None:
        path = PAPER / "x86-laptop/prosparse-llama-2-7b.plan.toml"
        inputs = read(path)
        assert inputs.settings.reads is None
        assert simulate(inputs, tokens=2).decode.read_bytes.sum() == 0.0

    def test_reads_of_one_pattern_are_not_enough(self, tmp_path: Path) -> None:
        random = r'\[\[storage\.reads\]\][^\[]*?pattern = "random".*?(?=\n\[|\Z)'
        messages = self.find(copy_documents(tmp_path, {"device": (random, "")}))
        assert [m for m in messages if "random" in m]

    def test_a_bandwidth_is_estimated_from_the_memory_s_peak(self, tmp_path: Path) -> None:
        edit = {"device": (r"\[units.cpu.read_bandwidth\].*?\n\n", "")}
        inputs = read(copy_documents(tmp_path, edit))
        constants = inputs.rates.constants
        # A phone on which nobody saw a model run, in a run that reads all the time.
        share = constants.arm_of_peak * constants.warm_core_share
        assert inputs.rates.bandwidth_bytes_s == pytest.approx(share * 76.8e9, rel=0.01)
        assert any(
            figure.name == "memory.peak_bandwidth" and figure.status == "estimated"
            for figure in inputs.figures
        )

    def test_without_a_peak_the_bandwidth_is_missing(self, tmp_path: Path) -> None:
        pattern = r"\[units.cpu.read_bandwidth\].*?\n\n|\[memory.peak_bandwidth\].*?\n\n"
        messages = self.find(copy_documents(tmp_path, {"device": (pattern, "")}))
        assert ["units.cpu.read_bandwidth" in message for message in messages] == [True]


def test_two_units_beside_the_cpu_are_refused() -> None:
    split = {"cpu": 0.4, "npu": 0.3, "gpu": 0.3}
    backends = {"cpu": "null", "npu": "null", "gpu": "null"}
    with pytest.raises(UserError) as caught:
        read(BAMBOO, layers__split=split, backends=backends)
    assert "P262" in {item.code for item in caught.value.diagnostics}


def test_another_unit_in_other_layers_is_refused() -> None:
    backends = {"cpu": "null", "npu": "null", "gpu": "null"}
    others = [{"select": "0-3", "split": {"cpu": 0.7, "gpu": 0.3}}]
    with pytest.raises(UserError) as caught:
        read(BAMBOO, layers__overrides=others, backends=backends)
    (finding,) = caught.value.diagnostics
    assert (finding.code, "gpu, npu" in finding.message) == ("P331", True)


def test_the_split_of_the_plan_s_sequences_counts() -> None:
    batches = [{"sequences": 2, "split": {"npu": 0.3, "cpu": 0.7}}]
    for batch, share in ((1, 0.45), (2, 0.3), (3, 0.3)):
        settings = {"layers__batches": batches if batch > 1 else [], "decode__batch": batch}
        segments = {"memory__segments__hot": "4 GiB", "memory__segments__kv": "1 GiB"}
        room = {**segments, "memory__budget": "12 GB"}
        (layer,) = read(BAMBOO, **settings, **room).kinds
        assert (layer.dense, layer.hot) == (share, 0.45)


def test_what_is_taken_to_be_otherwise_than_the_engine_has_it_is_said() -> None:
    assert read(BAMBOO).assumptions == ()
    named = read(
        BAMBOO, prefill__unit="gpu", backends={"cpu": "null", "npu": "null", "gpu": "null"}
    )
    (said,) = named.assumptions
    assert said == "cpu computes prompts; gpu does in pi2's engine"
    assert said in simulate(named, tokens=2).summarise()
    assert simulate(named, tokens=2).describe()["assumptions"] == [said]
    alone = read(PAPER / "x86-laptop/prosparse-llama-2-7b.plan.toml")
    assert alone.assumptions == ()
