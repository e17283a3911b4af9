"""Training of the demo model: Muon and AdamW under a wall-clock budget."""

from __future__ import annotations

import json
import math
import os
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo.corpus import Corpus, encode
from demo.model import DemoConfig, DemoModel, quantised_state

T = TypeVar("T")

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


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


def orthogonalise(grad: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices of a batch.

    It works on the small Gram matrix only: X_k = P_k X with P_k a polynomial of X X^T, which
    costs about half of the usual form.
    """
    a, b, c = NEWTON_SCHULZ
    tall = grad.shape[1] > grad.shape[2]
    x = grad.transpose(1, 2) if tall else grad
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    gram = x @ x.transpose(1, 2)
    eye = torch.eye(gram.shape[1])
    total = None
    for turn in range(5):
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) + a * eye
        total = poly if total is None else poly @ total
        if turn < 4:
            gram = poly @ gram @ poly
    assert total is not None
    x = total @ x
    return x.transpose(1, 2) if tall else x


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


class Muon:
    """Momentum with orthogonalised updates, for the matrices of attention and FFN."""

    def __init__(self, params: list[Tensor], momentum: float, decay: float) -> None:
        shapes = sorted({tuple(p.shape) for p in params})
        self.groups = [[p for p in params if tuple(p.shape) == s] for s in shapes]
        self.buffers = [torch.zeros(len(g), *g[0].shape) for g in self.groups]
        self.momentum, self.decay = momentum, decay
        self.factors: dict[Tensor, float] = {}

    def by_parameter(self) -> dict[Tensor, Tensor]:
        """The momentum of every matrix."""
        return {
            param: momentum
            for group, buffer in zip(self.groups, self.buffers, strict=True)
            for param, momentum in zip(group, buffer, strict=True)
        }

    def step(self, rate: float, pool: ThreadPoolExecutor) -> None:
        """One update of every matrix, four at a time."""
        tasks = [
            pool.submit(self.update, group[i : i + 4], buffer[i : i + 4], rate)
            for group, buffer in zip(self.groups, self.buffers, strict=True)
            for i in range(0, len(group), 4)
        ]
        for task in tasks:
            task.result()

    @torch.no_grad()
    def update(self, params: list[Tensor], buffer: Tensor, rate: float) -> None:
        """One update of matrices of equal shape."""
        grads = torch.stack([p.grad for p in params if p.grad is not None])
        buffer.lerp_(grads, 1 - self.momentum)
        update = orthogonalise(grads.lerp_(buffer, self.momentum))
        scale = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
        for param, change in zip(params, update, strict=True):
            own = rate * self.factors.get(param, 1.0)
            param.mul_(1 - own * self.decay)
            param.add_(change, alpha=-own * scale)


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


def heldout_stream(corpus: Corpus) -> tuple[Tensor, int]:
    """Tokens of the held-out documents in one row, and their bytes."""
    ids = np.concatenate([encode(corpus.tokenizer, t) for t in corpus.heldout_texts])
    size = sum(len(t.encode()) for t in corpus.heldout_texts)
    return torch.from_numpy(ids.astype(np.int64)), size


def parallel(function: Callable[[int], T], items: Iterable[int], threads: int) -> list[T]:
    """The function's results, computed by threads with one core each."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(function, items))


def evaluate(
    model: DemoModel,
    stream: Tensor,
    length: int = 512,
    limit: int = 10**9,
    hook: Any = None,
    threads: int = 2,
) -> dict[str, Any]:
    """Loss per token and activation shares over windows that do not overlap."""
    layers = model.cfg.num_hidden_layers
    zero = torch.zeros(layers)

    @torch.no_grad()
    def run(start: int) -> tuple[float, Tensor, int]:
        row = stream[start : start + length + 1][None]
        logits, share = model(row[:, :-1], zero, hook=hook)
        n = row.shape[1] - 1
        return float(F.cross_entropy(logits[0], row[0, 1:], reduction="sum")), share.mean(1) * n, n

    results = parallel(run, range(0, min(len(stream), limit) - 1, length), threads)
    nll, count = sum(r[0] for r in results), sum(r[2] for r in results)
    shares = torch.stack([r[1] for r in results]).sum(0) / count
    return {
        "loss": nll / count,
        "perplexity": math.exp(nll / count),
        "nll": nll,
        "tokens": count,
        "activation": [round(float(s), 5) for s in shares],
    }


def quantised_copy(model: DemoModel) -> DemoModel:
    """A model with fake-quantised weights."""
    copy = DemoModel(model.cfg)
    copy.load_state_dict(quantised_state(model.state_dict()))
    return copy


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
