"""A GGUF file as a source of weights: what is resident, what streams, what a plan derives."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import pi2
from pi2.arrays import U8
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.engine.file_model import cut_rows, divide_matrices
from pi2.fitting.check import check_file
from pi2.fitting.completion import complete_plan
from pi2.importing.gguf_file import read_gguf
from pi2.memory.direct_files import BLOCK, BatchReads, DirectFiles, Piece
from pi2.memory.flash import ReadSettings
from pi2.memory.io_engine import EngineName
from pi2.memory.ring import Rates, WeightStream
from pi2.plan.arithmetic.sources import Completion
from pi2.plan.documents.device import Device
from pi2.plan.documents.quantities import parse_size
from pi2.plan.reading.references import find_document
from pi2.weights.file_plan import FileOrigin
from pi2.weights.file_reading import list_missing
from pi2.weights.file_tensor import FileTensor
from pi2.weights.gguf_weights import GgufWeights
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.kernels import make_loops

Ring = tuple[WeightStream, U8]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 8-bit weights whose matrices are larger than a few buffers."""
    shape = {"hidden": 256, "ffn": 4096, "layers": 4, "context": 512}
    return write_random_gguf(tmp_path_factory.mktemp("gguf"), shape)


def test_streamed_weights_draft_by_themselves_and_the_text_stays(file: Path) -> None:
    ids, expected, streamed = [], [], []
    for memory in (None, "105 MiB"):
        with pi2.load(file, memory=memory, set={"kv.context": 256}) as model:
            result = model.generate("hello world " * 4, max_tokens=48, temperature=0.0).result
            ids.append(result.token_ids)
            expected.append(model.expected)
            assert model.plan.file is not None
            streamed.append(model.plan.file.streamed_bytes)
            reads = model.stats.flash_read_bytes
    assert ids[0] == ids[1] and streamed[0] == 0 < streamed[1]
    # A prompt and the steps after it read what streams once each, drafts aside.
    assert reads >= 2 * streamed[1]
    assert result.statistics.speculation is not None
    assert result.statistics.speculation.accepted_tokens > 0
    # What streams is measured before the run.
    assert expected[0] is None
    assert expected[1] is not None and expected[1].tokens_s > 0


def test_a_simulated_token_reads_what_streams(file: Path, capsys: Capture) -> None:
    changes = ["--memory", "105 MiB", "--set", "kv.context=256"]
    assert run(["simulate", str(file), *changes, "--tokens", "4", "--prompt", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["decode"]["read_bytes_per_token"]
    with pi2.load(file, memory="105 MiB", set={"kv.context": 256}) as model:
        assert model.plan.file is not None
        assert found == pytest.approx(model.plan.file.streamed_bytes, rel=0.01)


def test_another_file_that_is_resident_drafts_and_the_text_stays(file: Path) -> None:
    draft = file.with_name("draft.plan.toml")
    draft.write_text(f'schema_version = 3\nweights = "{file.name}"\nkv.context = 256\n')
    plan = file.with_name("drafted.plan.toml")
    plan.write_text(
        f'schema_version = 3\nweights = "{file.name}"\nkv.context = 256\n'
        'decode.speculation = {drafts = "plan", plan = "draft.plan.toml", when = "always"}\n'
    )
    ids = []
    for path, memory in ((file, None), (plan, None), (plan, "127 MiB")):
        with pi2.load(path, memory=memory) as model:
            result = model.generate("hello world", max_tokens=24, temperature=0.0).result
            ids.append(result.token_ids)
    assert ids[0] == ids[1] == ids[2]
    assert model.plan.file is not None and model.plan.file.streamed_bytes > 0
    # The same model guesses what the other will say.
    drafts = result.statistics.speculation
    assert drafts is not None and drafts.accepted_tokens == drafts.draft_tokens > 0
    with pytest.raises(UserError, match="not enough"):
        pi2.load(plan, memory="100 MiB")


def test_a_file_is_not_read_as_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    with path.open("wb") as made:
        made.truncate(1 << 40)
    assert list(list_missing(path)) == []


def test_the_slower_of_disk_and_computing_bounds_what_is_expected() -> None:
    rates = Rates(disk=1e9, computing=10e9)
    assert rates.expect(500_000_000, 1_000_000_000) == (2.0, True, 1e9)
    assert rates.expect(50_000_000, 1_000_000_000) == (10.0, False, 1e9)


def test_logits_are_the_same_bits_wherever_weights_are(file: Path) -> None:
    found = []
    for settings in ({}, {"memory.weights": "loaded"}, {"memory.budget": "105 MiB"}):
        with pi2.load(file, set={"kv.context": 256, **settings}) as model:
            found.append(model.logits(list(range(5, 45))))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_few_tokens_together_have_the_bits_of_each_and_many_round_otherwise(file: Path) -> None:
    tokens = np.arange(5, 45, dtype=np.int32)
    with pi2.load(file, set={"kv.context": 256}) as model:
        whole = model.logits(tokens.tolist())
        one_by_one = model.logits(tokens.tolist(), mode="decode")
    with pi2.load(file, set={"kv.context": 256, "prefill.chunk": 7}) as model:
        pieces = model.logits(tokens.tolist())
    assert np.array_equal(one_by_one, pieces)
    assert np.abs(whole - pieces).max() <= 0.02 * np.abs(pieces).max()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_activations_of_more_bits_are_nearer_to_none_rounded(
    file: Path, mode: Literal["prefill", "decode"]
) -> None:
    tokens, found = list(range(5, 45)), {}
    for kind in ("int8", "int16", "fp32"):
        with pi2.load(file, set={"kv.context": 256, f"{mode}.activations": kind}) as model:
            found[kind] = model.logits(tokens, mode=mode)
    coarse, fine = (np.abs(found[kind] - found["fp32"]).max() for kind in ("int8", "int16"))
    assert 0 < fine < coarse <= 0.05 * np.abs(found["fp32"]).max()


def test_activations_are_those_of_llama_cpp_if_nothing_is_stated(file: Path) -> None:
    with pi2.load(file, set={"kv.context": 256}) as model:
        plan = model.plan.plan
        assert (plan.prefill.activations, plan.decode.activations) == ("int8", "int8")
        before = plan.memory.segments.workspace
    with pi2.load(file, set={"kv.context": 256, "decode.activations": "fp32"}) as model:
        assert model.plan.plan.prefill.activations == "int8"
        assert model.plan.plan.memory.segments.workspace > before


def test_embeddings_have_the_length_one(file: Path) -> None:
    with pi2.load(file, set={"kv.context": 256}) as model:
        found = model.embed("hello world")
    assert found.shape == (256,) and abs(float(np.linalg.norm(found)) - 1) < 1e-5


def test_a_budget_that_is_too_small_names_the_least(file: Path) -> None:
    with pytest.raises(UserError) as caught:
        pi2.load(file, memory="20 MiB")
    (found,) = caught.value.diagnostics
    assert found.code == "P026" and "needs at least" in found.message
    assert found.help is not None and "--memory" in found.help
    with pytest.raises(UserError) as caught:
        pi2.load(file, memory="105 MiB", set={"kv.context": 200_000})
    (found,) = caught.value.diagnostics
    assert found.code == "P026" and "a shorter kv.context" in str(found.help)


def derive_plan(weights: GgufWeights, available: int, **tables: object) -> Completion:
    device = check_file(find_document("host", "device", Path())).document
    assert isinstance(device, Device)
    stated = {"schema_version": 3, "weights": "x.gguf", "device": "host", "model": "x"}
    memory = 1 << 40, available
    return complete_plan({**stated, **tables}, device, FileOrigin(weights), lambda: memory)


def test_short_memory_shortens_a_context_as_a_short_budget_does(tmp_path: Path) -> None:
    file = write_random_gguf(tmp_path, {"hidden": 256, "ffn": 4096, "layers": 4, "context": 4096})
    with GgufWeights.open(file) as weights:

        def derive(available: int, **memory: str) -> tuple[int, str]:
            found = derive_plan(weights, available, memory=memory).values
            return found["kv"]["context"], found["memory"]["budget"]

        with pytest.raises(UserError) as caught:
            derive(1 << 20)
        least = int(str(caught.value).split("--memory '")[1].split(" MiB")[0]) << 20
        assert derive(1 << 30)[0] == 4096
        context, budget = derive(least)
        assert context == 512 and parse_size(budget) <= least
        assert derive(1 << 30, budget=budget)[0] == context


def test_a_short_budget_shortens_a_context_that_no_plan_states(tmp_path: Path) -> None:
    file = write_random_gguf(tmp_path, {"hidden": 256, "ffn": 4096, "layers": 4, "context": 4096})
    with GgufWeights.open(file) as weights:

        def derive(budget: int, **kv: int) -> int:
            memory = {"budget": f"{budget} B"}
            found = derive_plan(weights, 1 << 40, memory=memory, kv=kv).values
            return int(found["kv"]["context"])

        def find_least(context: int) -> int:
            """Smallest budget in whole MiB for a stated context."""
            for least in itertools.count(32):
                with suppress(UserError):
                    derive(least << 20, context=context)
                    return least << 20
            raise AssertionError

        assert derive(1 << 30) == 4096
        assert derive(find_least(4096)) == 4096
        assert derive(find_least(4096) - (1 << 20)) == 2048
        # Budgets are whole MiB, which may hold a longer context than the least.
        least = find_least(512)
        assert derive(least) == (1024 if find_least(1024) == least else 512)
        with pytest.raises(UserError, match="needs at least"):
            derive(least - (1 << 20))


def test_a_plan_may_state_no_more_than_the_weights(file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "short.plan.toml"
    reference = os.path.relpath(file, tmp_path)
    plan.write_text(f'schema_version = 3\nweights = "{reference}"\n[memory]\nbudget = "256 MiB"\n')
    with pi2.load(plan) as model:
        assert model.plan.plan.memory.budget == 256 << 20
        assert model.plan.plan.backends == {"cpu": "blocks"}
        first = model.generate("hello", max_tokens=4, temperature=0.0).result.text
    with pi2.load(file) as model:
        assert model.generate("hello", max_tokens=4, temperature=0.0).result.text == first


def test_a_plan_whose_weights_are_missing_says_so(tmp_path: Path) -> None:
    plan = tmp_path / "lost.plan.toml"
    plan.write_text('schema_version = 3\nweights = "nowhere.gguf"\n')
    with pytest.raises(UserError) as caught:
        pi2.load(plan)
    (item,) = caught.value.diagnostics
    assert item.code == "P530" and item.span is not None and item.span.line == 2


def test_tensors_are_those_of_the_file(file: Path) -> None:
    with GgufWeights.open(file) as weights:
        names = {tensor.name: tensor for _, _, tensor in weights.list_matrices()}
        gate = names["blk.2.ffn_gate.weight"]
        assert (gate.format, gate.rows, gate.length) == ("q8_0", 4096, 256)
        rows = weights.map_rows(gate)
        assert rows.shape == (4096, 272)
        assert np.array_equal(weights.read_rows(gate, [7, 4000]), rows[[7, 4000]])
        assert weights.find_obstacles() == []


def make_tensor(name: str, rows: int) -> FileTensor:
    return FileTensor(name=name, file=0, offset=100, format="q8_0", rows=rows, length=256)


def test_what_streams_is_cut_into_whole_rows_and_spread_over_the_layers() -> None:
    tensors = [make_tensor(f"layer {n}", 4096) for n in range(12)]
    size = tensors[0].size_bytes
    division = divide_matrices(tensors, 6 * size, 1 << 18)
    assert len(division.resident) == 6
    places = [n for n, tensor in enumerate(tensors) if tensor.name in division.streamed]
    assert all(later - earlier <= 3 for earlier, later in itertools.pairwise(places))
    for pieces in division.streamed.values():
        assert sum(piece.size for _, piece in pieces) == size
        assert all(piece.size % 272 == 0 and piece.size <= 1 << 18 for _, piece in pieces)
    assert [first for first, _ in cut_rows(tensors[0], 272 * 1000)][:3] == [0, 992, 1984]


@contextmanager
def open_stream(path: Path, pieces: list[Piece], blocks: int, engine: EngineName) -> Iterator[Ring]:
    region = np.frombuffer(bytearray((blocks + 1) * BLOCK), np.uint8)
    skip = -region.ctypes.data % BLOCK
    files = DirectFiles([path])
    own = ReadSettings(engine=engine, threads=2, depth=8)
    ring = region[skip : skip + blocks * BLOCK]
    reads = files.open_engine(own, make_loops(), has_one_caller=False)
    stream = WeightStream(BatchReads(files, reads), pieces, ring)
    try:
        yield stream, ring
    finally:
        stream.close()
        files.close()


@pytest.mark.parametrize("engine", ["io_uring", "pread"])
def test_a_stream_gives_its_pieces_in_order_again_and_again(
    engine: EngineName, tmp_path: Path
) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    pieces = [Piece(0, 17 + 9000 * n, 9000) for n in range(11)]
    with open_stream(path, pieces, 15, engine) as (stream, ring):

        def take(number: int) -> None:
            address = stream.take() - ring.ctypes.data
            piece = pieces[number % 11]
            expected = data[piece.offset : piece.offset + piece.size]
            assert np.array_equal(ring[address : address + piece.size], expected)
            stream.release()

        for number in range(40):
            take(number)
        # A round that was interrupted is followed by a whole one.
        stream.rewind()
        # Another thread may go on.
        with ThreadPoolExecutor(1) as pool:
            list(pool.map(take, range(5)))
        for number in range(5, 20):
            take(number)


@pytest.mark.parametrize("engine", ["io_uring", "pread"])
def test_a_file_that_is_cut_while_it_streams_is_an_error_that_names_it(
    engine: EngineName, tmp_path: Path
) -> None:
    path = tmp_path / "cut"
    path.write_bytes(bytes(50_000))
    with open_stream(path, [Piece(0, 40_000, 5_000)], 30, engine) as (stream, _):
        os.truncate(path, 10_000)
        with pytest.raises(UserError, match="cut"):
            stream.take()


@pytest.mark.parametrize("name", ["blk.1.ffn_gate.weight", "output_norm.weight"])
def test_numbers_that_are_not_finite_are_refused_with_the_tensors_name(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    spoilt = write_random_gguf(tmp_path, {"layers": 2})
    entry = read_gguf(spoilt).entries[name]
    nan = np.array([np.nan], "<f4" if entry.block.is_plain else "<f2").tobytes()
    content = spoilt.read_bytes()
    place = entry.offset + entry.size_bytes - entry.block.block_bytes
    spoilt.write_bytes(content[:place] + nan + content[place + len(nan) :])
    with pytest.raises(UserError, match=re.escape(f"tensor '{name}'")) as caught:
        pi2.load(spoilt)
    assert [item.code for item in caught.value.diagnostics] == ["P539"]
    assert run(["run", str(spoilt), "--prompt", "a", "-n", "1"]) != 0
    assert f"tensor '{name}'" in capsys.readouterr().err
    assert run(["validate", str(spoilt)]) == 1
    assert f"tensor '{name}'" in capsys.readouterr().out
    spoilt.write_bytes(content)
    os.utime(spoilt, ns=(0, 0))
    assert run(["validate", str(spoilt)]) == 0
