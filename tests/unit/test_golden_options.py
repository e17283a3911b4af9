"""Every option of a model document is in a golden model, compared with the reference."""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel
from safetensors.numpy import load_file, save_file

import pi2
from pi2.arrays import F32
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Quantization
from tests.helpers.goldens import EXACT, FOLDER, copy_checkpoint, list_goldens, write_plan
from tests.unit.test_goldens import COMPARED, COVERING

OPERATORS = (
    "norm", "rope", "other_rope", "positions", "attention", "other_heads", "layers", "layer_scale",
    "recurrence", "convolution", "residual", "ffn", "side_ffn", "layer_embedding", "altup", "moe",
    "multipliers", "logit_softcap", "tied_head", "head_bias", "predictor",
)  # fmt: skip
"""Tables and keys that decide what is computed; sizes, names and precisions are not among them."""

ELSEWHERE = {
    "moe.shared_factor": "as weights of one half (below)",
    "rope.kind = 'proportional'": "as other_rope.kind",
    "other_rope.pairs = 'neighbours'": "as rope.pairs",
    "other_rope.pairs = 'swapped'": "as rope.pairs", "other_rope.kind = 'linear'": "as rope.kind",
    "other_rope.kind = 'llama3'": "as rope.kind", "other_rope.kind = 'yarn'": "as rope.kind",
    "other_rope.factor": "as rope.factor", "other_rope.low_frequency_factor": "as rope",
    "other_rope.high_frequency_factor": "as rope", "other_rope.original_context": "as rope",
    "other_rope.fast_rotations": "as rope", "other_rope.slow_rotations": "as rope",
    "other_rope.whole_pairs = False": "as rope", "other_rope.attention_factor": "as rope",
    "other_rope.kind = 'longrope'": "as rope.kind", "other_rope.short_factors": "as rope",
    "other_rope.long_factors": "as rope", "other_rope.long_attention_factor": "as rope",
    "attention.index.epsilon": "the families' code has 1e-6, which is the default",
    "attention.latent.epsilon": "the families' code has 1e-6, which is the default",
    "layers.parallel = True": "llama.cpp's logits",
    "recurrence.output_norm = False": "llama.cpp's logits",
    "ffn.activation = 'xielu'": "llama.cpp's logits", "ffn.curves": "llama.cpp's logits",
    "ffn.limits": "llama.cpp's logits", "ffn.other_limits": "llama.cpp's logits",
    "ffn.limit_of = 'activation'": "llama.cpp's logits",
    **{f"attention.pooled.{key}": "llama.cpp's logits"
       for key in ("blocks", "groups", "output_rank", "overlapping", "query_rank", "rotated")},
    "moe.listed_layers": "llama.cpp's logits", "moe.router = 'root_softplus'": "llama.cpp's logits",
    "layer_embedding.vocab": "a table with fewer rows (test_layer_embeddings)",
    "predictor.recall": "a figure, no operator", "predictor.active": "a figure, no operator",
}  # fmt: skip
"""What no golden states, and why that is well: one class computes both tables of positions."""


@pytest.fixture(scope="module")
def stated() -> dict[str, set[str]]:
    """Options that each golden model states."""
    models = {name: describe_checkpoint(FOLDER / name).model for name in list_goldens()}
    return {
        name: {
            option
            for key in OPERATORS
            for option in list_stated(getattr(model, key), Model.model_fields[key].default, key)
        }
        for name, model in models.items()
    }


def list_options(kind: type[BaseModel], prefix: str) -> Iterator[str]:
    """Values of choices, and other keys, of a table."""
    for name, field in kind.model_fields.items():
        yield from list_values(field.annotation, f"{prefix}{name}")


def list_values(annotation: Any, key: str) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Literal:
        yield from (f"{key} = {value!r}" for value in get_args(annotation))
    elif annotation is bool:
        yield from (f"{key} = {value}" for value in (False, True))
    elif origin is types.UnionType:
        kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType]
        yield from list_values(kinds[0], key)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from list_options(annotation, f"{key}.")
    else:
        yield key


def list_stated(value: Any, default: Any, key: str) -> Iterator[str]:
    """Options that a value states; numbers count where they are not the default."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            yield from list_stated(getattr(value, name), field.default, f"{key}.{name}")
    elif isinstance(value, (bool, str)):
        yield f"{key} = {value!r}"
    elif value is not None and value != default:
        yield key


def test_every_option_is_compared_with_the_reference_implementation(
    stated: dict[str, set[str]],
) -> None:
    wanted = {
        option
        for key in OPERATORS
        for option in list_values(Model.model_fields[key].annotation, key)
    }
    assert sorted(wanted.difference(*stated.values())) == sorted(ELSEWHERE)


def test_models_that_the_cpu_computes_on_each_push_have_every_option(
    stated: dict[str, set[str]],
) -> None:
    wanted = set[str]().union(*(stated[name] for name in COMPARED))
    assert wanted == set[str]().union(*(stated[name] for name in COVERING))
    for name in COVERING:
        others = (stated[other] for other in COVERING - {name})
        assert stated[name].difference(*others), f"{name} covers nothing"


def test_shared_experts_may_have_no_router(tmp_path: Path) -> None:
    """Weights of one half are those of a router that knows nothing."""
    halved = run_shared(tmp_path / "halved", {}, 0.5)
    ignorant = run_shared(tmp_path / "ignorant", {"shared_gate": True}, 1.0)
    np.testing.assert_allclose(halved, ignorant, atol=1e-5)
    stated = run_shared(tmp_path / "stated", {"shared_factor": 0.5}, 1.0)
    np.testing.assert_allclose(halved, stated, atol=1e-5)
    assert np.abs(run_shared(tmp_path / "whole", {}, 1.0) - halved).max() > 0.01


def run_shared(folder: Path, change: dict[str, bool | float], factor: float) -> F32:
    """Logits of a mixture whose shared router is zero, and what shared experts give scaled."""
    checkpoint = copy_checkpoint("qwen2-moe", folder / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    for name in tensors:
        if "shared_expert_gate" in name:
            tensors[name] *= 0
        if "shared_expert.down" in name:
            tensors[name] *= factor
    save_file(tensors, checkpoint / "model.safetensors")
    made = describe_checkpoint(checkpoint, "golden").model
    assert made.moe is not None
    moe = made.moe.model_copy(update={"shared_gate": False, **change})
    model = made.model_copy(update={"moe": moe, "quantization": Quantization.model_validate(EXACT)})
    convert_checkpoint(checkpoint, model, folder / "store")
    with pi2.load(write_plan(folder, model, {})) as loaded:
        return loaded.logits([1, 5, 9, 23])
