"""Training of the demo model: Muon and AdamW under a wall-clock budget."""

from __future__ import annotations

import json
import math
import os
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo.corpus import Corpus
from demo.evaluation import evaluate, heldout_stream, quantised_copy
from demo.model import DemoConfig, DemoModel
from demo.muon import Muon


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run; stored in every checkpoint and in ``training.json``."""

    minutes: float = 85.0
    seed: int = 1
    threads: int = 2
    step_tokens: int = 4096
    micro_tokens: int = 1024
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_decay: float = 0.1
    adam_lr: float = 0.004
    warmup_steps: int = 60
    decay_share: float = 0.35
    quant_share: float = 0.18
    test_share: float = 0.35
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256), (0.80, 512), (0.92, 1024))
    activation_target: float = 0.10
    pressure_start: float = 1e-3
    pressure_top: float = 1.0
    recycle_points: tuple[float, ...] = (0.3, 0.5, 0.7, 0.75)
    recycle_below: float = 0.003
    save_minutes: float = 3.0
    eval_minutes: float = 15.0


@dataclass
class Progress:
    """Everything besides weights and optimiser state that a resumed run needs."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    position: int = 0
    length: int = 0
    recycled: int = 0
    curve: list[list[float]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)


class Workers:
    """Threads with one core each, every one with a replica of the model that shares its weights.

    Pieces of a batch go to whichever worker is free. Beside other work on the machine that is
    far faster than two threads inside every operator, which wait for each other all the time.
    """

    def __init__(self, model: DemoModel, count: int) -> None:
        self.model = model
        self.replicas = [DemoModel(model.cfg) for _ in range(count)]
        for replica in self.replicas:
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data
        self.free: queue.SimpleQueue[DemoModel] = queue.SimpleQueue()
        for replica in self.replicas:
            self.free.put(replica)
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))

    def piece(self, ids: Tensor, pieces: int, push: Tensor, quant: bool) -> tuple[float, Tensor]:
        """Forward and backward of one piece of a batch; its part of the loss and the shares."""
        replica = self.free.get()
        logits, share = replica(ids[:, :-1], push, quant)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / pieces
        loss.backward()
        self.free.put(replica)
        return float(loss.detach()), share / pieces

    def gather(self) -> None:
        """Sum the replicas' gradients into the model's."""
        for param, *copies in zip(
            self.model.parameters(), *(r.parameters() for r in self.replicas), strict=True
        ):
            grads = [c.grad for c in copies if c.grad is not None]
            for grad in grads[1:]:
                grads[0].add_(grad)
            param.grad = grads[0]
            for copy in copies:
                copy.grad = None


class Pressure:
    """Per-layer L1 coefficient, steered slowly towards a share of active neurons."""

    def __init__(self, recipe: Recipe, layers: int, neurons: int) -> None:
        self.recipe = recipe
        self.value = torch.full((layers,), recipe.pressure_start)
        self.share = torch.full((layers,), 0.25)
        self.neurons = torch.full((layers, neurons), 0.25)

    def update(self, shares: Tensor) -> None:
        """Take the shares [layers, neurons] of one step into account."""
        target = self.recipe.activation_target
        self.neurons.lerp_(shares, 0.04)
        self.share.lerp_(shares.mean(1), 0.1)
        error = ((self.share - target) / target).clamp(-1, 1)
        self.value = (self.value * torch.exp(0.015 * error)).clamp(1e-6, self.recipe.pressure_top)


class Batches:
    """Windows of the token stream in seeded order; the state is three numbers."""

    def __init__(self, corpus: Corpus, recipe: Recipe, progress: Progress) -> None:
        self.corpus, self.recipe, self.progress = corpus, recipe, progress
        self.loaded: tuple[int, int] | None = None
        self.stream = np.zeros(0, dtype=np.uint16)
        self.order = np.zeros(0, dtype=np.int64)

    def next(self, length: int) -> Tensor:
        """The next batch: ids [sequences, length + 1]."""
        state, count = self.progress, self.recipe.step_tokens // length
        if state.length not in (0, length):
            state.epoch, state.position = state.epoch + 1, 0
        state.length = length
        self.load(length)
        if state.position + count > len(self.order):
            state.epoch, state.position = state.epoch + 1, 0
            self.load(length)
        picks = self.order[state.position : state.position + count]
        state.position += count
        rows = [self.stream[i * length : (i + 1) * length + 1] for i in picks]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def load(self, length: int) -> None:
        """Build the stream of the current epoch if it is not the loaded one."""
        key = (self.progress.epoch, length)
        if self.loaded != key:
            seed = self.recipe.seed
            self.stream = self.corpus.epoch(seed, key[0], self.recipe.test_share)
            rng = np.random.default_rng((seed, key[0], length, 12))
            self.order = rng.permutation((len(self.stream) - 1) // length)
            self.loaded = key


@torch.no_grad()
def recycle(model: DemoModel, muon: Muon, pressure: Pressure, recipe: Recipe) -> None:
    """Give neurons that hardly ever fire fresh random weights, in layers below the target.

    A dReLU neuron that never fires gets no gradient and would stay lost. Its new output weights
    are zero, so that nothing changes at first.
    """
    momentum = muon.by_parameter()
    generator = torch.Generator().manual_seed(recipe.seed + 7)
    counts = []
    for index, layer in enumerate(model.model.layers):
        idle = pressure.neurons[index] < recipe.recycle_below
        if pressure.share[index] >= recipe.activation_target:
            idle[:] = False
        rows = idle.nonzero().flatten()
        for matrix in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
            fresh = torch.randn(len(rows), matrix.shape[1], generator=generator)
            matrix[rows] = fresh * matrix.norm() / matrix.numel() ** 0.5
            momentum[matrix][rows] = 0.0
        layer.mlp.down_proj.weight[:, rows] = 0.0
        momentum[layer.mlp.down_proj.weight][:, rows] = 0.0
        pressure.neurons[index][rows] = 0.25
        counts.append(len(rows))
    print(f"recycled neurons per layer: {counts}", flush=True)


def save(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint and only then put it in its place."""
    temporary = path.with_suffix(".tmp")
    torch.save(payload, temporary)
    os.replace(temporary, path)


def train(corpus: Corpus, recipe: Recipe, path: Path, resume: bool) -> None:
    """Train until the wall-clock budget is used up, saving to ``path``."""
    torch.manual_seed(recipe.seed)
    cfg = DemoConfig()
    model = DemoModel(cfg)
    model.initialise(torch.Generator().manual_seed(recipe.seed))
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named.items() if p.ndim != 2 or "embed" in n]
    muon = Muon(matrices, recipe.muon_momentum, recipe.muon_decay)
    adam = torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    layers = cfg.num_hidden_layers
    pressure, progress = Pressure(recipe, layers, cfg.intermediate_size), Progress()
    if resume:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        for buffer, old in zip(muon.buffers, saved["muon"], strict=True):
            buffer.copy_(old)
        adam.load_state_dict(saved["adam"])
        pressure.value, pressure.share = saved["pressure"], saved["share"]
        pressure.neurons = saved["neurons"]
        progress = Progress(**saved["progress"])
        torch.set_rng_state(saved["rng"])
    workers = Workers(model, recipe.threads)
    batches = Batches(corpus, recipe, progress)
    stream, _ = heldout_stream(corpus)

    def checkpoint(done: bool) -> None:
        save(
            path,
            {
                "model": model.state_dict(),
                "muon": muon.buffers,
                "adam": adam.state_dict(),
                "pressure": pressure.value,
                "share": pressure.share,
                "neurons": pressure.neurons,
                "progress": asdict(progress),
                "recipe": json.dumps(asdict(recipe)),
                "rng": torch.get_rng_state(),
                "done": done,
            },
        )

    def measure(limit: int) -> None:
        figures = evaluate(quantised_copy(model), stream, limit=limit)
        entry = {
            "step": progress.step,
            "minutes": round(progress.seconds / 60, 2),
            "loss_int4": round(figures["loss"], 4),
            "activation_int4": figures["activation"],
        }
        progress.evals.append(entry)
        print("eval", json.dumps(entry), flush=True)

    clock = time.monotonic() - progress.seconds
    last_save, last_eval = progress.seconds, progress.seconds
    window: list[float] = []
    share_now = 0.0
    while share_now < 1.0:
        progress.seconds = time.monotonic() - clock
        share_now = progress.seconds / (60 * recipe.minutes)
        if share_now >= (*recipe.recycle_points, 2.0)[progress.recycled]:
            progress.recycled += 1
            recycle(model, muon, pressure, recipe)
        length = [n for start, n in recipe.lengths if share_now >= start][-1]
        quant = share_now >= 1 - recipe.quant_share
        rate = min(1.0, (progress.step + 1) / recipe.warmup_steps)
        rate *= min(1.0, max(1 - share_now, 0.0) / recipe.decay_share)
        loss = batch_step(workers, batches.next(length), recipe, pressure, quant)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for layer, share in zip(model.model.layers, pressure.share.tolist(), strict=True):
            # Large steps put neurons out for good: layers short of activity take smaller ones.
            factor = min(1.0, max(0.05, share / recipe.activation_target))
            muon.factors[layer.mlp.gate_proj.weight] = factor
            muon.factors[layer.mlp.up_proj.weight] = factor
        muon.step(recipe.muon_lr * rate, workers.pool)
        for group in adam.param_groups:
            group["lr"] = recipe.adam_lr * rate
        adam.step()
        model.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += recipe.step_tokens
        window.append(loss)
        if progress.step % 20 == 0:
            mean = sum(window) / len(window)
            window.clear()
            progress.curve.append([progress.step, progress.tokens, round(mean, 4)])
            print(
                f"step {progress.step} p {share_now:.3f} min {progress.seconds / 60:.1f} "
                f"loss {mean:.4f} rate {rate:.3f} norm {float(norm):.2f} T {length} "
                f"tok/s {progress.tokens / (time.monotonic() - clock):.0f} "
                f"act {' '.join(f'{100 * s:.1f}' for s in pressure.share.tolist())} "
                f"l1 {' '.join(f'{v:.0e}' for v in pressure.value.tolist())}",
                flush=True,
            )
            if not math.isfinite(mean):
                raise SystemExit("the loss is not finite; start again with lower rates")
        if progress.seconds - last_eval > 60 * recipe.eval_minutes:
            last_eval = progress.seconds
            measure(10_000)
        if progress.seconds - last_save > 60 * recipe.save_minutes:
            last_save = progress.seconds
            checkpoint(done=False)
    progress.seconds = time.monotonic() - clock
    measure(20_000)
    checkpoint(done=True)


def batch_step(
    workers: Workers, ids: Tensor, recipe: Recipe, pressure: Pressure, quant: bool
) -> float:
    """Gradients of one batch, in pieces that fit the caches; returns the mean loss."""
    rows = max(1, recipe.micro_tokens // (ids.shape[1] - 1))
    # The gradient of the mean over tokens and neurons of |h|, times the coefficient.
    push = pressure.value / (recipe.step_tokens * workers.model.cfg.intermediate_size)
    pieces = ids.split(rows)
    tasks = [workers.pool.submit(workers.piece, p, len(pieces), push, quant) for p in pieces]
    results = [task.result() for task in tasks]
    workers.gather()
    pressure.update(torch.stack([share for _, share in results]).sum(0))
    return sum(loss for loss, _ in results)


def read_seed(path: Path) -> int:
    """The seed that a checkpoint was trained with."""
    saved = torch.load(path, weights_only=True)
    return int(json.loads(saved["recipe"])["seed"])
