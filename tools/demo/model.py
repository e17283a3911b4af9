"""The demo model in PyTorch: a small LLaMA-like decoder with a dReLU FFN.

Parameter names equal the names of the exported checkpoint, so that ``state_dict()`` is the
export. The weights are kept in float32; :class:`Quantiser` gives what an INT4/INT8 engine sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32


@dataclass(frozen=True)
class DemoConfig:
    """Shape of the demo model; the defaults are the published one."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024

    def hf_config(self, bos_id: int, eos_id: int) -> dict[str, Any]:
        """The ``config.json`` of the exported checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "drelu",
            **asdict(self),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "torch_dtype": "float32",
        }


class FakeQuant(torch.autograd.Function):
    """Symmetric round-to-nearest in groups of 32 with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, axis: int, top: int) -> Tensor:
        return fake_quantise(weight, axis, top)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def fake_quantise(weight: Tensor, axis: int, top: int) -> Tensor:
    """Quantise and restore a matrix; ``axis`` is the one cut into groups, ``top`` is 7 or 127.

    The scale is max|w| / top over the group, rounded to float16.
    """
    rows, cols = weight.shape
    if axis == 1:
        view = weight.view(rows, cols // GROUP, GROUP)
        peak = view.abs().amax(2, keepdim=True)
    else:
        view = weight.view(rows // GROUP, GROUP, cols)
        peak = view.abs().amax(1, keepdim=True)
    scale = (peak / top).half().float()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((view / scale).round().clamp(-top - 1, top) * scale).view(rows, cols)


def quantised_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State with every matrix replaced by its fake-quantised value.

    q, k, v, o, gate and up: INT4 groups along the input; down: INT4 groups along the output
    (a neuron's column is stored as one piece); the embedding, which is the head too: INT8.
    """
    out = {}
    for name, value in state.items():
        if value.ndim != 2:
            out[name] = value
        elif "embed_tokens" in name:
            out[name] = fake_quantise(value, 1, 127)
        else:
            out[name] = fake_quantise(value, 0 if "down_proj" in name else 1, 7)
    return out


class DReLU(torch.autograd.Function):
    """relu(gate) * relu(up); the gradient carries an L1 pressure on the (positive) result."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, pressure: Tensor) -> Tensor:
        gate, up = gate.relu(), up.relu()
        ctx.save_for_backward(gate, up, pressure)
        return gate * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, pressure = ctx.saved_tensors
        grad = grads[0] + pressure
        mask = torch.ops.aten.threshold_backward
        return mask(grad * up, gate, 0), mask(grad * gate, up, 0), None


def linear(x: Tensor, layer: nn.Linear, quant: bool) -> Tensor:
    """x through the layer, its INT4 weights if asked for."""
    weight = layer.weight
    return F.linear(x, FakeQuant.apply(weight, 1, 7) if quant else weight)


class RMSNorm(nn.Module):
    """LLaMA's RMS norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions (rotate_half)."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        hidden, dim = cfg.hidden_size, cfg.head_dim
        self.q_proj = nn.Linear(hidden, cfg.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, cfg.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, cfg.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(cfg.num_attention_heads * dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, quant: bool) -> Tensor:
        batch, length, _ = x.shape
        dim = self.cfg.head_dim
        q = linear(x, self.q_proj, quant).view(batch, length, -1, dim).transpose(1, 2)
        k = linear(x, self.k_proj, quant).view(batch, length, -1, dim).transpose(1, 2)
        v = linear(x, self.v_proj, quant).view(batch, length, -1, dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.cfg.num_attention_heads // self.cfg.num_key_value_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(y.transpose(1, 2).reshape(batch, length, -1), self.o_proj, quant)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class MLP(nn.Module):
    """The sparse FFN."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def activations(self, x: Tensor, pressure: Tensor, quant: bool) -> Tensor:
        """relu(gate) * relu(up) of every neuron."""
        gate, up = linear(x, self.gate_proj, quant), linear(x, self.up_proj, quant)
        h: Tensor = DReLU.apply(gate, up, pressure)
        return h

    def project(self, h: Tensor, quant: bool) -> Tensor:
        """Project the neurons back to the hidden size."""
        down: Tensor = self.down_proj.weight
        return F.linear(h, FakeQuant.apply(down, 0, 7) if quant else down)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.self_attn = Attention(cfg)
        self.mlp = MLP(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


Hook = Callable[[int, Tensor, Tensor], Tensor]


class Inner(nn.Module):
    """Holds what the checkpoint names ``model.*``."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class DemoModel(nn.Module):
    """The decoder with its tied head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Inner(cfg)
        half = cfg.head_dim // 2
        freq = cfg.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(cfg.max_position_embeddings, dtype=torch.float64)[:, None] * freq
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Random weights; the outputs of attention and FFN start at zero."""
        for name, value in self.named_parameters():
            if value.ndim != 2:
                continue
            with torch.no_grad():
                if "o_proj" in name or "down_proj" in name:
                    value.zero_()
                elif "embed_tokens" in name:
                    value.normal_(0.0, 0.04, generator=generator)
                else:
                    value.normal_(0.0, 0.7 / math.sqrt(value.shape[1]), generator=generator)

    def forward(
        self, ids: Tensor, pressure: Tensor, quant: bool = False, hook: Hook | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits, and the share of tokens that activate each neuron, [layers, neurons].

        ``pressure`` [layers] is the L1 gradient of every FFN activation. ``hook``, given the
        layer, the FFN's input and its activations, returns the activations to use.
        """
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        table: Tensor = self.model.embed_tokens.weight
        if quant:
            table = FakeQuant.apply(table, 1, 127)
        x = F.embedding(ids, table)
        shares = []
        for index, layer in enumerate(self.model.layers):
            x = x + layer.self_attn(layer.input_layernorm(x), cos, sin, quant)
            inner = layer.post_attention_layernorm(x)
            h = layer.mlp.activations(inner, pressure[index], quant)
            shares.append((h.detach() > 0).flatten(0, 1).float().mean(0))
            if hook is not None:
                h = hook(index, inner, h)
            x = x + layer.mlp.project(h, quant)
        return F.linear(self.model.norm(x), table), torch.stack(shares)
