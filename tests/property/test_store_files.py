"""For any shape, a store's files are Arrow files of the same bytes, and damage is noticed."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.model.tensor import DenseTensor
from pi2.plan.weights.layout import Precision, lay_out_bundle, vector_bytes
from pi2.store.arrow_file import lay_out_dense_file, lay_out_layer_file
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from tests.helpers.models import TinyModel, make_tiny

PRECISIONS: tuple[Precision, ...] = ("int4", "int8", "fp16")
groups = st.integers(1, 40)
precisions = st.sampled_from(PRECISIONS)


@contextmanager
def open_arrow(path: Path) -> Iterator[tuple[pa.RecordBatchFileReader, int]]:
    """A memory-mapped Arrow reader of ``path``, and the address of the file's first byte."""
    with pa.memory_map(str(path)) as source:
        start = source.read_buffer(1).address
        source.seek(0)
        yield pa.ipc.open_file(source), start


@settings(max_examples=25)
@given(
    hidden_groups=groups,
    ffn=st.integers(1, 200),
    precision=precisions,
    extra_blocks=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_an_arrow_reader_sees_the_same_neurons_without_copies(
    hidden_groups: int, ffn: int, precision: Precision, extra_blocks: int, seed: int
) -> None:
    hidden = 32 * hidden_groups
    shape = {"layers": 1, "hidden": hidden, "ffn": ffn, "heads": 1, "kv_heads": 1, "head_dim": 32}
    stride = lay_out_bundle(hidden, precision).stride + 512 * extra_blocks
    changes = {"shape": shape, "quantization": {"ffn": precision}, "predictor": None}
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder), changes, seed=seed, stride=stride)
        with NeuronStore.open(tiny.store, model=tiny.model) as store:
            layer = store.layers[0]
            with open_arrow(layer.path) as (reader, start):
                assert reader.num_record_batches == 1
                batch = reader.get_batch(0)
                batch.validate(full=True)
                assert batch.schema.names == ["bundle", "neuron", "check"]
                bundle, neuron, check = batch.columns
                assert bundle.type == pa.binary(stride)
                first = bundle.buffers()[1].address - start
                assert first == layer.bundles_offset
                assert first % 4096 == 0
                content = layer.path.read_bytes()
                for index, value in enumerate(bundle.to_pylist()):
                    # Bundle i lies i strides after the first, in the file and in memory alike.
                    assert content[first + index * stride :][:stride] == value
                    assert layer.bundles[index].tobytes() == value
                assert neuron.to_numpy(zero_copy_only=True).tolist() == layer.original.tolist()
                assert check.to_numpy(zero_copy_only=True).tolist() == layer.checks.tolist()
                for column in (neuron, check):
                    assert (column.buffers()[1].address - start) % 64 == 0


@settings(max_examples=25)
@given(
    hidden_groups=groups, rank_groups=st.integers(1, 5), ffn=st.integers(1, 100),
    precision=precisions, tied=st.booleans(), bias=st.booleans(),
)  # fmt: skip
def test_an_arrow_reader_sees_the_same_tensors_without_copies(
    hidden_groups: int, rank_groups: int, ffn: int, precision: Precision, tied: bool, bias: bool
) -> None:
    shape = {
        "layers": 2, "hidden": 32 * hidden_groups, "ffn": ffn, "heads": 3, "kv_heads": 1,
        "head_dim": 32,
    }  # fmt: skip
    changes = {
        "shape": shape,
        "predictor": {"rank": 32 * rank_groups},
        "quantization": {"attention": precision, "head": precision},
        "tied_head": tied,
        "attention": {"qkv_bias": bias},
    }
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder), changes)
        with NeuronStore.open(tiny.store, model=tiny.model) as store:
            with open_arrow(tiny.store / "dense.arrow") as (reader, start):
                assert reader.num_record_batches == len(store.tensors)
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    batch.validate(full=True)
                    (row,) = batch.to_pylist()
                    tensor = store.tensors[row["name"]]
                    assert row["precision"] == (tensor.precision or "fp32")
                    assert (row["rows"], row["length"]) == (tensor.rows, tensor.length)
                    assert row["weights"] == tensor.weights.tobytes()
                    scales = b"" if tensor.scales is None else tensor.scales.tobytes()
                    assert row["scales"] == scales
                    address = batch.column("weights").buffers()[2].address
                    assert (address - start) % 64 == 0
                    if tensor.precision is not None:
                        size = len(row["weights"]) + len(row["scales"])
                        assert size == tensor.rows * vector_bytes(tensor.length, tensor.precision)
        assert verify_store(tiny.store) == []


@given(neurons=st.integers(1, 10**9), blocks=st.integers(1, 100))
def test_a_layer_file_is_laid_out_without_its_contents(neurons: int, blocks: int) -> None:
    plan = lay_out_layer_file(neurons, 512 * blocks)
    ends = [piece.offset + len(piece.data) for piece in plan.pieces]
    ((bundles, originals, checks),) = plan.holes
    assert bundles == 4096
    assert originals >= bundles + 512 * blocks * neurons
    assert checks >= originals + 4 * neurons
    assert plan.size == max(ends) > checks + 4 * neurons
    assert sum(len(piece.data) for piece in plan.pieces) < 8192


@settings(max_examples=30)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=70), st.integers(1, 300)), max_size=20))
def test_a_dense_file_may_have_any_names_and_sizes(sizes: list[tuple[str, int]]) -> None:
    tensors = [DenseTensor(name=name, precision="int8", rows=1, length=32 * n) for name, n in sizes]
    plan = lay_out_dense_file(tensors)
    content = bytearray(plan.size)
    for piece in plan.pieces:
        content[piece.offset : piece.offset + len(piece.data)] = piece.data
    for number, tensor in enumerate(tensors):
        for offset, size in zip(plan.holes[number], tensor.count_bytes(), strict=True):
            assert offset % 64 == 0
            assert not any(content[offset : offset + size])
            content[offset : offset + size] = bytes([number + 1]) * size
    for source in (bytes(content), memoryview(content)[8:]):
        # As a file, and as the stream that begins behind the magic.
        reader = (
            pa.ipc.open_file(source) if len(source) == plan.size else pa.ipc.open_stream(source)
        )
        rows = reader.read_all().to_pylist()
        assert [row["name"] for row in rows] == [tensor.name for tensor in tensors]
        for number, (row, tensor) in enumerate(zip(rows, tensors, strict=True)):
            for column, size in zip(("weights", "scales"), tensor.count_bytes(), strict=True):
                assert row[column] == bytes([number + 1]) * size


@given(
    length_groups=groups,
    count=st.integers(1, 5),
    exponent=st.integers(-12, 4),
    seed=st.integers(0, 2**16),
)
@pytest.mark.parametrize(("precision", "top"), [("int4", 7), ("int8", 127)])
def test_a_round_trip_is_off_by_half_a_step_at_most(
    precision: Precision, top: int, length_groups: int, count: int, exponent: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((count, 32 * length_groups), dtype=np.float32)
    rows *= np.float32(2.0**exponent)
    weights, scales = find_packing(precision).quantize(rows)
    assert scales is not None
    restored = find_packing(precision).dequantize(weights, scales, rows.shape[1])
    peaks = np.abs(rows.reshape(count, length_groups, 32)).max(axis=2)
    # Half a step, and what the fp16 scale is off by (2^-11 of it) where the code is largest.
    bounds = peaks / top * (0.5 + top * 2.0**-11) + 2.0**-25 * top
    errors = np.abs(restored - rows).reshape(count, length_groups, 32)
    assert (errors <= bounds[:, :, None] * 1.001).all()


@given(length_groups=groups, seed=st.integers(0, 2**16), precision=precisions)
def test_quantising_what_was_restored_changes_nothing(
    length_groups: int, seed: int, precision: Precision
) -> None:
    rows = np.random.default_rng(seed).standard_normal((2, 32 * length_groups), dtype=np.float32)
    weights, scales = find_packing(precision).quantize(rows)
    restored = find_packing(precision).dequantize(weights, scales, rows.shape[1])
    again, again_scales = find_packing(precision).quantize(restored)
    twice = find_packing(precision).dequantize(again, again_scales, rows.shape[1])
    np.testing.assert_allclose(twice, restored, rtol=2e-3, atol=1e-6)


# Damage
@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    changes = {"shape": {"layers": 1, "ffn": 40, "vocab": 258}, "predictor": None}
    return make_tiny(tmp_path_factory.mktemp("tiny"), changes)


@contextmanager
def copy_store(tiny: TinyModel) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(tiny.store, Path(folder) / "store"))


def use_store(path: Path, tiny: TinyModel) -> None:
    """Open a store and touch every array: a UserError is fine, anything else is not."""
    with contextlib.suppress(UserError):
        with NeuronStore.open(path, model=tiny.model) as store:
            for layer in store.layers:
                assert layer.bundles.sum() + layer.original.sum() + layer.checks.sum() >= 0
            for tensor in store.tensors.values():
                assert tensor.weights.shape[0] == tensor.rows
                tensor.weights.max()


def list_places(value: object, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    paths = [prefix] if prefix else []
    for key, item in items:
        paths += list_places(item, (*prefix, key))
    return paths


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_value_in_the_manifest_is_a_user_error_or_harmless(
    tiny: TinyModel, data: st.DataObject
) -> None:
    with copy_store(tiny) as path:
        file = path / "manifest.json"
        fields = json.loads(file.read_text())
        *parents, last = data.draw(st.sampled_from(list_places(fields)))
        target = fields
        for key in parents:
            target = target[key]
        target[last] = data.draw(
            st.sampled_from(
                [
                    None, True, 0, -1, 1, 63, 64, 4096, 8192, 2**31, 2**62, 2**70, 1.5, "", "x", [],
                    {},
                ]
            )
        )  # fmt: skip
        file.write_text(json.dumps(fields))
        use_store(path, tiny)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_truncated_file_is_a_user_error(tiny: TinyModel, data: st.DataObject) -> None:
    with copy_store(tiny) as path:
        names = ["manifest.json", "dense.arrow", "layers/ffn-000.arrow", "tokenizer.json"]
        file = path / data.draw(st.sampled_from(names))
        # The manifest ends in a newline that nothing depends on.
        size = data.draw(st.integers(0, file.stat().st_size - 2))
        with file.open("r+b") as stream:
            stream.truncate(size)
        with pytest.raises(UserError):
            NeuronStore.open(path)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_verify_finds_any_changed_byte(tiny: TinyModel, data: st.DataObject) -> None:
    with copy_store(tiny) as path:
        file = path / data.draw(st.sampled_from(["dense.arrow", "layers/ffn-000.arrow"]))
        content = bytearray(file.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
        (finding,) = verify_store(path)
        assert finding.code == "P507"
        assert file.name in finding.message
