"""Figures of the finished demo model: perplexity, sparsity, predictor quality, samples."""

from __future__ import annotations

import json
import math
import platform
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from demo.corpus import Corpus, separator_id
from demo.evaluation import evaluate, heldout_stream, quantised_copy
from demo.export import load_model, write_text
from demo.model import DemoModel
from demo.predictors import Predictor, logits_of

PROMPTS = ("def ", "class Stack:\n", "import os\n\ndef read_file(path):\n    ")


class SparseRun:
    """Hook that keeps only predicted neurons and counts how well they were predicted."""

    def __init__(self, predictors: list[Predictor], apply: bool) -> None:
        self.predictors, self.apply, self.lock = predictors, apply, threading.Lock()
        self.hits, self.said, self.truth, self.tokens, self.share = (
            torch.zeros(len(predictors), dtype=torch.float64) for _ in range(5)
        )

    def __call__(self, layer: int, x: Tensor, h: Tensor) -> Tensor:
        guess = logits_of(x, self.predictors[layer]) >= 0
        active = h > 0
        hits, truth = (guess & active).sum(-1).double(), active.sum(-1).double()
        share = torch.where(truth > 0, hits / truth.clamp(min=1), 1.0)
        with self.lock:
            self.hits[layer] += hits.sum()
            self.said[layer] += guess.double().mean(-1).sum()
            self.truth[layer] += truth.sum()
            self.share[layer] += share.sum()
            self.tokens[layer] += truth.numel()
        return h * guess if self.apply else h

    def figures(self) -> dict[str, Any]:
        """Per layer: recall over all active neurons, mean recall of tokens, predicted share."""
        recall, by_token = self.hits / self.truth, self.share / self.tokens
        said = self.said / self.tokens
        return {
            "recall": [round(float(v), 5) for v in recall],
            "recall_mean_over_tokens": [round(float(v), 5) for v in by_token],
            "predicted_active": [round(float(v), 5) for v in said],
            "mean_recall": round(float(recall.mean()), 5),
            "mean_recall_over_tokens": round(float(by_token.mean()), 5),
            "mean_predicted_active": round(float(said.mean()), 5),
        }


def read_predictors(path: Path, layers: int) -> list[Predictor]:
    """The predictors of a checkpoint folder."""
    tensors = load_file(path)
    names = [f"model.layers.{layer}.mlp.predictor." for layer in range(layers)]
    return [(tensors[n + "fc1.weight"], tensors[n + "fc2.weight"], tensors[n + "bias"])
            for n in names]  # fmt: skip


@torch.no_grad()
def complete(
    model: DemoModel, corpus: Corpus, prompt: str, count: int, temperature: float, hook: Any
) -> str:
    """Continue a prompt; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(7)
    end = separator_id(corpus.tokenizer)
    ids = [end, *corpus.tokenizer.encode(prompt).ids]
    zero = torch.zeros(model.cfg.num_hidden_layers)
    for _ in range(count):
        logits = model(torch.tensor([ids]), zero, hook=hook)[0][0, -1]
        if temperature > 0:
            chance = (logits / temperature).softmax(-1)
            token = int(torch.multinomial(chance, 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == end:
            break
        ids.append(token)
    text: str = corpus.tokenizer.decode(ids[1:])
    return text


def shorten(figures: dict[str, Any], size: int) -> dict[str, Any]:
    """The part of an evaluation worth keeping."""
    share = figures["activation"]
    return {
        "loss_per_token": round(figures["loss"], 5),
        "perplexity_per_token": round(figures["perplexity"], 4),
        "bits_per_byte": round(figures["nll"] / math.log(2) / size, 5),
        "activation": share,
        "mean_activation": round(sum(share) / len(share), 5),
    }


def report(
    corpus: Corpus, folder: Path, checkpoint: Path, target: Path, notes: list[str]
) -> dict[str, Any]:
    """Measure everything on the held-out text and write ``training.json``."""
    model, saved = load_model(checkpoint)
    quant = quantised_copy(model)
    predictors = read_predictors(target / "predictors.safetensors", model.cfg.num_hidden_layers)
    stream, size = heldout_stream(corpus)
    watch, sparse = SparseRun(predictors, apply=False), SparseRun(predictors, apply=True)
    runs = {
        "float32_dense": shorten(evaluate(model, stream), size),
        "int4_dense": shorten(evaluate(quant, stream, hook=watch), size),
        "int4_sparse": shorten(evaluate(quant, stream, hook=sparse), size),
        "int4_dense_context_1024": shorten(evaluate(quant, stream, length=1024), size),
    }
    samples = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.7):
            text = complete(quant, corpus, prompt, 96, temperature, sparse_hook(predictors))
            samples.append({"prompt": prompt, "temperature": temperature, "text": text})
            print(f"--- {prompt!r} at {temperature}\n{text}", flush=True)
    progress, recipe = saved["progress"], json.loads(saved["recipe"])
    result = {
        "model": "pi2-demo",
        "text_licence": "PSF-2.0",
        "notes": notes,
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": recipe,
        "finished": saved["done"],
        "steps": progress["step"],
        "tokens_seen": progress["tokens"],
        "wall_minutes": round(progress["seconds"] / 60, 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "corpus": json.loads((folder / "corpus.json").read_text()),
        "heldout": {"tokens": len(stream), "bytes": size, "context": 512, **runs},
        "predictors": {
            "rank": int(predictors[0][0].shape[0]),
            "dense_run": watch.figures(),
            "sparse_run": sparse.figures(),
        },
        "loss_curve": progress["curve"][:: max(1, len(progress["curve"]) // 40)],
        "last_loss": progress["curve"][-1:],
        "evaluations": progress["evals"],
        "samples": samples,
    }
    write_text(target / "training.json", json.dumps(result, indent=1) + "\n")
    return result


def sparse_hook(predictors: list[Predictor]) -> Any:
    """A hook that drops what the predictors do not choose."""

    def hook(layer: int, x: Tensor, h: Tensor) -> Tensor:
        return h * (logits_of(x, predictors[layer]) >= 0)

    return hook
