"""Residual streams with gates of low rank, and rows of n-grams that a layer adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.contract import PIECE
from pi2.backends.blocks.operands import Area, Gates, HeadNorm, Product
from pi2.backends.blocks.room import StateMemory
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import GatedStreams, Ngrams

if TYPE_CHECKING:
    from pi2.arrays import F32, I32


class GatedStreamBuilder:
    """Adds gated streams to a program; what operators read and give has arrays of its own."""

    def __init__(self, model: Model, builder: Builder, own: GatedStreams) -> None:
        self._builder, self._own, self._hidden = builder, own, model.shape.hidden
        self.width = own.streams * self._hidden
        self.x = builder.take_area("streams", self.width, is_tight=True)
        """All of them."""
        self.read = builder.take_area("stream input", self._hidden)
        self.given = builder.take_area("stream output", self._hidden)
        self.kept = builder.take_area("stream weights", own.streams)
        """What weighs an operator's output for each stream."""

    def add_embedding(self) -> None:
        """Let all streams be the first one."""
        for number in range(1, self._own.streams):
            target = self.x.skip(number * self._hidden)
            self._builder.add_cap(self.x, self._hidden, 0.0, 1.0, target)

    def begin(self, layer: int, key: str) -> None:
        """Make the input of an operator, by the tensors whose names begin with ``key``."""
        factor = 1 / self._own.streams
        made = self._builder.make_product(f"{key}_inject", layer, self.kept, factor=factor)
        self._read(key, [made])

    def end(self) -> None:
        """Add the output of the operator to the streams."""
        values = {**self.given.put("x"), **self.x.put("y"), **self.kept.put("weights")}
        values |= {"length": self._hidden, "count": self._own.streams}
        self._builder.add("inject", values, each=1)

    def join(self) -> None:
        """Let the first stream be what the head reads."""
        self._read("hyper_head", [])
        self._builder.add_cap(self.read, self._hidden, 0.0, 1.0, self.x)

    def normalize(self, x: Area, y: Area, key: str) -> None:
        """Normalise every stream of ``x`` with weights of its own, into ``y``."""
        weights, hidden = self._builder.read_vector(key, self._builder.layer), self._hidden
        norm = HeadNorm(weights=weights, step=hidden, place="before")
        self._builder.add_gates(x, y, range(0, self.width, hidden), hidden, norm=norm)

    def _read(self, key: str, others: Sequence[Product]) -> None:
        builder, rank, count = self._builder, self._own.rank, self._own.streams
        normed = builder.take_area("normed streams", self.width)
        self.normalize(self.x, normed, f"{key}_norm")
        inner, opened = (builder.take_area(name, rank) for name in ("inner gates", "opened gates"))
        down = builder.make_product(f"{key}_down", None, inner, factor=1 / count)
        builder.add_products(normed, self.width, [down, *others])
        ones = Area(builder.fill(1.0, rank), 0)
        builder.add_gates(ones, opened, [0], rank, Gates(inner, [0], "silu"))
        gates = builder.take_area("stream gates", self.width)
        builder.add_product(opened, rank, f"{key}_up", None, gates)
        values = {**normed.put("x"), **gates.put("gates"), **self.read.put("y")}
        values |= {"length": self._hidden, "count": count}
        builder.add("collapse", values, each=-(-self._hidden // PIECE))


class NgramBuilder:
    """Adds what n-grams give, and numbers the rows that a call's tokens look up."""

    def __init__(
        self,
        model: Model,
        builder: Builder,
        own: Ngrams,
        streams: GatedStreamBuilder,
        memory: StateMemory,
    ) -> None:
        self._builder, self._own, self._streams, self._memory = builder, own, streams, memory
        self._hidden, self._each = model.shape.hidden, own.count
        self._numbers: I32 = builder.take("int32", builder.extent.tokens * self._each)

    def add(self) -> None:
        """Add the rows of a token to all streams; a layer begins with them."""
        builder, hidden, streams = self._builder, self._hidden, self._streams
        width, x = streams.width, streams.x
        rows = builder.take_area("ngram rows", hidden, is_tight=True)
        target = Area(rows.address, hidden // self._each)
        table = builder.need("ngram_rows", None)
        builder.add_rows("ngram_rows", table, self._numbers, target, 1.0, each=self._each)
        keys, values = (
            builder.take_area(f"ngram {name}", size)
            for name, size in (("keys", width), ("values", hidden))
        )
        products = (("ngram_key", keys), ("ngram_value", values))
        made = [builder.make_product(key, None, y) for key, y in products]
        builder.add_products(rows, hidden, made)
        streams.normalize(keys, keys, "ngram_key_norm")
        queries = builder.take_area("normed streams", width)
        streams.normalize(x, queries, "ngram_query_norm")
        gated = builder.take_area("ngram gated", width)
        given = {**keys.put("keys"), **queries.put("queries"), **values.put("values")}
        given |= {**gated.put("y"), "length": hidden, "count": width // hidden}
        builder.add("admit", given, each=width // hidden)
        streams.normalize(gated, queries, "ngram_convolution_norm")
        builder.add_term(gated, x, width)
        self._convolve(queries, gated, width)
        builder.add_term(gated, x, width)

    def _convolve(self, x: Area, y: Area, channels: int) -> None:
        builder, own = self._builder, self._own

        def read() -> F32:
            import numpy as np

            values = builder.read_values("ngram_convolution").reshape(channels, own.kernel)
            spread = np.zeros((own.window, channels), np.float32)
            spread[:: own.length] = values.T  # tokens between those that it reads count nothing
            return spread.reshape(-1)

        weights: F32 = builder.keep(own.window * channels, read)
        more = {"weights": weights.ctypes.data, "tails": self._memory.ngram_tails, "is_silu": 1}
        more["sequence_stride"] = self._memory.stride
        builder.add_convolution(x, y, channels, own.window, more)

    def number_rows(self, tokens: I32, sequences: I32, positions: I32) -> None:
        """Number the rows of a call's tokens, the last of each sequence is remembered."""
        import numpy as np

        own, before = self._own, self._own.length - 1
        per = self._each // before
        numbers = self._numbers[: len(tokens) * self._each].reshape(-1, self._each)
        for sequence in np.unique(sequences):
            chosen = np.flatnonzero(sequences == sequence)
            tail = self._memory.view_last_tokens(int(sequence), before)
            line = np.concatenate([tail, tokens[chosen]])
            tail[:] = line[len(line) - before :]
            windows = np.lib.stride_tricks.sliding_window_view(line, own.length)[:, ::-1]
            distance = np.arange(1, own.length)
            ends = (windows[:, 1:] == own.end_token) | (distance > positions[chosen][:, None])
            ends = np.logical_or.accumulate(ends, axis=1)
            known = windows.astype(np.uint64)
            known[:, 1:][ends] = own.end_token
            parts = known * np.array(own.multipliers, np.uint64)
            hashes = np.bitwise_xor.accumulate(parts, axis=1)[:, 1:].repeat(per, axis=1)
            rows = hashes % np.array(own.sizes, np.uint64) + np.array(own.offsets, np.uint64)
            numbers[chosen] = rows.astype(np.int32)
