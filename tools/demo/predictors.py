"""Activation predictors of the demo model, and the statistics of its neurons.

A predictor is logits = fc2 @ relu(fc1 @ x) + bias with x the output of the layer's FFN norm; a
neuron is predicted active when its logit is >= 0. Labels come from the model with INT4 weights,
since that is what runs; only text of the training split is used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from demo.corpus import Corpus
from demo.evaluation import parallel, quantised_copy
from demo.export import load_model, write_tensors
from demo.model import DemoModel

WINDOW = 512


@dataclass(frozen=True)
class PredictorRecipe:
    """Settings of the predictors' training."""

    rank: int = 96
    tokens: int = 250_000
    minutes: float = 8.0
    batch: int = 1024
    rate: float = 3e-3
    active_weight: float = 6.0
    recall: float = 0.975
    check_share: float = 0.1
    threads: int = 2
    seed: int = 1


@dataclass
class Samples:
    """Inputs and labels of every layer."""

    inputs: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)


Predictor = tuple[Tensor, Tensor, Tensor]


def collect(model: DemoModel, corpus: Corpus, recipe: PredictorRecipe) -> Samples:
    """Run the model over training text and keep what every FFN sees and does."""
    stream = corpus.epoch(recipe.seed, 1000, 0.35)
    tokens = min(recipe.tokens, len(stream) - 1) // WINDOW * WINDOW
    ids = torch.from_numpy(stream[:tokens].astype(np.int64)).view(-1, WINDOW)
    cfg = model.cfg
    layers = range(cfg.num_hidden_layers)
    samples = Samples(
        [torch.empty(tokens, cfg.hidden_size, dtype=torch.half) for _ in layers],
        [torch.empty(tokens, cfg.intermediate_size, dtype=torch.bool) for _ in layers],
    )
    zero = torch.zeros(cfg.num_hidden_layers)

    @torch.no_grad()
    def run(index: int) -> None:
        def hook(layer: int, x: Tensor, h: Tensor) -> Tensor:
            rows = slice(index * WINDOW, (index + 1) * WINDOW)
            samples.inputs[layer][rows] = x[0].half()
            samples.labels[layer][rows] = h[0] > 0
            return h

        model(ids[index : index + 1], zero, hook=hook)

    parallel(run, range(len(ids)), recipe.threads)
    return samples


def logits_of(x: Tensor, predictor: Predictor) -> Tensor:
    """Scores of every neuron."""
    fc1, fc2, bias = predictor
    return F.linear(F.linear(x, fc1).relu(), fc2, bias)


def slope(scores: Tensor, active: Tensor, weight: float) -> Tensor:
    """Gradient of the mean weighted cross-entropy, in fewer passes than autograd makes."""
    share = scores.sigmoid()
    return torch.where(active, weight * (share - 1), share).div_(scores.numel())


def fit(x: Tensor, active: Tensor, recipe: PredictorRecipe, minutes: float) -> Predictor:
    """Train one layer's predictor for a given time."""
    generator = torch.Generator().manual_seed(recipe.seed)
    rank, hidden, neurons = recipe.rank, x.shape[1], active.shape[1]
    fc1 = torch.randn(rank, hidden, generator=generator) * hidden**-0.5
    fc2 = torch.randn(neurons, rank, generator=generator) * rank**-0.5
    odds = active[:20_000].float().mean(0).clamp(1e-4, 0.9)
    bias = (recipe.active_weight * odds / (1 - odds)).log()
    weights = [w.requires_grad_() for w in (fc1, fc2, bias)]
    adam = torch.optim.AdamW(weights, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
    begin, spent, step = time.monotonic(), 0.0, 0
    while spent < 1.0:
        order = torch.randperm(len(x), generator=generator)
        for rows in order.split(recipe.batch):
            spent = (time.monotonic() - begin) / (60 * minutes)
            if spent >= 1.0:
                break
            step += 1
            rate = recipe.rate * min(1.0, step / 50) * min(1.0, (1 - spent) / 0.6)
            adam.param_groups[0]["lr"] = rate
            scores = logits_of(x[rows].float(), (fc1, fc2, bias))
            scores.backward(slope(scores.detach(), active[rows], recipe.active_weight))
            adam.step()
            adam.zero_grad()
    print(f"{step} steps, {step * recipe.batch / len(x):.1f} passes", flush=True)
    return fc1.detach(), fc2.detach(), bias.detach()


@torch.no_grad()
def calibrate(x: Tensor, active: Tensor, predictor: Predictor, recall: float) -> Predictor:
    """Move the bias so that the wanted recall is met on text not trained on.

    One offset for the layer: with calibrated scores this is the cut with the fewest neurons.
    """
    fc1, fc2, bias = predictor
    scores = torch.cat(
        [logits_of(a.float(), predictor)[b] for a, b in zip(x.split(4096), active.split(4096),
                                                            strict=True)]
    )  # fmt: skip
    cut = scores.kthvalue(max(1, int((1 - recall) * len(scores)))).values
    return fc1, fc2, bias - cut


@torch.no_grad()
def quality(x: Tensor, active: Tensor, predictor: Predictor) -> tuple[float, float, float]:
    """Recall, share predicted active, share truly active."""
    hits = said = truth = 0
    for a, b in zip(x.split(4096), active.split(4096), strict=True):
        guess = logits_of(a.float(), predictor) >= 0
        hits += int((guess & b).sum())
        said += int(guess.sum())
        truth += int(b.sum())
    return hits / truth, said / active.numel(), truth / active.numel()


def write_counts(path: Path, samples: Samples) -> None:
    """How many tokens activated each neuron."""
    counts = [labels.sum(0).numpy().astype(np.int64) for labels in samples.labels]
    neurons = len(counts[0])
    schema = pa.schema(
        [("layer", pa.int16()), ("neuron", pa.int32()), ("count", pa.int64())],
        metadata={"tokens": str(len(samples.labels[0]))},
    )
    table = pa.table(
        [
            pa.array(np.repeat(np.arange(len(counts), dtype=np.int16), neurons)),
            pa.array(np.tile(np.arange(neurons, dtype=np.int32), len(counts))),
            pa.array(np.concatenate(counts)),
        ],
        schema=schema,
    )
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(table, temporary)
    temporary.replace(path)


def train_predictors(
    corpus: Corpus, checkpoint: Path, target: Path, recipe: PredictorRecipe
) -> list[dict[str, Any]]:
    """Train, calibrate and write every layer's predictor, and the neuron statistics."""
    model, saved = load_model(checkpoint)
    samples = collect(quantised_copy(model), corpus, recipe)
    write_counts(target / "activations.parquet", samples)
    cut = int(len(samples.inputs[0]) * (1 - recipe.check_share))
    layers = model.cfg.num_hidden_layers
    minutes = recipe.minutes * recipe.threads / layers

    def build(layer: int) -> tuple[Predictor, dict[str, Any]]:
        x, active = samples.inputs[layer], samples.labels[layer]
        predictor = fit(x[:cut], active[:cut], recipe, minutes)
        predictor = calibrate(x[cut:], active[cut:], predictor, recipe.recall)
        recall, said, truth = quality(x[cut:], active[cut:], predictor)
        entry = {"layer": layer, "recall": recall, "predicted": said, "active": truth}
        print(entry, flush=True)
        return predictor, entry

    results = parallel(build, range(layers), recipe.threads)
    tensors = {
        f"model.layers.{layer}.mlp.predictor.{name}": value
        for layer, (predictor, _) in enumerate(results)
        for name, value in zip(("fc1.weight", "fc2.weight", "bias"), predictor, strict=True)
    }
    metadata = {
        "format": "pt",
        "kind": "pi2-ffn-predictor",
        "rule": "fc2 @ relu(fc1 @ x) + bias >= 0, x = post_attention_layernorm output",
        "rank": str(recipe.rank),
        "calibration_recall": str(recipe.recall),
        "training_tokens": str(saved["progress"]["tokens"]),
    }
    write_tensors(target / "predictors.safetensors", tensors, metadata)
    return [entry for _, entry in results]
