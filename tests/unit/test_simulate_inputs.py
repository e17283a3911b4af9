"""What is read from plans, devices and models, and what is said of missing figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pi2.diagnostics import UserError
from pi2.plan.resolve import load_plan
from pi2.simulate import SimulationInput, read_inputs, simulate
from pi2.simulate.constants import Constants

PLANS = Path(__file__).parents[2] / "plans"
BAMBOO = PLANS / "oneplus-12/bamboo-7b-half.plan.toml"


def read(path: Path, **overrides: object) -> SimulationInput:
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return read_inputs(load_plan(path, overrides=values))


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
        machine = read(BAMBOO).machine
        assert (machine.cpu_bytes_s, machine.dense_bytes_s) == (43.9e9, 56e9)
        assert machine.shared_bytes_s == 59.6e9
        assert machine.io_core == "big"

    def test_sizes_are_those_of_the_fact_sheet(self) -> None:
        workload = read(BAMBOO).workload
        gigabytes = workload.layers * workload.attention_bytes / 1e9
        assert gigabytes == pytest.approx(0.75, abs=0.01)
        neurons = workload.layers * workload.ffn * workload.neuron_bytes / 1e9
        assert neurons == pytest.approx(3.17, abs=0.01)
        assert workload.layers * workload.predictor_bytes / 1e9 == pytest.approx(0.42, abs=0.01)

    def test_the_plan_decides_shares_threads_and_cache(self) -> None:
        choices = read(BAMBOO).choices
        assert [(layer.dense, layer.hot) for layer in choices.layers] == [(0.45, 0.45)]
        assert (choices.compute_threads, choices.io_threads) == (5, 1)
        assert choices.cold_neurons == 173 * 2**20 / 8192

    def test_the_cache_has_what_the_context_lends_and_rows_are_read(self) -> None:
        changed = read(BAMBOO, kv__lend=True, memory__embedding="flash").choices
        plain = read(BAMBOO).choices
        lent = (changed.cold_neurons - plain.cold_neurons) * plain.stride_bytes
        assert 200 * 2**20 < lent < 256 * 2**20
        assert plain.embedding_s == 0.0
        assert changed.embedding_s == pytest.approx(2 * 70e-6)

    def test_keys_and_values_are_as_large_as_their_type(self) -> None:
        sizes = {
            kind: read(
                BAMBOO, kv__type=kind, kv__context=512, memory__segments__kv="256 MiB"
            ).workload.kv_token_bytes
            for kind in ("fp32", "fp16", "int8")
        }
        assert sizes == {"fp32": 2 * 8 * 128 * 4, "fp16": 2 * 8 * 128 * 2, "int8": 2 * 8 * 130}

    def test_two_phases_read_two_blocks_and_one_phase_one_bundle(self) -> None:
        two = read(BAMBOO, pipeline__phases=2).choices
        assert (two.gate_read_bytes, two.rest_read_bytes) == (4096, 4096)
        one = read(BAMBOO, pipeline__phases=1).choices
        assert (one.gate_read_bytes, one.rest_read_bytes) == (8192, 0)

    def test_every_figure_says_where_it_is_from(self) -> None:
        inputs = read(BAMBOO)
        assert all(figure.status and figure.source for figure in inputs.figures)
        assert inputs.count_statuses()["published"] >= 10

    def test_layers_with_the_same_settings_are_taken_together(self) -> None:
        overrides = [{"select": "0-7", "hot": 0.3, "split": {"npu": 0.3, "cpu": 0.7}}]
        layers = read(BAMBOO, layers__overrides=overrides).choices.layers
        assert [(layer.dense, layer.hot, layer.count) for layer in layers] == [
            (0.3, 0.3, 8),
            (0.45, 0.45, 24),
        ]


class TestPrediction:
    def test_a_low_rank_predictor_names_more_neurons_than_are_active(self) -> None:
        active = read(BAMBOO).workload.active
        assert active == pytest.approx(0.10 * Constants().named_per_active)

    def test_without_a_predictor_every_neuron_is_computed(self) -> None:
        inputs = read(BAMBOO, decode__predictor="none")
        assert inputs.workload.active == 1.0
        assert inputs.workload.predictor_bytes == 0.0
        assert not inputs.choices.predicted


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
        path = PLANS / "x86-laptop/prosparse-llama-2-7b.plan.toml"
        inputs = read(path)
        assert inputs.machine.flash is None
        assert simulate(inputs, tokens=2).decode.read_bytes.sum() == 0.0
        with pytest.raises(UserError):
            read(path, pipeline__policy="mmap")

    def test_reads_of_one_pattern_are_not_enough(self, tmp_path: Path) -> None:
        random = r'\[\[storage\.reads\]\][^\[]*?pattern = "random".*?(?=\n\[|\Z)'
        messages = self.find(copy_documents(tmp_path, {"device": (random, "")}))
        assert [m for m in messages if "random" in m]

    def test_a_bandwidth_is_estimated_from_the_memory_s_peak(self, tmp_path: Path) -> None:
        edit = {"device": (r"\[units.cpu.read_bandwidth\].*?\n\n", "")}
        inputs = read(copy_documents(tmp_path, edit))
        assert inputs.machine.cpu_bytes_s == pytest.approx(43.9e9, rel=0.01)
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
        (layer,) = read(BAMBOO, **settings, **room).choices.layers
        assert (layer.dense, layer.hot) == (share, 0.45)


def test_what_is_taken_to_be_otherwise_than_the_engine_has_it_is_said() -> None:
    said = read(BAMBOO).assumptions
    assert ["projections" in said[0], 'unless prefill.unit = "npu"' in said[1]] == [True, True]
    named = read(BAMBOO, prefill__unit="npu")
    assert named.assumptions == said[:1]
    assert said[0] in simulate(named, tokens=2).summarise()
    assert simulate(named, tokens=2).describe()["assumptions"] == [said[0]]
    alone = read(PLANS / "x86-laptop/prosparse-llama-2-7b.plan.toml")
    assert alone.assumptions == ()
