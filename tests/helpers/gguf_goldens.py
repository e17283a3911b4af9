"""Golden models as GGUF files can say them, and a comparison of two stores."""

from pathlib import Path
from typing import Any

from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Quantization

LONG: dict[str, Any] = {
    "rope_type": "longrope", "attention_factor": 1.25, "rope_theta": 10000.0,
    "original_max_position_embeddings": 100, "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
"""LongRoPE with the one factor of sines and cosines that a file has."""


UNSAID: dict[str, dict[str, Any]] = {
    "phi3-longrope": {
        "rope_parameters": LONG
        | {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "partial_rotary_factor": 0.75}
        | {"long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 9.0]}
    },
    "phimoe": {"rope_parameters": LONG, "router_jitter_noise": 0.01},
}
"""What GGUF files cannot say, as llama.cpp has it."""


def convert(source: Path, store: Path, tokenizer: Path | None, changes: dict[str, Any]) -> Model:
    """Convert ``source`` with the document that is made from it, with other precisions."""
    model = describe_checkpoint(source, "golden").model
    chosen = model.quantization.model_dump() | changes
    model = model.model_copy(update={"quantization": Quantization.model_validate(chosen)})
    convert_checkpoint(source, model, store, tokenizer=tokenizer)
    return model


def expect_same_weights(one: Path, other: Path) -> None:
    files = sorted(path.relative_to(one) for path in one.rglob("*.arrow"))
    assert len(files) >= 2
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def forget_names(model: Model) -> dict[str, Any]:
    """What must be equal, however the checkpoint is stored."""
    values = model.model_dump(mode="json")
    for key in ("name", "description", "tokenizer"):
        del values[key]
    apart = {"gate_up_order", "experts_turned", "router", "choice_bias"}
    parts = ("fused_", "index_", "gate", "up", "down", "shared_")
    for key in list(values["tensors"]):
        if key in apart or key.startswith(("state_", *parts)):
            del values["tensors"][key]
    return values
