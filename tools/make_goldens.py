"""Makes the golden models of tests/golden/models: tiny random models of every family, and what the
reference implementation (Hugging Face transformers, float32) computes with them.

Needs torch and transformers, which pi2 itself does not.  ``python tools/make_goldens.py`` writes
all, ``python tools/make_goldens.py NAME...`` some.  Each folder holds a checkpoint (config.json,
model.safetensors in fp16) and golden.npz: ``prompt`` int64 [n], ``logits`` float32 [n, vocab] after
each of its tokens, ``greedy`` int64 [32], the tokens that follow it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

import golden_decoders
import golden_gemma
import golden_mixtures
import golden_states
import golden_variants as variants
from golden_options import VOCAB, Options
from golden_ternary import QUANTIZATION, pack_projections, round_projections

FOLDER = Path(__file__).resolve().parents[1] / "tests/golden/models"
PROMPT = 24
GREEDY = 32
SMALLEST_GAP = 1e-3
"""Between the best and the next logit, of the largest: else another seed is taken, because a
rounding error could change the text."""
CLEAR_CHOICE = 1e-3
"""Between the worst key that an index chooses for the prompt and the best other one, likewise."""


COMMON: Options = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
UNKNOWN = {
    "Falcon": ("num_key_value_heads", "intermediate_size"),
    "GPTBigCode": (
        *("num_key_value_heads", "intermediate_size", "hidden_size"),
        *("num_hidden_layers", "num_attention_heads"),
    ),
    "GPTJ": ("num_key_value_heads", "intermediate_size"),
    **dict.fromkeys(
        ("Bloom", "Mpt"), ("num_key_value_heads", "intermediate_size", "max_position_embeddings")
    ),
    "GPTNeoX": ("num_key_value_heads",),
    **dict.fromkeys(
        ("FalconMamba", "Mamba", "Mamba2"),
        (
            *("num_attention_heads", "num_key_value_heads", "intermediate_size"),
            "max_position_embeddings",
        ),
    ),
    "Kolibri1": ("intermediate_size",),
    "OPT": ("num_key_value_heads", "intermediate_size"),
}
"""Common options that a family has under other names or not at all."""


MODELS: dict[str, tuple[str, Options]] = {
    **golden_decoders.MODELS,
    **golden_gemma.MODELS,
    **golden_mixtures.MODELS,
    **golden_states.MODELS,
}
"""Class and options of every golden model, by its folder."""


def make_model(family: str, options: Options, seed: int) -> torch.nn.Module:
    """A model whose random weights fit into fp16 exactly."""
    unknown = UNKNOWN.get(family, ())
    common = {key: value for key, value in COMMON.items() if key not in unknown}
    torch.manual_seed(seed)
    if family in variants.BUILDERS:
        model = variants.BUILDERS[family](common | options)
    else:
        config = getattr(transformers, f"{family}Config")
        # A few families have the code of another one.
        kind = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM", None)
        kind = kind or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]
        model = variants.make(kind, config, common | options)
    if hasattr(model.config, "num_experts_per_tok") or options.get("enable_moe_block"):
        # The others want widths that are multiples of four.
        model.set_experts_implementation("eager")
    tied = model.config.tie_word_embeddings
    buffers = ("e_score_correction_bias", "layer_scalar")
    others = [pair for pair in model.named_buffers() if pair[0].endswith(buffers)]
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *others):
            drawn = torch.randn_like(values)
            if values.dim() > 1 and "embed" not in name and "wte" not in name:
                drawn *= 1.5 / math.sqrt(values.shape[-1])
            elif values.dim() > 1 and tied:
                # Otherwise the best next token would always be the same one again.
                drawn *= 0.1
            elif values.dim() == 1:
                drawn *= 0.2
                is_norm = "norm" in name and name.endswith("weight")
                if name.endswith(("router.scale", "per_expert_scale")):
                    drawn += 1.0
                plain = not family.startswith("Gemma") or family.startswith(("Gemma3n", "Gemma4"))
                if is_norm and plain:
                    drawn += 1.0
                if name.endswith("layer_scalar"):
                    drawn += 0.8
                if "ln_" in name and name.endswith("weight"):
                    drawn += 1.0
            values.copy_(drawn.half().float())
        if family == "BitNet":
            round_projections(model)
    return model


@contextmanager
def watch_choices(found: list[float]) -> Iterator[None]:
    """Note for every query how far the scores that an index chooses are from the others."""
    choose = torch.Tensor.topk

    def note(scores: torch.Tensor, k: int, *rest: Any, **more: Any) -> Any:
        rows = scores.flatten(0, -2)
        for row in rows if scores.dim() > 2 else ():
            finite = row[row.isfinite() & (row > -1e30)]
            best = finite.sort(descending=True).values
            # Blocks that are always chosen have infinite scores.
            limit = k - int(row.isposinf().sum())
            if len(best) > limit > 0:
                found.append(float((best[limit - 1] - best[limit]) / best.abs().max()))
        return choose(scores, k, *rest, **more)

    with patch.object(torch.Tensor, "topk", note):
        yield


def compute(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[np.ndarray, list[int], float]:
    """Logits of the prompt, the greedy tokens, and the smallest gap between the best two."""
    tokens = prompt[None]
    gaps, greedy, first = [], [], None
    with torch.no_grad():
        for _ in range(GREEDY):
            logits = model(tokens, use_cache=False).logits[0]
            if first is None:
                first = logits.numpy().astype(np.float32)
            best = logits[-1].topk(2)
            gaps.append(float((best.values[0] - best.values[1]) / logits[-1].abs().max()))
            greedy.append(int(best.indices[0]))
            tokens = torch.cat([tokens, best.indices[:1][None]], dim=1)
    assert first is not None
    return first, greedy, min(gaps)


def write_golden(name: str) -> None:
    """Write the folder of one golden model."""
    family, options = MODELS[name]
    for seed in range(500):
        model = make_model(family, options, seed)
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, VOCAB, (PROMPT,), generator=generator)
        choices: list[float] = []
        with watch_choices(choices), torch.no_grad():
            model(prompt[None], use_cache=False)
        if min(choices, default=1.0) < CLEAR_CHOICE:
            continue
        logits, greedy, gap = compute(model, prompt)
        if gap >= SMALLEST_GAP and len(set(greedy)) > 4:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a clear text")
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version", None)
    if family in variants.BUILDERS:
        config |= {"model_type": family, "architectures": None, **variants.SAID[family]}
        config = {key: value for key, value in config.items() if value is not None}
        file = folder / "model.safetensors"
        tensors = {variants.rename(family, key): value for key, value in load_file(file).items()}
        save_file(tensors | variants.draw_predictors(family, config, seed), file)
    if family == "BitNet":
        config["quantization_config"] = QUANTIZATION
        file = folder / "model.safetensors"
        save_file(pack_projections(load_file(file)), file)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(
        folder / "golden.npz", prompt=prompt.numpy(), logits=logits, greedy=np.array(greedy)
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, gap {gap:.1e}, {size / 1024:.0f} KiB")


def main() -> None:
    """Write the golden models that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME")
    for name in parser.parse_args().names or MODELS:
        write_golden(name)


if __name__ == "__main__":
    main()
