"""Golden models whose code transformers does not have: their checkpoints bring it themselves.

Each is a model of transformers with the operators changed by which the published code differs:
Bamboo and TurboSparse (arXiv 2406.05955, equation 2), ProSparse (arXiv 2402.13516), SmallThinker
(arXiv 2507.20984).  Written from those descriptions.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

Options = dict[str, Any]

PREDICTOR_RANK = 16


def apply_drelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Apply ReLU to gate and up."""
    return torch.relu(gate) * torch.relu(up)


def build_bamboo(options: Options) -> Any:
    """Build Mistral with dReLU."""
    model = make(transformers.MistralForCausalLM, transformers.MistralConfig, options)
    for layer in model.model.layers:

        def forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
            return mlp.down_proj(apply_drelu(mlp.gate_proj(x), mlp.up_proj(x)))

        layer.mlp.forward = types.MethodType(forward, layer.mlp)
    return model


def build_prosparse(options: Options) -> Any:
    """Build Llama with FATReLU: zero up to a threshold."""
    threshold = options.pop("hidden_act_param")
    model = make(transformers.LlamaForCausalLM, transformers.LlamaConfig, options)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Threshold(threshold, 0.0)
    model.config.hidden_act_param = threshold
    return model


def build_turbosparse_mixtral(options: Options) -> Any:
    """Build Mixtral with dReLU."""
    model = make(transformers.MixtralForCausalLM, transformers.MixtralConfig, options)
    for layer in model.model.layers:

        def forward(
            experts: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            total = torch.zeros_like(x)
            for token in range(len(x)):
                for expert, weight in zip(chosen[token], weights[token], strict=True):
                    gate, up = (experts.gate_up_proj[expert] @ x[token]).chunk(2)
                    down = experts.down_proj[expert] @ apply_drelu(gate, up)
                    total[token] += weight * down
            return total

        layer.mlp.experts.forward = types.MethodType(forward, layer.mlp.experts)
    return model


class SmallThinkerBlock(nn.Module):
    """Experts that the layer's input chooses."""

    def __init__(self, hidden: int, options: Options) -> None:
        super().__init__()
        count, ffn = options["moe_num_primary_experts"], options["moe_ffn_hidden_size"]
        self.active = options["moe_num_active_primary_experts"]
        self.softmax = options["moe_primary_router_apply_softmax"]
        self.primary_router = nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList()
        for _ in range(count):
            expert = nn.Module()
            expert.gate = nn.Linear(hidden, ffn, bias=False)
            expert.up = nn.Linear(hidden, ffn, bias=False)
            expert.down = nn.Linear(ffn, hidden, bias=False)
            self.experts.append(expert)
        self.layer_input = torch.zeros(0)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.primary_router(self.layer_input).topk(self.active, dim=-1)
        weights = functional.softmax(scores, -1) if self.softmax else torch.sigmoid(scores)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.stack(
            [item.down(torch.relu(item.gate(u)) * item.up(u)) for item in self.experts], dim=-2
        )
        picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, u.shape[-1]))
        return (picked * weights[..., None]).sum(-2)


def build_smallthinker(options: Options) -> Any:
    """Llama whose layers have experts, and positions and windows as two lists say."""
    known = {key: value for key, value in options.items() if not _is_smallthinkers(key)}
    model = make(transformers.LlamaForCausalLM, transformers.LlamaConfig, known)
    for number, layer in enumerate(model.model.layers):
        layer.mlp = SmallThinkerBlock(model.config.hidden_size, options)
        turned = bool(options["rope_layout"][number])
        narrow = options["sliding_window_size"] if options["sliding_window_layout"][number] else 0

        def keep(module: Any, args: tuple[Any, ...], kwargs: Options) -> None:
            module.mlp.layer_input = args[0] if args else kwargs["hidden_states"]

        def change(
            _module: Any,
            args: tuple[Any, ...],
            kwargs: Options,
            turned: bool = turned,
            narrow: int = narrow,
        ) -> tuple[tuple[Any, ...], Options]:
            cos, sin = kwargs["position_embeddings"]
            if not turned:
                kwargs["position_embeddings"] = (torch.ones_like(cos), torch.zeros_like(sin))
            if narrow:
                length = cos.shape[-2]
                distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
                kwargs["attention_mask"] = kwargs["attention_mask"].masked_fill(
                    distance >= narrow, torch.finfo(torch.float32).min
                )
            return args, kwargs

        layer.register_forward_pre_hook(keep, with_kwargs=True)
        layer.self_attn.register_forward_pre_hook(change, with_kwargs=True)
    for key, value in options.items():
        if _is_smallthinkers(key):
            setattr(model.config, key, value)
    return model


def _is_smallthinkers(key: str) -> bool:
    return key.startswith(("moe_", "rope_layout", "sliding_window_"))


def make(model: Callable[[Any], Any], config: Callable[..., Any], options: Options) -> Any:
    """A model of transformers."""
    made = config(**options)
    made._attn_implementation = "eager"
    return model(made).eval()


BUILDERS: dict[str, Callable[[Options], Any]] = {
    "bamboo": build_bamboo,
    "sparsellama": build_prosparse,
    "turbosparsemixtral": build_turbosparse_mixtral,
    "smallthinker": build_smallthinker,
}
"""Builders by ``model_type``."""

SAID: dict[str, dict[str, Any]] = {
    "bamboo": {"hidden_act": "relu"},
    "sparsellama": {"hidden_act": "fatrelu"},
    "turbosparsemixtral": {"hidden_act": "relu"},
    "smallthinker": {"hidden_act": None, "intermediate_size": None},
}
"""What the configuration says; None where it says nothing."""


def rename(family: str, name: str) -> str:
    """Name of a tensor in the published checkpoints."""
    return name.replace(".mlp.", ".block_sparse_moe.") if family == "smallthinker" else name


def draw_predictors(family: str, config: Options, seed: int) -> dict[str, torch.Tensor]:
    """Predictors as they lie in checkpoints of TurboSparse-Mixtral; no output depends on them."""
    if family != "turbosparsemixtral":
        return {}
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    shapes = {"fc1.weight": (PREDICTOR_RANK, hidden), "fc2.weight": (ffn, PREDICTOR_RANK)}
    return {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.predictor.{name}": torch.randn(
            shape, generator=generator
        ).half()
        for layer in range(config["num_hidden_layers"])
        for expert in range(config["num_local_experts"])
        for name, shape in shapes.items()
    }
