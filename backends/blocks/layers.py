"""Embedding, layers and head of a model, as instructions of a program, and the sizes of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.contract import cuts_normed
from pi2.backends.blocks.feed_forward import FeedForward
from pi2.backends.blocks.gated_streams import GatedStreamBuilder, NgramBuilder
from pi2.backends.blocks.indexed import Indexing, LatentAttention, PooledAttention
from pi2.backends.blocks.operands import Area, Extent, Gates, Matrix, Product
from pi2.backends.blocks.outside import OutsideFeedForward
from pi2.backends.blocks.residual import Residual
from pi2.backends.blocks.room import KvCache, Memory, StateMemory
from pi2.model.blocks import Attention
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import LayerEmbedding

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.blocks.instructions import FindWeight
    from pi2.backends.blocks.interpreter import Interpreter


class Layers:
    """Adds a model's embedding, layers and head to a program."""

    def __init__(self, model: Model, builder: Builder, memory: StateMemory) -> None:
        self._model, self._builder, self.builder, self.memory = model, builder, builder, memory
        self._hidden = model.shape.hidden
        self._residual = Residual(model, builder)
        latent, pooled = model.attention.latent, model.attention.pooled
        self._latent: LatentAttention | PooledAttention | None = None
        if latent is not None:
            self._latent = LatentAttention(model, builder, latent)
        elif pooled is not None:
            self._latent = PooledAttention(model, builder, pooled)
        index = model.attention.index
        self._index = None if index is None else Indexing(model, builder, index)
        if model.states:
            from pi2.backends.blocks.recurrent import StateBuilder

            self._states = StateBuilder(model, builder, memory)
        self.ngrams: NgramBuilder | None = None
        """Rows that n-grams add to streams."""
        if model.ngrams is not None:
            streams = self._residual.mixed
            assert isinstance(streams, GatedStreamBuilder)
            self.ngrams = NgramBuilder(model, builder, model.ngrams, streams, memory)
        self._ffn = FeedForward(model, builder, self._residual)
        self.outside: OutsideFeedForward | None = None
        """FFNs whose neurons are computed elsewhere."""
        if builder.extent.outside:
            self.outside = OutsideFeedForward(model, builder, self._residual, self._ffn)
        self.head = 0
        """The first instruction of the head."""
        self.looked_up = 0
        """The first instruction after rows of the call's tokens are looked up."""
        self.x = self._residual.x
        self.u = self._take_read()
        """What operators and the head read."""
        self.logits = builder.take_area("logits", model.shape.vocab, tokens=builder.extent.rows)
        self.predictions = self._ffn.predictions

    def _take_read(self) -> Area:
        if self.outside is None:
            return self._builder.take_area("u", self._hidden)
        # FFNs come after what mixes tokens.
        return self.outside.exchange.normalized

    def list_kept(self) -> list[Area]:
        """What a call has in areas while its neurons are computed elsewhere."""
        found, own, streams = [self.x], self._model.layer_embedding, self._residual.streams
        if own is not None:
            found.append(self._take_layer_inputs(own))
        if self._residual.mixed is not None:
            found.append(self._residual.mixed.kept)
        if streams is not None:
            found.append(streams.before)
        if self.outside is not None:
            shared = (self.outside.exchange.before, self.outside.exchange.normalized)
            found += [area for area in shared if area is not None]
        return found

    @property
    def keeps_read(self) -> bool:
        """Whether what neurons read is the last of those areas."""
        own = None if self.outside is None else self.outside.exchange
        return own is not None and own.read is own.normalized

    def add_embedding(self) -> None:
        builder, model, hidden = self._builder, self._model, self._hidden
        weight = builder.need("embedding", None)
        builder.add_rows("embedding", weight, builder.numbers, self.x, model.multipliers.embedding)
        if model.norm.embedding:
            has_own = model.norm.embedding_weights
            key, norm = ("embedding_norm", None) if has_own else ("", builder.rms)
            builder.add_norm(key, self.x, self.x, hidden, norm=norm)
        self.looked_up = len(builder.instructions)
        own = model.operators.get("mtp")
        if own is not None:
            self._add_join(own["in"], own["token_norm"], own["stream_norm"])
        if model.positions is not None:
            table = builder.need("positions", None)
            builder.add_rows("positions", table, builder.places, self.x, 1.0, added=True)
        if model.layer_embedding is not None:
            self._add_layer_embeddings(model.layer_embedding)
        if own is None and model.positions is None:
            self.looked_up = len(builder.instructions)
        for streams in (self._residual.streams, self._residual.mixed):
            if streams is not None:
                streams.add_embedding()

    def _add_join(self, project: str, token_norm: str, stream_norm: str) -> None:
        """Add what an MTP head reads: embeddings, and what `BlockModel.join` has."""
        builder, hidden = self._builder, self._hidden
        joined = builder.take_area("joined", 2 * hidden)
        builder.add_norm(token_norm, self.x, joined, hidden)
        stream = builder.take_area("stream", hidden)
        builder.add_norm(stream_norm, stream, joined.skip(hidden), hidden)
        builder.add_product(joined, 2 * hidden, project, None, self.x)

    def _add_layer_embeddings(self, own: LayerEmbedding) -> None:
        """Add what each layer adds of its own: rows of a table, and a projection of the first
        layer's input, both divided by sqrt(2)."""
        builder, half = self._builder, math.sqrt(0.5)
        layers, width = self._model.shape.layers, own.width
        area = self._take_layer_inputs(own)
        product = builder.make_product("layer_projection", None, area, factor=own.projection_factor)
        builder.add_products(self.x, self._hidden, [product])
        norm, offset = builder.need("layer_projection_norm", None), self._model.norm.weight_offset
        weights = builder.keep(
            norm.rows * norm.length,
            lambda: (norm.read() + offset) * half,
            segment="workspace" if builder.is_stored else "attention",
        )
        builder.add_parts_norm(area, layers, width, weights.ctypes.data)
        table, numbers = builder.need("layer_embedding", None), builder.known_numbers
        builder.add_rows("layer_embedding", table, numbers, area, own.factor * half, added=True)

    def _take_layer_inputs(self, own: LayerEmbedding) -> Area:
        """Return the array of what layers add; the gates of a layer lie behind it."""
        return self._builder.take_area("layer inputs", (self._model.shape.layers + 1) * own.width)

    def _add_layer_input(self, layer: int, own: LayerEmbedding) -> None:
        """Add norm(output(act(gate x) * e)) to the residual stream."""
        builder, width, area = self._builder, own.width, self._take_layer_inputs(own)
        gates = area.skip(self._model.shape.layers * width)
        streams = self._residual.streams
        read = self.x if streams is None else streams.scale_first(layer)
        builder.add_product(read, self._hidden, "layer_input_gate", layer, gates)
        mixed = builder.take_area("active", width)
        builder.add_gate(gates, area.skip(layer * width), mixed, width)
        given = builder.take_area("given", self._hidden)
        builder.add_product(mixed, width, "layer_input_output", layer, given)
        for target in [self.x] if streams is None else streams.others:
            builder.add_norm("layer_input_norm", given, target, self._hidden, added=True)

    def add_layer(self, layer: int) -> None:
        builder, model = self._builder, self._model
        builder.layer = layer
        streams = self._residual.streams
        if streams is not None:
            streams.begin_layer(layer)
        if self.ngrams is not None and model.ngrams is not None and layer == model.ngrams.layer:
            self.ngrams.add()
        if self.outside is None:
            self._ffn.begin_layer(layer)
        else:
            self.outside.begin_layer()
        is_parallel, other = model.residual == "parallel", self.u
        for builder.mixer, mixer in enumerate(model.blocks[layer].mixers):
            self._residual.open(layer, "hyper_attention")
            if builder.mixer == 0 or model.layers is None or not model.layers.parallel:
                norm = "inner_norm" if builder.mixer else "attention_norm"
                other = read = self._residual.normalize(norm, self.u)
            if is_parallel and self._has_own_norm(layer) and self.outside is None:
                # Both read the layer's input, and attention changes it.
                other = self._residual.normalize("ffn_norm", builder.take_area("v", self._hidden))
            if isinstance(mixer, Attention) and self._latent is not None:
                values = self._latent.add(layer, mixer, read)
                self._add_mixed(layer, mixer, values, mixer.given)
            elif isinstance(mixer, Attention):
                self._add_attention(layer, mixer, read)
            elif mixer.shape is not None:
                mixed = self._states.add(layer, builder.mixer, mixer.shape, read)
                has_bias = mixer.shape.projection_bias
                self._add_output("state_output", layer, mixed, mixer.shape.width, has_bias)
            self._residual.close()
        builder.mixer = 0
        if streams is not None:
            streams.add_laurel(layer, read)
        if self.outside is not None:
            self.outside.add(layer)
        elif model.blocks[layer].ffn.kind != "none":
            self._residual.open(layer, "hyper_ffn")
            if not is_parallel:
                other = self._residual.normalize("ffn_norm", self.u)
            self._ffn.add(layer, other)
            self._residual.close()
        if streams is not None:
            streams.end_layer(layer)
        if model.layer_embedding is not None:
            self._add_layer_input(layer, model.layer_embedding)
        if model.layer_scale:
            builder.add_cap(self.x, self._hidden, 0.0, builder.read_scale("layer_scale"))
        if self.outside is not None:
            self.outside.end_layer()
        builder.layer = None

    def add_model(self) -> U8:
        """Add everything; return what threads write to and forget."""
        self.add_embedding()
        for layer in range(self._model.shape.layers):
            self.add_layer(layer)
        self.head = self.add_head()
        return self._builder.finish()

    def _has_own_norm(self, layer: int) -> bool:
        """Whether an FFN next to attention has a norm that is not attention's."""
        names = self._model.tensors
        is_other = self._model.norm.inputs and names.ffn_norm != names.attention_norm
        return is_other and self._builder.find("ffn_norm", layer) is not None

    def add_head(self) -> int:
        """Add the last norm and the head; return the number of the first instruction."""
        builder, model = self._builder, self._model
        for streams in (self._residual.streams, self._residual.mixed):
            if streams is not None:
                streams.join()
        first = len(builder.instructions)
        if model.gated_streams is None:
            builder.add_norm("final_norm", self.x, self.u, self._hidden)
        else:
            builder.add_cap(self.x, self._hidden, 0.0, 1.0, self.u)
        weight = builder.need("embedding" if model.tied_head else "head", None)
        bias = builder.read_vector("head_bias", None) if model.head_bias else 0
        head = Product(key="head", weight=weight, y=self.logits, bias=bias)
        builder.add_products(self.u, self._hidden, [head])
        limit, factor = model.logit_softcap or 0.0, model.multipliers.logits
        if limit or factor != 1.0:
            builder.add_cap(self.logits, model.shape.vocab, limit, factor)
        return first

    def _add_attention(self, layer: int, own: Attention, read: Area) -> None:
        builder, attention = self._builder, own.options
        query, keys, heads = own.query, own.keys, own.heads
        width = attention.value_width or own.head_dim
        values = own.kv_heads * width
        is_together = own.gates and self._model.tensors.query_gate is None
        first = query * (1 + is_together)
        projected = builder.take_area("qkv", first + keys + values)
        areas = {
            "query": projected,
            "key": projected.skip(first),
            "value": projected.skip(first + keys),
        }
        parts = list(areas.items())
        parts = parts[: 1 if not own.has_keys else 2 if own.keys_are_values else 3]
        products = builder.list_inputs("fused_qkv", layer, parts, attention.qkv_bias)
        gates = self._make_gates(layer, own, projected) if own.gates else None
        if gates is not None and not is_together:
            gate = builder.make_product("query_gate", layer, gates.area, attention.qkv_bias)
            products.append(gate)
        if self._index is not None:
            products += self._index.list_inputs(layer, own)
        builder.add_products(read, self._hidden, products)
        if self._index is not None:
            self._index.add(layer, own)
        if is_together:
            areas["query"] = builder.take_area("queries", query)
            places = range(0, first, 2 * own.head_dim)
            builder.add_gates(projected, areas["query"], places, own.head_dim)
        neighbours = products[0].weight.neighbours or own.rope.pairs == "neighbours"
        norms = [("query", "query_norm", query, heads)]
        if own.has_keys:
            norms.append(("key", "key_norm", keys, own.kv_heads))
            self._add_values(own, areas["key"], areas["value"])
        if own.options.head_norm and attention.head_norm_of == "all":
            for kind, norm, length, _ in norms:
                builder.add_norm(norm, areas[kind], areas[kind], length, norm=builder.rms)
        elif own.options.head_norm and cuts_normed(attention):
            for kind, norm, _, count in norms:
                builder.add_head_norm(areas[kind], count, own, norm)
        if attention.clip is not None:
            length = query + keys + values if own.has_keys else query
            builder.add_cap(projected, length, -attention.clip, 1.0)
        for place, (kind, norm, _, count) in enumerate(norms):
            builder.add_turn(
                areas[kind], count, own, norm, neighbours=neighbours, waits=place == len(norms) - 1
            )
        builder.add_growth(areas["query"], query, layer)
        for kind, _, _, count in norms:
            builder.add_spread_heads(areas[kind], count, own.head_dim)
        if own.has_keys:
            builder.add_keep(areas["key"], areas["value"], own, layer)
        mixed = builder.take_area("mixed", heads * width)
        builder.add_attention(areas["query"], mixed, own, layer)
        if gates is not None:
            builder.add_gates(mixed, mixed, range(0, heads * width, width), width, gates)
        self._add_mixed(layer, own, mixed, heads * width)

    def _make_gates(self, layer: int, own: Attention, projected: Area) -> Gates:
        """Return the gates of what heads mix: each head's follow its query in ``projected``, or
        they have a matrix."""
        kind, size = own.options.output_gate_function, own.head_dim
        if self._model.tensors.query_gate is None:
            return Gates(projected.skip(size), range(0, 2 * own.query, 2 * size), kind)
        each = int(own.options.output_gate_of == "element")
        rows = self._builder.need("query_gate", layer).rows
        area, step = self._builder.take_area("query gates", rows), size if each else 1
        return Gates(area, range(0, step * own.heads, step), kind, each)

    def _add_values(self, own: Attention, keys: Area, values: Area) -> None:
        """Add copies and norms between the projection to values and the KV cache."""
        builder, width = self._builder, own.options.value_width or own.head_dim
        if own.keys_are_values:
            builder.add_cap(keys, own.keys, 0.0, 1.0, values)
        if own.options.value_norm:
            builder.add_parts_norm(values, own.kv_heads, width)

    def _add_mixed(self, layer: int, own: Attention, mixed: Area, length: int) -> None:
        """Add the output projection of the heads' mix."""
        builder, attention = self._builder, own.options
        if attention.value_scale != 1.0:
            builder.add_cap(mixed, length, 0.0, attention.value_scale)
        if attention.sub_norm:
            builder.add_norm("attention_sub_norm", mixed, mixed, length, norm=builder.rms)
        self._add_output("output", layer, mixed, length, attention.output_bias)

    def _add_output(self, key: str, layer: int, mixed: Area, length: int, has_bias: bool) -> None:
        builder, total = self._builder, self._residual.begin()
        builder.add_product(mixed, length, key, layer, has_bias=has_bias, **total.take())
        self._residual.end("attention_output_norm")


def start_layers(
    model: Model, find: FindWeight, interpreter: Interpreter, memory: Memory, extent: Extent
) -> Layers:
    """Return what builds a program in ``memory``, which has its KV cache and states now."""
    # Neurons that are computed elsewhere take chunks in turns, and windows keep no more.
    most = None if extent.outside else extent.tokens
    cache = KvCache(model, extent.positions, extent.sequences, memory, extent.kv, most)
    states = StateMemory(model, extent.sequences, memory)
    return Layers(model, Builder(model, find, interpreter, cache, memory, extent), states)


MOST_LANES = 16
"""Lanes of the widest registers."""


class Uncompiled:
    """An interpreter without kernels: a program can be built with it, and not run."""

    lanes = MOST_LANES

    def find(self, kernel: str, own: str | None = None) -> int:
        return 0

    def run(self, program: int, begin: int, end: int, most: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """What the program of a model takes, without its weights."""

    segments: Mapping[str, int]
    """Bytes by segment."""
    kept: Sequence[Area]
    """What a call has in areas while its neurons are computed elsewhere."""
    keeps_read: bool
    """Whether what neurons read is among it."""
    matrices: Sequence[Matrix]


def count_program(
    model: Model, find: FindWeight, extent: Extent, lanes: int = MOST_LANES
) -> ProgramSize:
    """Return the size of a program; ``find`` may give tensors without their bytes."""
    memory, interpreter = Memory(), Uncompiled()
    interpreter.lanes = lanes
    layers = start_layers(model, find, interpreter, memory, extent)
    layers.add_model()
    return ProgramSize(memory.sizes, layers.list_kept(), layers.keeps_read, layers.builder.matrices)
