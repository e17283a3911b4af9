"""Whole models on a GPU against Hugging Face transformers: golden models with operators that the
demo does not have.  docs/experimental/gpu-npu-phone.md has what all of them gave."""

from pathlib import Path
from typing import Any

import pytest

from pi2.backends.gpu.kernels.specification import Api
from tests.helpers.goldens import make_golden_plan, measure_error, read_golden, run_golden
from tests.helpers.gpu import require_launcher
from tests.helpers.slow import keep_quick

ERROR = 1e-4


MODELS: list[tuple[Api, str, str, str, float]] = [
    # Soft caps, windows, norms of outputs, a head width of its own, keys and values in fp16.
    ("webgpu", "gemma2", "none", "fp16", 5e-3),
    # LayerNorm, biases everywhere, learned positions, neurons without gates, found by gates.
    ("webgpu", "opt", "gate", "fp32", ERROR),
    # Sinks, clamped SwiGLU, biases of routers and experts.
    ("webgpu", "gpt-oss", "router", "fp32", ERROR),
    # Latent attention, groups of experts and a layer that is no mixture.
    ("opencl", "deepseek-v3", "none", "fp32", ERROR),
    # Layers that keep a state: the delta rule, gates of attention's output.
    ("webgpu", "qwen3-5", "none", "fp32", ERROR),
    # Attention in chunks, norms of some layers' turned heads, queries that grow, experts that
    # read what is weighed.
    ("opencl", "llama4", "router", "fp32", ERROR),
    # A router that reads the layer's input, and names the neurons.
    ("webgpu", "smallthinker", "router", "fp32", ERROR),
]


@pytest.mark.parametrize("on_cuda", keep_quick([False, True], [True]), ids=["emulated", "cuda"])
@pytest.mark.parametrize(("api", "name", "predictor", "kv", "limit"), MODELS)
def test_golden_models_agree(
    tmp_path: Path, api: Api, name: str, predictor: str, kv: str, limit: float, on_cuda: bool
) -> None:
    api = "cuda" if on_cuda else api
    require_launcher(api)
    golden = read_golden(name)
    segments = {"runtime": "900 MiB", "workspace": "64 MiB", "predictor": "1 MiB"}
    changes: dict[str, Any] = {
        "device": f"host-{api}",
        "backends": {"gpu": "gpu"},
        "memory": {
            "budget": "2 GiB",
            "segments": dict.fromkeys(("attention", "kv", "hot", "cold"), "0 B") | segments,
            "units": {"gpu": {"budget": "64 MiB"}},
        },
        "layers": {"split": {"gpu": 1.0}, "hot": 1.0},
        "decode": {"predictor": predictor},
        "kv": {"context": 64, "type": kv},
    }
    logits, greedy = run_golden(make_golden_plan(name, tmp_path, changes=changes), golden)
    assert measure_error(logits, golden.logits) <= limit
    assert greedy == golden.greedy
