"""Devices, models and plans that come with pi2 say what their sources say."""

from pathlib import Path

import pytest

from pi2.backends.hexagon import backend as hexagon
from pi2.fitting import describe_unit
from pi2.fitting.check import check_file, load_plan
from pi2.model.blocks import list_attention
from pi2.model.tensors import list_tensors
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import TOKENS_TOGETHER, count_ffn_bytes
from pi2.plan.documents.device import ReadFigure
from pi2.plan.documents.model import Model
from pi2.plan.documents.private import walk_figures
from tests.helpers.shipped_plans import read_device, read_model
from tools.list_devices import DOCUMENT, read_devices, render_document

REPOSITORY = Path(__file__).parents[2]
PLANS = REPOSITORY / "plans"
DEVICES = sorted(PLANS.glob("devices/*.device.toml"))
MODELS = sorted(PLANS.glob("models/*.model.toml"))
PAPER = REPOSITORY / "tools" / "paper" / "plans"
PLAN_FILES = sorted([*PLANS.glob("*/*.plan.toml"), *PAPER.glob("*/*.plan.toml")])
PHONES = ("oneplus-12", "oneplus-ace-2")
MIB = 2**20


def name_file(path: Path) -> str:
    return str(path.relative_to(path.parents[1]))


def read_plan(name: str) -> ResolvedPlan:
    found = (folder / f"{name}.plan.toml" for folder in (PLANS, PAPER))
    return load_plan(next(path for path in found if path.exists()))


class TestEveryFile:
    def test_there_are_the_devices_that_users_were_promised(self) -> None:
        names = {path.name.removesuffix(".device.toml") for path in DEVICES}
        phones = {"oneplus-12", "oneplus-ace-2", "oneplus-ace-3", "pixel-8", "pixel-9"}
        phones |= {"galaxy-s24-ultra", "xiaomi-14", "vivo-x100"}
        others = {"raspberry-pi-5", "x86-laptop", "apple-m1-max", "pc-rtx-4090", "pc-rtx-2080-ti"}
        others |= {"server-h200", "laptop-ryzen-7840u", "laptop-core-ultra-155h"}
        hosts = {"host", "host-two-units", "host-opencl", "host-webgpu", "host-cuda"}
        hosts |= {"host-npu"}
        assert phones | others | hosts | {"cloud-vm-zen5"} == names


class TestDeviceFigures:
    @pytest.mark.parametrize("path", DEVICES, ids=name_file)
    def test_every_figure_says_where_it_comes_from(self, path: Path) -> None:
        for _, figure in walk_figures(check_file(path).document):
            assert len(figure.source) >= len("direct reads")

    def test_only_the_authors_machine_was_measured(self) -> None:
        for device in read_devices():
            measured = [f for _, f in walk_figures(device) if f.status == "measured"]
            assert bool(measured) == (device.id == "cloud-vm-zen5"), device.id

    def test_no_unit_reads_faster_than_all_together_or_than_the_interface(self) -> None:
        for device in read_devices():
            memory = device.memory
            limits = [memory.read_bandwidth, memory.peak_bandwidth]
            ceiling = min((figure.value for figure in limits if figure is not None), default=None)
            for unit in device.units.values():
                if ceiling is not None and unit.read_bandwidth is not None and not unit.memory:
                    assert unit.read_bandwidth.value <= ceiling, device.id

    def test_larger_reads_are_not_slower(self) -> None:
        for device in read_devices():
            for pattern in ("sequential", "random"):
                best: dict[int, float] = {}
                for read in device.storage.reads:
                    if read.pattern == pattern:
                        best[read.block] = max(read.rate, best.get(read.block, 0.0))
                rates = [best[block] for block in sorted(best)]
                assert rates == sorted(rates), (device.id, pattern)

    def test_phones_clusters_are_those_of_their_chips(self) -> None:
        cores = {
            "oneplus-12": (1, 5, 2), "galaxy-s24-ultra": (1, 5, 2), "xiaomi-14": (1, 5, 2),
            "oneplus-ace-2": (1, 3, 4), "oneplus-ace-3": (1, 2, 2, 3), "pixel-8": (1, 4, 4),
            "pixel-9": (1, 3, 4), "vivo-x100": (1, 3, 4),
        }  # fmt: skip
        for name, counts in cores.items():
            clusters = read_device(name).units["cpu"].clusters
            assert tuple(cluster.cores for cluster in clusters) == counts, name

    def test_snapdragons_offer_no_sve_and_tensors_do(self) -> None:
        for device in read_devices():
            cpu = device.units["cpu"]
            if cpu.architecture == "aarch64":
                assert ("sve" in (cpu.features or ())) == cpu.model.startswith("Tensor"), device.id


class TestOnePlus12:
    """PowerInfer-2 (arXiv 2406.06282v3), sec 2.3, Table 1 and Table 8."""

    def test_rates_of_memory_and_power(self) -> None:
        device = read_device("oneplus-12")
        cpu, npu = device.units["cpu"], device.units["npu"]
        rates = [cpu.read_bandwidth, npu.read_bandwidth, device.memory.read_bandwidth]
        assert [figure and figure.value for figure in rates] == [43.9e9, 56e9, 59.6e9]
        powers = [cpu.power, npu.power, device.power]
        assert [figure and figure.value for figure in powers] == [4.065, 5.133, 5.095]

    def test_random_4_kib_reads_within_128_mib_by_core(self) -> None:
        reads = read_device("oneplus-12").storage.reads
        by_core = {read.cluster: read.rate for read in reads if read.cluster is not None}
        assert by_core == {"big": 1076.10e6, "mid": 1007.95e6, "little": 761.87e6}

    @pytest.mark.parametrize(
        ("pattern", "block", "rate"),
        [("sequential", 4096, 450e6), ("sequential", 2**19, 4e9), ("random", 2**19, 3.5e9)],
    )
    def test_reads_by_size(self, pattern: str, block: int, rate: float) -> None:
        reads = read_device("oneplus-12").storage.reads
        assert [r.rate for r in reads if (r.pattern, r.block) == (pattern, block)] == [rate]

    def test_scattered_reads_are_slower_than_near_ones(self) -> None:
        def find(extent: int | None) -> float:
            return max(read.rate for read in reads if read.range == extent)

        device = read_device("oneplus-12")
        reads: list[ReadFigure] = [
            r for r in device.storage.reads if (r.pattern, r.block) == ("random", 4096)
        ]
        assert find(128 * MIB) > find(512 * MIB) > find(None)

    def test_one_queue_that_several_readers_slow_down(self) -> None:
        storage = read_device("oneplus-12").storage
        assert storage.queues == 1 and storage.reader_penalty is not None
        assert storage.reader_penalty.value == 0.4


def count_parameters(model: Model) -> int:
    """Weights of a model, without predictors."""
    shape = model.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * query + 2 * key + 2)
    layer += 3 * shape.hidden * model.layer_neurons
    layer += (query + 2 * key) * model.attention.qkv_bias
    layer += model.moe.experts * shape.hidden if model.moe is not None else 0
    tables = 1 if model.tied_head else 2
    return tables * shape.vocab * shape.hidden + shape.layers * layer + shape.hidden


def count_predictor_parameters(model: Model, rank: int) -> int:
    """Weights of predictors of ``rank``, without biases."""
    experts = model.moe.experts if model.moe is not None else 1
    shape = model.shape
    return shape.layers * experts * rank * (shape.hidden + shape.ffn)


class TestModels:
    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("llama-2-7b", 6_738_415_616), ("relullama-7b", 6_738_415_616),
            ("prosparse-llama-2-7b", 6_738_415_616), ("relullama-13b", 13_015_864_320),
            ("mistral-7b", 7_241_732_096), ("bamboo-7b", 7_241_732_096),
            ("qwen2-7b", 7_615_616_512), ("sparse-qwen2-7b", 7_615_616_512),
            ("mixtral-8x7b", 46_702_792_704), ("tinyllama-1.1b", 1_100_048_384),
        ],
    )  # fmt: skip
    def test_shapes_have_published_number_of_parameters(self, name: str, parameters: int) -> None:
        assert count_parameters(read_model(name)) == parameters

    @pytest.mark.parametrize(
        ("name", "weights", "error"),
        [
            # Published to 0.1e9; keys that are values are stored twice, and count once.
            *(("gemma-4-26b-a4b", 25.2e9, 0.05e9), ("gemma-4-31b", 30.7e9, 0.05e9)),
            # Published with 0.15e9 that read pictures and 0.3e9 that read sound.
            *(("gemma-4-e2b", 5.1e9 - 0.45e9, 0.1e9), ("gemma-4-e4b", 8.0e9 - 0.45e9, 0.1e9)),
            # Published to 0.1e9; of the largest, transformers and llama.cpp count so many.
            *(("nemotron-3-nano-30b-a3b", 31.6e9, 0.05e9), ("nemotron-nano-9b-v2", 8.9e9, 0.05e9)),
            ("nemotron-3-super-120b-a12b", 120.67e9, 0.05e9),
            # Published as 109e9, with less than 1e9 that read pictures.
            ("llama-4-scout", 108.3e9, 0.6e9),
        ],
    )
    def test_models_of_several_kinds_of_layers_have_the_published_number_of_parameters(
        self, name: str, weights: float, error: float
    ) -> None:
        model = read_model(name)
        found = sum(tensor.rows * tensor.length for tensor in list_tensors(model, None))
        if name in ("gemma-4-26b-a4b", "gemma-4-31b"):
            for own, layers in list_attention(model)[1:]:
                found -= layers * own.keys * model.shape.hidden
        parts, hidden = (2, model.lay_out_bundle().hidden) if "nemotron" in name else (3, None)
        neurons = model.token_neurons if "-e" in name else model.shape.layers * model.layer_neurons
        found += neurons * parts * (hidden or model.shape.hidden)
        assert found == pytest.approx(weights, abs=error)

    def test_smallthinker_fills_its_checkpoint(self) -> None:
        """Its 16-bit GGUF has 8.55 GB, with a head of its own beside the embedding."""
        model = read_model("smallthinker-4b")
        size = 2 * (count_parameters(model) + model.shape.vocab * model.shape.hidden)
        assert size == pytest.approx(8.55e9, abs=0.02e9)

    @pytest.mark.parametrize(
        ("name", "checkpoint_bytes", "rank", "headers"),
        [
            ("turbosparse-mistral-7b", 15_970_910_688, 1260, 50_000),
            ("turbosparse-mixtral-47b", 103_592_501_248, 1036, 0),
        ],
    )
    def test_predictors_fill_the_rest_of_their_checkpoints(
        self, name: str, checkpoint_bytes: int, rank: int, headers: int
    ) -> None:
        """16-bit weights and the headers of files; the rank is rounded up to a multiple of 32."""
        model = read_model(name)
        used = 2 * (count_parameters(model) + count_predictor_parameters(model, rank))
        assert 0 <= checkpoint_bytes - used <= headers
        assert model.predictor is not None and model.predictor.rank == -(-rank // 32) * 32

    @pytest.mark.parametrize(
        ("name", "gguf_bytes"),
        [
            ("bamboo-7b", 16.0e9),
            ("relullama-7b", 15.1e9),
            ("relullama-13b", 28.3e9),
            ("prosparse-llama-2-7b", 14.5e9),
        ],
    )
    def test_predictors_fill_the_published_gguf(self, name: str, gguf_bytes: float) -> None:
        """16-bit weights; sizes are published to 0.1 GB, ranks are rounded up to 32."""
        model = read_model(name)
        assert model.predictor is not None
        rank = model.predictor.rank
        largest = 2 * (count_parameters(model) + count_predictor_parameters(model, rank))
        smallest = 2 * (count_parameters(model) + count_predictor_parameters(model, rank - 31))
        assert smallest <= gguf_bytes + 0.05e9
        assert largest >= gguf_bytes - 0.05e9

    def test_sparsity_is_of_the_published_size(self) -> None:
        active = {
            "relullama-7b": 0.30, "relullama-13b": 0.22, "prosparse-llama-2-7b": 0.1068,
            "bamboo-7b": 0.10, "turbosparse-mistral-7b": 0.10, "turbosparse-mixtral-47b": 0.15,
        }  # fmt: skip
        for name, share in active.items():
            sparsity = read_model(name).sparsity
            assert sparsity is not None
            assert (sparsity.active, sparsity.status) == (share, "published"), name

    def test_mixtures_compute_few_of_their_neurons(self) -> None:
        """TurboSparse: about 3 % of a layer; PowerInfer-2: 137,626 neurons of a token."""
        model = read_model("turbosparse-mixtral-47b")
        assert model.moe is not None
        assert model.sparsity is not None
        active = model.sparsity.active * model.moe.active_experts * model.shape.ffn
        assert active / model.layer_neurons == pytest.approx(0.0375)
        assert active * model.shape.layers == pytest.approx(137_626, abs=1)


class TestPlans:
    @pytest.mark.parametrize("path", PLAN_FILES, ids=name_file)
    def test_the_budget_is_spent(self, path: Path) -> None:
        """Segments add up to the budget, but for what rounding leaves."""
        memory = load_plan(path).plan.memory
        assert 0 <= memory.budget - sum(size for _, size in memory.segments) <= 16 * MIB

    @pytest.mark.parametrize("path", PLAN_FILES, ids=name_file)
    def test_segments_are_little_larger_than_what_they_hold(self, path: Path) -> None:
        resolved = load_plan(path)
        for name, need in resolved.needs.items():
            size = getattr(resolved.plan.memory.segments, name)
            # Every further chunk that goes through a layer with the first takes 10 MiB or less.
            spare = MIB * (10 * resolved.chunks if name == "workspace" else 8)
            assert name == "cold" or size - need.bytes <= spare, name

    @pytest.mark.parametrize("path", PLAN_FILES, ids=name_file)
    def test_a_prompt_of_512_tokens_reads_every_layer_once(self, path: Path) -> None:
        resolved = load_plan(path)
        if resolved.plan.pipeline.prefill == "layers-first":
            assert resolved.chunks * resolved.plan.prefill.chunk >= TOKENS_TOGETHER

    @pytest.mark.parametrize("path", PLAN_FILES, ids=name_file)
    def test_it_lies_in_folder_of_its_device_and_shares_stores_by_model(self, path: Path) -> None:
        resolved = load_plan(path)
        assert path.parent.name == resolved.device.id
        assert path.name.startswith(resolved.model.id)
        assert resolved.store_path.resolve() == path.parents[1] / "stores" / resolved.model.id

    @pytest.mark.parametrize(
        "path", [p for p in PLAN_FILES if p.name.endswith("-half.plan.toml")], ids=name_file
    )
    def test_half_of_the_neurons_are_in_memory(self, path: Path) -> None:
        """As the store has them: an NPU may have them otherwise."""
        resolved = load_plan(path)
        hot = sum(layer.hot_neurons for layer in resolved.layers) * resolved.bundle.stride
        share = (hot + resolved.plan.memory.segments.cold) / count_ffn_bytes(resolved)
        assert share == pytest.approx(0.5, abs=0.004)

    @pytest.mark.parametrize(
        "path", [p for p in PLAN_FILES if p.name.endswith("-60.plan.toml")], ids=name_file
    )
    def test_the_budget_is_sixty_percent_of_the_store(self, path: Path) -> None:
        resolved = load_plan(path)
        store = count_ffn_bytes(resolved) + resolved.needs.attention.bytes
        store += resolved.needs.predictor.bytes
        assert resolved.plan.memory.budget / store == pytest.approx(0.6, abs=0.001)

    @pytest.mark.parametrize(
        "path", [p for p in PLAN_FILES if p.parent.name in PHONES], ids=name_file
    )
    def test_phones_have_backends_and_one_reader(self, path: Path) -> None:
        resolved = load_plan(path)
        assert resolved.plan.backends == {"cpu": "cpu", "npu": "hexagon"}
        assert resolved.plan.io.threads == 1
        assert all(layer.split["npu"] == layer.hot for layer in resolved.layers)

    @pytest.mark.parametrize(
        "path", [p for p in PLAN_FILES if p.parent.name in PHONES], ids=name_file
    )
    def test_npus_of_phones_have_graphs_that_fit_into_their_own_memory(self, path: Path) -> None:
        resolved = load_plan(path)
        facts, unit = describe_unit(resolved, "npu"), resolved.device.units["npu"]
        assert not hexagon.find_limits(facts)
        assert unit.hexagon is not None and unit.hexagon.own_memory is not None
        graphs = hexagon.list_graphs(facts)
        assert graphs and all(graph.own_bytes <= unit.hexagon.own_memory for graph in graphs)

    def test_in_memory_the_npu_takes_half_as_published(self) -> None:
        for name in ("bamboo-7b", "turbosparse-mistral-7b"):
            layer = read_plan(f"oneplus-12/{name}").layers[0]
            assert (dict(layer.split), layer.hot_neurons) == ({"npu": 0.5, "cpu": 0.5}, 7168)

    def test_a_bundle_on_phones_is_two_blocks_as_published(self) -> None:
        assert read_plan("oneplus-12/bamboo-7b").bundle.stride == 2 * 4096

    def test_mixtral_has_the_memory_of_the_paper(self) -> None:
        budgets = {
            "oneplus-12/turbosparse-mixtral-47b": 19e9,
            "oneplus-12/turbosparse-mixtral-47b-7gb": 7e9,
            "oneplus-ace-2/turbosparse-mixtral-47b": 11e9,
        }
        for name, budget in budgets.items():
            assert read_plan(name).plan.memory.budget == budget

    def test_mixtral_predictors_take_what_the_paper_says(self) -> None:
        """PowerInfer-2: 2.6 GB of predictors, which are GiB; ranks are rounded up here."""
        need = read_plan("oneplus-12/turbosparse-mixtral-47b").needs.predictor
        assert need.bytes / 2**30 == pytest.approx(2.6, abs=0.05)


def test_the_document_shows_the_figures_of_the_files() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    message = "run python tools/list_devices.py"
    assert text == render_document(text, read_devices()), message
