"""Benchmarks: workloads, figures, and the bytes that a token needs."""

from pathlib import Path

import pytest

from pi2.engine.accounts import count_token_bytes
from pi2.fitting.check import load_plan
from pi2.measuring.report import TokenSource, list_workloads
from pi2.store.reader import NeuronStore
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan

# Workloads


def test_workloads_are_named_as_in_llama_bench() -> None:
    names = [item.name for item in list_workloads([128, 512], [64], [0, 256])]
    assert names == ["pp128", "pp512", "pp128 @ d256", "pp512 @ d256", "tg64", "tg64 @ d256"]


def test_answers_are_generated_for_each_number_of_sequences_and_prompts_for_one() -> None:
    names = [item.name for item in list_workloads([8], [64], [0, 256], [1, 4])]
    assert names == [
        *("pp8", "pp8 @ d256"),
        *("tg64 x 1", "tg64 x 4", "tg64 x 1 @ d256", "tg64 x 4 @ d256"),
    ]


def test_tokens_walk_through_the_vocabulary_and_never_end_a_text() -> None:
    source = TokenSource.walk_vocabulary(100, without=[30])
    first, second = source.take(60), source.take(80)
    assert list(first[:3]) == [24, 25, 26] and 30 not in first
    assert second[0] == first[-1] + 1, "repetitions go on where the last one stopped"
    assert len({*first, *second}) == 99


# Bytes per token
@pytest.fixture(params=["tied", "untied"])
def tiny_plan(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    changes = {"tied_head": request.param == "tied", "attention": {"qkv_bias": True}}
    return write_plan(tmp_path, make_tiny(tmp_path, changes))


def measure_tensors(path: Path) -> dict[str, int]:
    """Bytes of the store's tensors as they lie in the file."""
    resolved = load_plan(path)
    with NeuronStore.open(resolved.store_path, model=resolved.model) as store:
        return {
            name: tensor.weights.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)
            for name, tensor in store.tensors.items()
        }


@pytest.mark.parametrize("mode", ["none", "gate", "low-rank"])
def test_bytes_of_a_token_are_those_of_the_stores_tensors(tiny_plan: Path, mode: str) -> None:
    resolved = load_plan(tiny_plan, overrides={"decode.predictor": mode})
    model, used = resolved.model, resolved.bundle.used_bytes
    found = count_token_bytes(resolved, active=0.25, position=10)
    assert found is not None
    sizes = measure_tensors(tiny_plan)
    vocab, ffn, layers = model.shape.vocab, model.shape.ffn, model.shape.layers
    predictors = sum(size for name, size in sizes.items() if "predictor" in name)
    layer_tensors = sum(size for name, size in sizes.items() if name.startswith("layers."))
    assert found.attention == pytest.approx(
        layer_tensors - predictors + sizes["final_norm"] + sizes["embedding"] / vocab
    )
    assert found.head == sizes["embedding" if model.tied_head else "head"]
    assert found.kv == 2 * layers * 10 * model.shape.kv_heads * model.shape.head_dim * 2
    neurons = layers * ffn
    assert (found.predictor, found.neurons) == {
        "none": (0, neurons * used),
        "gate": (neurons * used / 3, neurons * 0.25 * used * 2 / 3),
        "low-rank": (predictors, neurons * 0.25 * used),
    }[mode]


def test_a_sliding_window_bounds_the_context_that_is_read(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"attention": {"sliding_window": 8}})
    resolved = load_plan(write_plan(tmp_path, tiny))
    full, longer = (
        count_token_bytes(resolved, active=0.1, position=position) for position in (8, 40)
    )
    assert full is not None and full == longer
