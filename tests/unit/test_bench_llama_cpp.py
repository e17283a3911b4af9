"""The comparison with llama.cpp: files of the same shape and precision, runs of the same work."""

from pathlib import Path

import numpy as np
import pytest

import pi2
from limited.random_gguf import find_gguf, list_gguf_tensors, write_gguf
from pi2.formats import find_packing
from pi2.measuring.report import Workload
from pi2.plan.weights.layout import vector_bytes
from pi2.progress import ignore_progress
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import make_model
from tests.helpers.slow import keep_quick

SHAPE = {"hidden": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 32}


def test_a_gguf_file_has_the_models_shape_and_bits_per_weight(tmp_path: Path) -> None:
    import gguf

    model = make_model({"shape": SHAPE, "tied_head": False})
    path = tmp_path / "model.gguf"
    write_gguf(model, path)
    assert list(tmp_path.iterdir()) == [path]
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in list_gguf_tensors(model):
        stored = found.pop(tensor.name)
        if tensor.precision is not None:
            assert tuple(stored.shape) == (tensor.length, tensor.rows)
            assert stored.n_bytes == tensor.rows * vector_bytes(tensor.length, tensor.precision)
        values = gguf.dequantize(stored.data, stored.tensor_type)
        assert np.isfinite(values).all()
        if tensor.precision is not None and tensor.rows >= 64:
            assert values.std() == pytest.approx(tensor.values_deviation, rel=0.1)
    assert not found
    assert reader.get_field("llama.attention.head_count_kv").contents() == 2


def test_a_mixture_has_the_matrices_of_all_its_experts(tmp_path: Path) -> None:
    import gguf

    model = make_model({"shape": SHAPE, "moe": {"experts": 4, "active_experts": 2}})
    path = tmp_path / "mixture.gguf"
    write_gguf(model, path)
    assert find_gguf(model, tmp_path) != find_gguf(make_model({"shape": SHAPE}), tmp_path)
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    down = found["blk.0.ffn_down_exps.weight"]
    assert tuple(down.shape) == (256, 128, 4)
    assert down.n_bytes == 4 * 128 * vector_bytes(256, "int4")
    values = gguf.dequantize(down.data, down.tensor_type)
    assert abs(values.mean()) < 0.02 * values.std()
    router = found["blk.1.ffn_gate_inp.weight"]
    assert tuple(router.shape) == (128, 4)
    assert np.linalg.matrix_rank(router.data.reshape(4, 128)) == 4
    assert reader.get_field("llama.expert_used_count").contents() == 2


@pytest.mark.parametrize("embedding", keep_quick(["int4", "int8", "fp16"], ["int4"]))
def test_a_mixture_like_a_store_chooses_experts_as_it_does(tmp_path: Path, embedding: str) -> None:
    import gguf

    shape = {"layers": 2, "hidden": 128, "ffn": 256, "vocab": 300}
    changes = {"shape": shape, "quantization": {"embedding": embedding}}
    plan = make_mixture_plan(tmp_path, "silu", changes)
    path = tmp_path / "mixture.gguf"
    with pi2.load(plan, set={"backends.cpu": "reference"}) as loaded:
        model, stored = loaded.plan.model, loaded.store.tensors
        write_gguf(model, path, like=loaded.store)
        assert find_gguf(model, tmp_path, loaded.store) != find_gguf(model, tmp_path)
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

        def read(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            return gguf.dequantize(found[name].data, found[name].tensor_type)

        words = stored["embedding"]
        packed, width = words.weights.view(np.uint8), model.shape.hidden
        assert words.precision == embedding
        given = find_packing(words.precision).dequantize(packed, words.scales, width)
        assert np.array_equal(read("token_embd.weight"), given)
        router = stored["layers.1.router"].weights
        assert np.array_equal(read("blk.1.ffn_gate_inp.weight"), router)
        norm = stored["layers.1.ffn_norm"].weights.reshape(-1)
        assert np.array_equal(read("blk.1.ffn_norm.weight"), norm)
        # Layers add little to what words are.
        down, up = (read(f"blk.0.ffn_{part}_exps.weight").std() for part in ("down", "up"))
        assert down < 0.1 * up


@pytest.mark.parametrize("moe", [None, {"experts": 4, "active_experts": 2}])
def test_llama_cpp_runs_prompts_and_answers(tmp_path: Path, moe: dict[str, int] | None) -> None:
    pytest.importorskip("llama_cpp")
    from limited.llama_cpp import LlamaRecipe

    model = make_model({"shape": SHAPE} | ({} if moe is None else {"moe": moe}))
    file = tmp_path / "random.gguf"
    write_gguf(model, file)
    recipe = LlamaRecipe(model=model, context=64, threads=1, file=file, synthetic=True)
    contestant = recipe(ignore_progress)
    assert "llama-cpp-python" in contestant.describe().engine
    prompt = contestant.run(Workload("pp", 20, 8))
    answer = contestant.run(Workload("tg", 5, 30))
    assert (prompt.tokens, answer.tokens) == (20, 5)
    assert min(prompt.seconds, answer.seconds) > 0
    found = contestant.count_bytes(Workload("tg", 5, 30), None)
    computed = 256 if moe is None else 2 * 256
    assert found is not None and found.neurons == 3 * computed * 3 * vector_bytes(128, "int4")
    contestant.close()


def test_llama_cpp_needs_a_file_and_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.bench_against import main

    plan = str(make_mixture_plan(tmp_path, "silu", {}))
    with pytest.raises(SystemExit, match="runs a neuron store, which"):
        main([plan])
    with pytest.raises(SystemExit, match=r"no\.gguf: no file has this name"):
        main([plan, "--file", "no.gguf"])
    file = tmp_path / "random.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs llama-cpp-python"):
        main([plan, "--file", str(file)])
