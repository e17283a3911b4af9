"""Shapes of known models as their GGUF files describe them: tensors and metadata, no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

Setting = int | float | bool | str | Sequence[int] | Sequence[bool]


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model with attention and an FFN or experts in each layer, as Qwen 3 has them."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    """0: the model is dense."""
    active: int = 0
    width: int
    """Neurons of an expert, or of a dense layer."""
    vocab: int
    dense: str = "q4_k"
    """Format of attention's matrices and the embedding."""
    inputs: str = "q4_k"
    """Format of experts' gates and ups."""
    outputs: tuple[str, ...] = ("q6_k", "q4_k")
    """Formats of experts' downs, which alternate with layers."""
    head: str = "q6_k"
    """Format of the head; empty: the head is the embedding."""
    theta: float = 1e6
    norms: str = "head"
    """Whether queries and keys have norms: of a ``head``, of ``all`` heads, or ``none``."""
    second_norm: str = "ffn_norm"
    shared_width: int = 0
    """Neurons of the expert that computes every token; 0: there is none."""
    dense_layers: int = 0
    """First layers that have an FFN of ``dense_width`` instead of experts."""
    dense_width: int = 0
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Further metadata, after the architecture's name."""

    def list_settings(self, layers: int) -> dict[str, Setting]:
        """Return metadata of this architecture for so many layers."""
        found: dict[str, Setting] = {
            "context_length": 32768,
            "embedding_length": self.hidden,
            "block_count": layers,
            "feed_forward_length": self.dense_width or self.width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": self.theta,
        }
        if self.experts:
            found |= {
                "expert_count": self.experts,
                "expert_used_count": self.active,
                "expert_feed_forward_length": self.width,
            }
        if self.dense_layers:
            found["leading_dense_block_count"] = self.dense_layers
        return {**found, **self.settings}

    def list_tensors(self, layers: int) -> Iterator[Tensor]:
        """Yield tensors in the order of files."""
        yield Tensor("token_embd.weight", (self.vocab, self.hidden), self.dense)
        for layer in range(layers):
            for name, shape, kind in self.list_layer(layer):
                yield Tensor(f"blk.{layer}.{name}", shape, kind)
        yield Tensor("output_norm.weight", (self.hidden,), "f32")
        if self.head:
            yield Tensor("output.weight", (self.vocab, self.hidden), self.head)

    def list_layer(self, layer: int) -> Iterator[Any]:
        """Yield name, shape and format of each tensor of a layer."""
        for name in ("attn_norm", self.second_norm):
            yield f"{name}.weight", (self.hidden,), "f32"
        yield from self.list_mixer(layer)
        yield from self.list_ffn(layer)

    def list_mixer(self, layer: int) -> Iterator[Any]:
        yield from self._list_attention(self.kv_heads, self.head_dim)

    def _list_attention(
        self, kv_heads: int, head_dim: int, *, query: int = 1, values: bool = True
    ) -> Iterator[Any]:
        """``query``: 2 if queries come with gates; ``values``: whether keys are not values."""
        width, keys = self.heads * head_dim, kv_heads * head_dim
        rows = (("q", query * width), ("k", keys), ("v", keys))
        for name, count in rows if values else rows[:2]:
            yield f"attn_{name}.weight", (count, self.hidden), self.dense
        if self.norms != "none":
            for name, count in (("q", width), ("k", keys)):
                size = head_dim if self.norms == "head" else count
                yield f"attn_{name}_norm.weight", (size,), "f32"
        yield "attn_output.weight", (self.hidden, width), self.dense

    def list_ffn(self, layer: int) -> Iterator[Any]:
        down = self.outputs[layer % len(self.outputs)]
        if layer < self.dense_layers or not self.experts:
            yield from self._list_matrices("", (), self.dense_width or self.width, down)
            return
        yield "ffn_gate_inp.weight", (self.experts, self.hidden), "f32"
        yield from self._list_matrices("_exps", (self.experts,), self.width, down)
        if self.shared_width:
            yield from self._list_matrices("_shexp", (), self.shared_width, down)

    def _list_matrices(
        self, end: str, each: tuple[int, ...], width: int, down: str
    ) -> Iterator[Any]:
        yield f"ffn_gate{end}.weight", (*each, width, self.hidden), self.inputs
        yield f"ffn_up{end}.weight", (*each, width, self.hidden), self.inputs
        yield f"ffn_down{end}.weight", (*each, self.hidden, width), down


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedShape(Shape):
    """gpt-oss: biases of projections, routers and experts, and attention sinks."""

    def list_layer(self, layer: int) -> Iterator[Any]:
        for name, shape, kind in Shape.list_layer(self, layer):
            yield name, shape, kind
            if "norm" not in name:
                # A router's bias is as long as its rows; experts have one each.
                bias = shape[:-1] if len(shape) > 2 else shape[:1]
                yield f"{name.removesuffix('weight')}bias", bias, "f32"
        yield "attn_sinks.weight", (self.heads,), "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape(Shape):
    """Qwen 3.5 and 3.6: the delta rule but for every ``interval``-th layer, whose attention has
    gates; a shared expert with a gate."""

    interval: int = 4
    key_heads: int
    value_heads: int
    state: int
    """Width of a head's keys, and of its values."""
    second_norm: str = "post_attention_norm"

    def list_settings(self, layers: int) -> dict[str, Setting]:
        turned = self.head_dim // 4
        third = turned // 6
        return {
            **Shape.list_settings(self, layers),
            "full_attention_interval": self.interval,
            "ssm.conv_kernel": 4,
            "ssm.state_size": self.state,
            "ssm.group_count": self.key_heads,
            "ssm.time_step_rank": self.value_heads,
            "ssm.inner_size": self.value_heads * self.state,
            "rope.dimension_count": turned,
            "rope.dimension_sections": [turned // 2 - 2 * third, third, third, 0],
            "expert_shared_feed_forward_length": self.shared_width,
        }

    def list_mixer(self, layer: int) -> Iterator[Any]:
        if (layer + 1) % self.interval == 0:
            yield from self._list_attention(self.kv_heads, self.head_dim, query=2)
            return
        inner = self.value_heads * self.state
        mixed = 2 * self.key_heads * self.state + inner
        yield "attn_qkv.weight", (mixed, self.hidden), self.dense
        yield "attn_gate.weight", (inner, self.hidden), self.dense
        yield "ssm_conv1d.weight", (mixed, 4), "f32"
        for name in ("alpha", "beta"):
            yield f"ssm_{name}.weight", (self.value_heads, self.hidden), "f32"
        yield "ssm_dt.bias", (self.value_heads,), "f32"
        yield "ssm_a", (self.value_heads,), "f32"
        yield "ssm_norm.weight", (self.state,), "f32"
        yield "ssm_out.weight", (self.hidden, inner), self.dense

    def list_ffn(self, layer: int) -> Iterator[Any]:
        yield from Shape.list_ffn(self, layer)
        yield "ffn_gate_inp_shexp.weight", (self.hidden,), "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShape(DeltaShape):
    """Qwen 3.8 Flash Next: residual streams with gates, and a table of n-grams in layer 0."""

    streams: int = 4
    rank: int = 128
    ngram: int = 3
    """Tokens of the longest n-gram."""
    ngram_heads: int = 8
    """Rows that are looked up for each length."""
    ngram_rows: int
    """Rows of the table."""

    @property
    def _rows_of_token(self) -> int:
        return (self.ngram - 1) * self.ngram_heads

    def list_settings(self, layers: int) -> dict[str, Setting]:
        count = self._rows_of_token
        each = self.ngram_rows // count
        return {
            **DeltaShape.list_settings(self, layers),
            "hyper_connection.count": self.streams,
            "hyper_connection.low_rank": self.rank,
            "attention.indexer.head_count": 4,
            "attention.indexer.key_length": 128,
            "attention.indexer.top_k": 2048,
            "attention.compress_ratios": [
                4 * ((n + 1) % self.interval == 0) for n in range(layers)
            ],
            "ple.layers": [0],
            "ple.ngram_size": self.ngram,
            "ple.heads_per_ngram": self.ngram_heads,
            "ple.conv_kernel": 4,
            "ple.eos_token_id": self.vocab - 1,
            "embedding_length_per_layer_input": self.hidden // count,
            "ple.layer_multipliers": [
                24178347613427 + 2 * n * 1190913431 for n in range(self.ngram)
            ],
            "ple.head_offsets": [each * n for n in range(count)],
            "ple.head_vocab_sizes": [each - 2 * n for n in range(count)],
        }

    def list_tensors(self, layers: int) -> Iterator[Tensor]:
        for tensor in Shape.list_tensors(self, layers):
            if tensor.name != "output_norm.weight":
                yield tensor
                continue
            for name, shape, kind in self._list_gates("hc"):
                yield Tensor(f"output_{name}", shape, kind)
            rows = self.ngram_rows, self.hidden // self._rows_of_token
            yield Tensor("per_layer_token_embd.weight", rows, "q8_0")

    def _list_gates(self, start: str) -> Iterator[Any]:
        width = self.streams * self.hidden
        yield f"{start}_norm.weight", (width,), "f32"
        yield f"{start}_down.weight", (self.rank, width), "q8_0"
        yield f"{start}_up.weight", (width, self.rank), "q8_0"

    def list_layer(self, layer: int) -> Iterator[Any]:
        width = self.streams * self.hidden
        for of in ("attn", "ffn"):
            yield from self._list_gates(f"hc_{of}")
            yield f"hc_{of}_inject.weight", (self.streams, width), "f32"
        yield from self.list_mixer(layer)
        yield from self.list_ffn(layer)
        if (layer + 1) % self.interval == 0:
            for name, rows in (("q", 4 * 128), ("k", 128)):
                yield f"indexer.{name}_proj.weight", (rows, self.hidden), self.dense
                yield f"indexer.{name}_norm.weight", (128,), "f32"
        if layer == 0:
            yield "ple_key.weight", (width, self.hidden), self.dense
            yield "ple_value.weight", (self.hidden, self.hidden), self.dense
            yield "ple_conv1d.weight", (width, 4), "f32"
            for of in ("key", "query", "conv"):
                yield f"ple_norm_{of}.weight", (width,), "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionShape(Shape):
    """LFM2: short convolutions, and attention in some layers."""

    attended: tuple[int, ...]
    """Numbers of layers with attention."""
    head: str = ""

    def list_settings(self, layers: int) -> dict[str, Setting]:
        counts = [self.kv_heads * (layer in self.attended) for layer in range(layers)]
        return {
            **Shape.list_settings(self, layers),
            "attention.head_count_kv": counts,
            "shortconv.l_cache": 3,
            "expert_gating_func": 2,
        }

    def list_tensors(self, layers: int) -> Iterator[Tensor]:
        for tensor in Shape.list_tensors(self, layers):
            changed = "token_embd_norm.weight" if tensor.name == "output_norm.weight" else None
            yield Tensor(changed or tensor.name, tensor.shape, tensor.format)

    def list_mixer(self, layer: int) -> Iterator[Any]:
        if layer in self.attended:
            yield from self._list_attention(self.kv_heads, self.head_dim)
            return
        yield "shortconv.conv.weight", (self.hidden, 3), "f32"
        yield "shortconv.in_proj.weight", (3 * self.hidden, self.hidden), self.dense
        yield "shortconv.out_proj.weight", (self.hidden, self.hidden), self.dense

    def list_ffn(self, layer: int) -> Iterator[Any]:
        yield from Shape.list_ffn(self, layer)
        if layer >= self.dense_layers:
            yield "exp_probs_b.bias", (self.experts,), "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape(Shape):
    """DeepSeek, GLM 4.7 Flash: keys and values of all heads come from one vector of ``rank``."""

    query_rank: int
    rank: int
    plain: int
    """Elements of a head's keys without RoPE."""
    rotated: int
    value_dim: int

    def list_settings(self, layers: int) -> dict[str, Setting]:
        return {
            **Shape.list_settings(self, layers),
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": self.query_rank,
            "attention.kv_lora_rank": self.rank,
            "attention.key_length": self.rank + self.rotated,
            "attention.value_length": self.rank,
            "attention.key_length_mla": self.plain + self.rotated,
            "attention.value_length_mla": self.value_dim,
            "rope.dimension_count": self.rotated,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
        }

    def list_mixer(self, layer: int) -> Iterator[Any]:
        hidden, heads = self.hidden, self.heads
        yield "attn_q_a.weight", (self.query_rank, hidden), self.dense
        yield "attn_q_a_norm.weight", (self.query_rank,), "f32"
        query = heads * (self.plain + self.rotated)
        yield "attn_q_b.weight", (query, self.query_rank), self.dense
        yield "attn_kv_a_mqa.weight", (self.rank + self.rotated, hidden), self.dense
        yield "attn_kv_a_norm.weight", (self.rank,), "f32"
        yield "attn_k_b.weight", (heads, self.rank, self.plain), "q8_0"
        yield "attn_v_b.weight", (heads, self.value_dim, self.rank), "q8_0"
        yield "attn_output.weight", (hidden, heads * self.value_dim), self.dense

    def list_ffn(self, layer: int) -> Iterator[Any]:
        yield from Shape.list_ffn(self, layer)
        if layer >= self.dense_layers:
            yield "exp_probs_b.bias", (self.experts,), "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaShape(Shape):
    """Gemma 4: a window in five layers of six, wider heads whose keys are values in the others; an
    FFN next to the experts; scaled layers."""

    wide_kv_heads: int
    wide_dim: int
    head: str = ""

    def _is_wide(self, layer: int) -> bool:
        return layer % 6 == 5

    def list_settings(self, layers: int) -> dict[str, Setting]:
        kinds = [self._is_wide(layer) for layer in range(layers)]
        return {
            **Shape.list_settings(self, layers),
            "feed_forward_length": self.dense_width,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.head_count_kv": [
                self.wide_kv_heads if is_wide else self.kv_heads for is_wide in kinds
            ],
            "attention.key_length": self.wide_dim,
            "attention.value_length": self.wide_dim,
            "attention.key_length_swa": self.head_dim,
            "attention.value_length_swa": self.head_dim,
            "rope.dimension_count": self.wide_dim,
            "rope.dimension_count_swa": self.head_dim,
            "rope.freq_base_swa": 1e4,
            "attention.sliding_window": 1024,
            "attention.sliding_window_pattern": [not is_wide for is_wide in kinds],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        }

    def list_tensors(self, layers: int) -> Iterator[Tensor]:
        yield Tensor("rope_freqs.weight", (self.wide_dim // 2,), "f32")
        yield from Shape.list_tensors(self, layers)

    def list_mixer(self, layer: int) -> Iterator[Any]:
        if self._is_wide(layer):
            yield from self._list_attention(self.wide_kv_heads, self.wide_dim, values=False)
        else:
            yield from self._list_attention(self.kv_heads, self.head_dim)

    def list_ffn(self, layer: int) -> Iterator[Any]:
        down = self.outputs[layer % len(self.outputs)]
        for name in ("post_attention_norm", "post_ffw_norm"):
            yield f"{name}.weight", (self.hidden,), "f32"
        yield "layer_output_scale.weight", (1,), "f32"
        yield from self._list_matrices("", (), self.dense_width, down)
        if not self.experts:
            return
        for name in ("post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2"):
            yield f"{name}.weight", (self.hidden,), "f32"
        yield "ffn_gate_inp.weight", (self.experts, self.hidden), "f32"
        yield "ffn_gate_inp.scale", (self.hidden,), "f32"
        both = (self.experts, 2 * self.width, self.hidden)
        yield "ffn_gate_up_exps.weight", both, self.inputs
        yield "ffn_down_exps.weight", (self.experts, self.hidden, self.width), down
        yield "ffn_down_exps.scale", (self.experts,), "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape(Shape):
    """Nemotron-H: each block is a Mamba 2 mixer, attention, or experts with squared ReLU."""

    pattern: str
    """``M``, ``*`` or ``E`` for each block."""
    groups: int
    mamba_heads: int
    mamba_dim: int
    state: int
    norms: str = "none"
    theta: float = 1e4

    def list_settings(self, layers: int) -> dict[str, Setting]:
        kinds = self.pattern[:layers]
        return {
            **Shape.list_settings(self, layers),
            "attention.head_count_kv": [self.kv_heads * (kind == "*") for kind in kinds],
            "attention.layer_norm_epsilon": 1e-5,
            "feed_forward_length": [self.width * (kind == "E") for kind in kinds],
            "ssm.conv_kernel": 4,
            "ssm.state_size": self.state,
            "ssm.group_count": self.groups,
            "ssm.time_step_rank": self.mamba_heads,
            "ssm.inner_size": self.mamba_heads * self.mamba_dim,
            "rope.dimension_count": self.head_dim,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": self.shared_width,
            "expert_gating_func": 2,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
        }

    def list_layer(self, layer: int) -> Iterator[Any]:
        yield "attn_norm.weight", (self.hidden,), "f32"
        kind, down = self.pattern[layer], self.outputs[layer % len(self.outputs)]
        if kind == "*":
            yield from self._list_attention(self.kv_heads, self.head_dim)
        elif kind == "M":
            inner = self.mamba_heads * self.mamba_dim
            mixed = inner + 2 * self.groups * self.state
            yield "ssm_in.weight", (inner + mixed + self.mamba_heads, self.hidden), self.dense
            yield "ssm_conv1d.weight", (mixed, 4), "f32"
            yield "ssm_conv1d.bias", (mixed,), "f32"
            yield "ssm_dt.bias", (self.mamba_heads,), "f32"
            for name in ("ssm_a", "ssm_d"):
                yield name, (self.mamba_heads, 1), "f32"
            yield "ssm_norm.weight", (self.groups, inner // self.groups), "f32"
            yield "ssm_out.weight", (self.hidden, inner), self.dense
        else:
            yield "ffn_gate_inp.weight", (self.experts, self.hidden), "f32"
            yield "exp_probs_b.bias", (self.experts,), "f32"
            for end, each, width in (
                ("_exps", (self.experts,), self.width),
                ("_shexp", (), self.shared_width),
            ):
                yield f"ffn_up{end}.weight", (*each, width, self.hidden), self.inputs
                yield f"ffn_down{end}.weight", (*each, self.hidden, width), down


KINDS: Mapping[str, type[Shape]] = {
    "plain": Shape,
    "biased": BiasedShape,
    "delta": DeltaShape,
    "streams": StreamShape,
    "convolution": ConvolutionShape,
    "latent": LatentShape,
    "gemma": GemmaShape,
    "mamba": MambaShape,
}


def read_shapes() -> dict[str, Shape]:
    """Return the shapes of shapes.toml by name."""
    found = tomli.loads(Path(__file__).with_name("shapes.toml").read_text("utf-8"))
    shapes = {}
    for name, values in found.items():
        kind = KINDS[values.pop("kind")]
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        shapes[name] = kind(**{**values, **lists})
    return shapes
