"""The golden models of tests/golden/models, and folders of models that transformers made."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

import pi2
from pi2.arrays import F32
from pi2.backends.cpu.arrays import count_arrays
from pi2.backends.cpu.executor import CpuExecutor
from pi2.backends.cpu.request import describe_request, describe_tensors
from pi2.backends.gpu.arrays import Memory
from pi2.backends.gpu.model import GpuModel
from pi2.backends.gpu.model_arrays import ModelArrays, describe_use
from pi2.engine.layer_model import LayerModel
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.machine.cpu import detect_cpu
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Quantization

FOLDER = Path(__file__).resolve().parents[1] / "golden/models"
EXACT = dict.fromkeys(("ffn", "attention", "embedding", "head", "predictor"), "fp16")
"""Quantisation that keeps fp16 weights as they are."""
UNROUNDED = {"kv.type": "fp32", "decode.activations": "fp32", "prefill.activations": "fp32"}
"""What makes the cpu backend round nothing but the weights (docs/reference/exactness.md)."""
CPU = {"backends.cpu": "cpu", **UNROUNDED}
ROUNDING = 1e-4
"""Of the largest logit: products of several tokens are added up in another order than one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    prompt: list[int]
    logits: F32
    greedy: list[int]


def list_goldens() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/golden.npz"))


def read_golden(name: str) -> Golden:
    with np.load(FOLDER / name / "golden.npz") as arrays:
        return Golden(
            prompt=arrays["prompt"].tolist(),
            logits=arrays["logits"],
            greedy=arrays["greedy"].tolist(),
        )


def make_small_tokenizer(vocab: int) -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(tokenizer.to_str()).encode()


def copy_checkpoint(name: str, folder: Path) -> Path:
    """Copy a golden model's checkpoint to ``folder`` and add a tokenizer."""
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / name / file, folder)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "tokenizer.json").write_bytes(make_small_tokenizer(vocab))
    return folder


def change_config(checkpoint: Path, **values: Any) -> None:
    """Replace values of config.json; None removes a key."""
    file = checkpoint / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def convert_golden(checkpoint: Path, folder: Path, quantization: Mapping[str, str]) -> Model:
    """Convert a checkpoint into ``folder / "store"``, with a model file and a plan beside it."""
    made = describe_checkpoint(checkpoint, "golden").model
    model = made.model_copy(
        update={"quantization": Quantization.model_validate(dict(quantization))}
    )
    convert_checkpoint(checkpoint, model, folder / "store")
    return model


def write_plan(folder: Path, model: Model, changes: Mapping[str, Any]) -> Path:
    """Write a plan for ``folder / "store"`` with everything in memory, dense decoding."""
    import tomlkit

    values = model.model_dump(mode="json", exclude_none=True)
    (folder / "golden.model.toml").write_text(tomlkit.dumps(values))
    names = ("attention", "kv", "state", "predictor", "hot", "cold", "workspace")
    segments = dict.fromkeys(names, "64 MiB")
    document: dict[str, Any] = {
        "schema_version": 3, "device": "host", "model": "./golden.model.toml", "weights": "store",
        "backends": {"cpu": "reference"},
        "memory": {"budget": "2 GiB", "segments": {"runtime": "300 MiB", **segments}},
        "bundle": {"stride": f"{model.lay_out_bundle().stride} B"},
        "layers": {"split": {"cpu": 1.0}, "hot": 0.5}, "prefill": {"chunk": 7},
        "decode": {"predictor": "none"}, "kv": {"context": 64},
    }  # fmt: skip
    path = folder / "golden.plan.toml"
    path.write_text(tomlkit.dumps(document | dict(changes)))
    return path


def make_golden_plan(
    name: str,
    folder: Path,
    quantization: Mapping[str, str] = EXACT,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Convert a golden model into ``folder`` and write a plan for it there."""
    model = convert_golden(copy_checkpoint(name, folder / "checkpoint"), folder, quantization)
    return write_plan(folder, model, changes)


def run_golden(
    plan: Path, golden: Golden, tokens: int = 32, settings: Mapping[str, str] = MappingProxyType({})
) -> tuple[F32, list[int]]:
    """Logits of the prompt, and the greedy tokens after it, with ``settings`` of the plan."""
    with pi2.load(plan, set=dict(settings)) as model:
        check_arrays(model)
        logits = model.logits(golden.prompt)
        generation = model.generate(
            golden.prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True
        )
        for _ in generation:
            pass
        return logits, list(generation.result.token_ids)


def check_arrays(model: pi2.LoadedModel) -> None:
    """The backend cpu has taken, by segment and to the byte, what the plan counts for this
    processor's registers, and a GPU what it counts there; copies of a store's vectors that lie
    badly are the predictor's."""
    layers, plan = model._parts.model, model.plan
    if isinstance(layers, GpuModel):
        memory = Memory()
        ModelArrays(memory, describe_use(plan), is_real=False)
        assert layers._device.launcher.allocated_bytes == memory.device_bytes
    if not isinstance(layers, LayerModel) or not isinstance(layers.executor, CpuExecutor):
        return
    program, cpu = layers.executor.program, detect_cpu()
    request = describe_request(
        plan,
        describe_tensors(plan.model),
        threads=model._parts.compute_threads,
        chunks=plan.chunks,
        features=cpu.features,
        architecture=cpu.architecture,
    )
    taken = {**program.memory.sizes}
    taken.pop("predictor", None)
    assert count_arrays(request, program.interpreter.lanes) == taken


def measure_error(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def compute_decoded(plan: Path, ids: list[int], changes: Mapping[str, Any]) -> F32:
    """Logits [n, vocab] of ``ids``, which come one by one, with ``changes`` of the plan."""
    with pi2.load(plan, set=dict(changes)) as model:
        return model.logits(ids, mode="decode")


def check_sequences_together(plan: Path, changes: Mapping[str, Any]) -> None:
    """Two sequences that take their steps together compute what each does alone."""
    prompts = [[5, 9, 33, 60, 12, 7, 41], [8, 3, 77]]
    found: list[list[F32]] = [[], []]
    with pi2.load(plan, set={**changes, "decode.batch": 2}) as model:
        forward = model._parts.forward
        check_arrays(model)
        for place, prompt in enumerate(prompts):
            forward.prefill(np.array(prompt, np.int32), sequence=place)
        for step in range(4):
            for own, row in zip(found, forward.step([10 + step, 20 + step], [0, 1]), strict=True):
                own.append(row.copy())
    for place, prompt in enumerate(prompts):
        tokens = [10 * (place + 1) + step for step in range(4)]
        alone = compute_decoded(plan, [*prompt, *tokens], changes)[-4:]
        assert measure_error(np.array(found[place]), alone) <= ROUNDING
