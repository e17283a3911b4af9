"""A small mixture of experts in PyTorch, for measuring what streaming experts may cost in quality.

The same decoder as the demo model's, with SiLU experts and Mixtral's routing: softmax over all
experts, the best few, their weights scaled to 1.  A loss of balance keeps all experts in use.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.corpus import EOT, Corpus, separator_id
from demo.export import join_documents, write_tensors, write_text
from demo.model import Attention, DemoConfig, RMSNorm
from demo.muon import Muon

BALANCE = 0.01
"""Weight of the loss of balance (Switch Transformer, arXiv 2101.03961, equation 4)."""
STEP_TOKENS, PIECE_TOKENS, LENGTH = 2048, 2048, 256
MUON_RATE, MUON_DECAY, ADAM_RATE = 0.02, 0.1, 0.004
WARMUP_STEPS, DECAY_SHARE = 20, 0.5
SAVE_MINUTES = 3.0


@dataclass(frozen=True)
class MixtureConfig(DemoConfig):
    """Shape of the mixture: about 11 million parameters, 3 million of them active."""

    intermediate_size: int = 64
    num_hidden_layers: int = 6
    num_local_experts: int = 32
    num_experts_per_tok: int = 4

    def hf_config(self, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the exported checkpoint."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_act": "silu",
            **asdict(self),
            "sliding_window": None,
            "tie_word_embeddings": True,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "torch_dtype": "float32",
        }


class Experts(nn.Module):
    """A layer's router and experts."""

    def __init__(self, cfg: MixtureConfig) -> None:
        super().__init__()
        self.chosen = cfg.num_experts_per_tok
        experts, hidden, ffn = cfg.num_local_experts, cfg.hidden_size, cfg.intermediate_size
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the chosen experts [n, hidden] of ``x`` [n, hidden], and the loss of
        balance."""
        shares = (x @ self.router.T).softmax(-1)
        weights, places = shares.topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        count = len(self.router)
        order = places.flatten().argsort(stable=True)
        sizes = torch.bincount(places.flatten(), minlength=count)
        tokens = order // self.chosen
        rows, total = x[tokens], torch.zeros_like(x)
        outputs = []
        for expert, part in enumerate(rows.split(sizes.tolist())):
            inner = F.silu(part @ self.gate[expert].T) * (part @ self.up[expert].T)
            outputs.append(inner @ self.down[expert].T)
        scaled = torch.cat(outputs) * weights.flatten()[order, None]
        total = total.index_add(0, tokens, scaled.float())
        used = sizes.float() / len(order)
        return total, count * (used * shares.mean(0)).sum()


class MixtureLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, cfg: MixtureConfig) -> None:
        super().__init__()
        self.self_attn = Attention(cfg)
        self.experts = Experts(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class MixtureModel(nn.Module):
    """The decoder with its tied head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: MixtureConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Parameter(torch.empty(cfg.vocab_size, cfg.hidden_size))
        self.layers = nn.ModuleList(MixtureLayer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        half = cfg.head_dim // 2
        frequency = cfg.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(cfg.max_position_embeddings)[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Random weights; the outputs of attention and experts start near zero."""
        for name, value in self.named_parameters():
            if value.ndim < 2:
                continue
            scale = 0.7 * value.shape[-1] ** -0.5
            if name == "embed":
                scale = 0.04
            elif "o_proj" in name or name.endswith("down"):
                scale *= 0.1
            value.normal_(0.0, scale, generator=generator)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the mean loss of balance."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.embedding(ids, self.embed)
        balance = torch.zeros(())
        for layer in self.layers:
            x = x + layer.self_attn(layer.input_layernorm(x), cos, sin, False)
            inner = layer.post_attention_layernorm(x)
            total, own = layer.experts(inner.flatten(0, 1))
            x = x + total.view_as(x)
            balance = balance + own
        return F.linear(self.norm(x), self.embed), balance / len(self.layers)


@dataclass
class Run:
    """What a run that goes on needs besides weights and the optimisers' states."""

    seconds: float = 0.0
    step: int = 0
    epoch: int = 0


class Windows:
    """Windows of the token stream in seeded order, one pass over the text after the other."""

    def __init__(self, corpus: Corpus, seed: int, epoch: int) -> None:
        self.corpus, self.seed, self.epoch = corpus, seed, epoch
        self.rows: list[Tensor] = []

    def take(self, count: int) -> Tensor:
        """The next ``count`` windows [count, LENGTH + 1]."""
        while len(self.rows) < count:
            stream = self.corpus.epoch(self.seed, self.epoch, 0.35)
            random = np.random.default_rng((self.seed, self.epoch))
            picks = random.permutation((len(stream) - 1) // LENGTH)
            pieces = [stream[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int64) for i in picks]
            self.rows = [torch.from_numpy(piece) for piece in pieces] + self.rows
            self.epoch += 1
        return torch.stack([self.rows.pop() for _ in range(count)])


def train_mixture(
    corpus: Corpus, path: Path, minutes: float, seed: int, threads: int, resume: bool
) -> None:
    """Train by the clock, matrices with Muon and the rest with AdamW, saving to ``path``."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    model = MixtureModel(MixtureConfig())
    model.initialise(torch.Generator().manual_seed(seed))
    named = dict(model.named_parameters())
    is_matrix = {n: v.ndim > 1 and n != "embed" and "router" not in n for n, v in named.items()}
    muon = Muon([v for n, v in named.items() if is_matrix[n]], 0.95, MUON_DECAY)
    others = [v for n, v in named.items() if not is_matrix[n]]
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    run = Run()
    if resume:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        for buffer, old in zip(muon.buffers, saved["muon"], strict=True):
            buffer.copy_(old)
        run = Run(**saved["run"])

    def save() -> None:
        state = {"model": model.state_dict(), "muon": muon.buffers, "adam": adam.state_dict()}
        temporary = path.with_suffix(".tmp")
        torch.save({**state, "run": asdict(run), "seed": seed}, temporary)
        os.replace(temporary, path)

    windows, pool = Windows(corpus, seed, run.epoch), ThreadPoolExecutor(1)
    clock, saved_s = time.monotonic() - run.seconds, run.seconds
    losses: list[float] = []
    while (done := run.seconds / (60 * minutes)) < 1.0:
        rate = min(1.0, (run.step + 1) / WARMUP_STEPS, (1 - done) / DECAY_SHARE)
        pieces = windows.take(STEP_TOKENS // LENGTH).split(PIECE_TOKENS // LENGTH)
        for piece in pieces:
            with torch.autocast("cpu", torch.bfloat16):
                logits, balance = model(piece[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten())
            ((loss + BALANCE * balance) / len(pieces)).backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(MUON_RATE * rate, pool)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * rate
        adam.step()
        model.zero_grad(set_to_none=True)
        run.step, run.epoch = run.step + 1, windows.epoch
        run.seconds = time.monotonic() - clock
        if run.step % 10 == 0:
            print(
                f"step {run.step} done {done:.2f} loss {np.mean(losses):.4f} balance "
                f"{float(balance.detach()):.3f} tok/s {run.step * STEP_TOKENS / run.seconds:.0f}",
                flush=True,
            )
            losses.clear()
        if run.seconds - saved_s > 60 * SAVE_MINUTES:
            saved_s = run.seconds
            save()
    save()


def export_mixture(corpus: Corpus, path: Path, target: Path) -> None:
    """Write a checkpoint folder in Mixtral's layout, with the held-out and calibration texts."""
    saved = torch.load(path, weights_only=True)
    cfg = MixtureConfig()
    target.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in saved["model"].items():
        parts = name.split(".")
        if name == "embed":
            tensors["model.embed_tokens.weight"] = value
        elif "experts" not in parts:
            tensors[f"model.{name}"] = value
        elif parts[-1] == "router":
            tensors[f"model.layers.{parts[1]}.block_sparse_moe.gate.weight"] = value
        else:
            part = {"gate": "w1", "up": "w3", "down": "w2"}[parts[-1]]
            for expert, matrix in enumerate(value):
                block = f"model.layers.{parts[1]}.block_sparse_moe.experts.{expert}"
                tensors[f"{block}.{part}.weight"] = matrix
    token = separator_id(corpus.tokenizer)
    write_text(target / "config.json", json.dumps(cfg.hf_config(token, token), indent=2) + "\n")
    write_text(target / "tokenizer.json", corpus.tokenizer.to_str(pretty=True))
    special = {"bos_token": EOT, "eos_token": EOT, "pad_token": EOT}
    write_text(target / "tokenizer_config.json", json.dumps(special, indent=2) + "\n")
    write_tensors(target / "model.safetensors", tensors, {"format": "pt"})
    write_text(target / "heldout.txt", join_documents(corpus.heldout_texts))
    write_text(target / "calibration.txt", join_documents(corpus.calibration_texts))
