"""A model that an executor computes layer by layer, and who looks at its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import F32, I32, U8, Bits
from pi2.backends.executor import Executor, ExecutorObserver
from pi2.backends.protocol import BuildRequest
from pi2.diagnostics import UserError
from pi2.plan.weights.bundles import join_scales, slice_experts

if TYPE_CHECKING:
    from pi2.engine.dense_shares import SharedRows
    from pi2.engine.feed_forward import FeedForward
    from pi2.store.file_read import EmbeddingRows


class LayerModel:
    """`pi2.backends.units.SequenceModel`: calls the executor in order, layer by layer."""

    def __init__(
        self,
        executor: Executor,
        feed_forward: FeedForward,
        *,
        layers: int,
        chunk: int,
        rows: SharedRows | None = None,
        embedding: EmbeddingRows | None = None,
        layer_embedding: EmbeddingRows | None = None,
        is_single: bool = True,
        neuron_bytes: int = 0,
    ) -> None:
        """``chunk``: tokens that go through a layer together; ``rows``: computes projections and
        head, if not the executor; ``embedding``: reads its rows if they are not in memory;
        ``layer_embedding``: reads rows of the layers' own; ``is_single``: whether every step is a
        token of the only sequence; ``neuron_bytes``: that computing a neuron touches."""
        self.executor, self.program = executor, executor.program
        self.feed_forward = feed_forward
        self._rows = rows or executor
        self._layers = layers
        self._chunk = chunk
        self._embedding, self._layer_embedding = embedding, layer_embedding
        self._is_single = is_single
        self._neuron_bytes = neuron_bytes
        self._chunks = 1
        """Chunks of the last piece; 1 of a step."""
        self._given: F32 | None = None

    def expect(self, end: int) -> None:
        self.program.expect(end)

    def abandon(self) -> None:
        """Forget work in progress; the neuron cache keeps its content."""
        self._given = None
        self.feed_forward.abandon()

    def observe(self, observer: ExecutorObserver | None) -> None:
        self.executor.observe(observer)

    @property
    def waited_s(self) -> float:
        return self.feed_forward.waited_s

    @property
    def touched_bytes(self) -> int:
        return self.feed_forward.counters.touched * self._neuron_bytes

    def count_work(self) -> Mapping[str, float | None]:
        return self.feed_forward.count_work()

    def join(self, given: F32) -> None:
        self._given = given

    def logits(self, first: int) -> F32:
        return self._rows.logits(self._select_row(first))

    def read_head_input(self, first: int) -> F32:
        return self.executor.read_head_input(self._select_row(first))

    def _select_row(self, first: int) -> int:
        """Select the chunk of a piece's token; return its row there."""
        if self._chunks == 1:
            return first
        number, row = divmod(first, self._chunk)
        self.executor.select_chunk(number)
        return row

    def prefill(
        self, tokens: I32, sequence: int, position: int, progress: Callable[[float], None]
    ) -> None:
        executor, feed_forward = self.executor, self.feed_forward
        if not self._is_single:
            executor.select_sequence(sequence)
        places = range(0, len(tokens), self._chunk)
        self._chunks = len(places)
        feed_forward.begin_prompt()
        for number, first in enumerate(places):
            executor.select_chunk(number)
            self._embed(tokens[first : first + self._chunk])
        for number, first in enumerate(places):
            executor.select_chunk(number)
            self._rows.attend(0, position + first)
        for layer in range(self._layers):
            for number in feed_forward.run_dense(layer, len(places)):
                # Other chunks may still be computed by another unit.
                if layer + 1 < self._layers:
                    self._rows.attend(layer + 1, position + places[number])
            if len(places) > 1:
                progress((layer + 1) / self._layers)

    def _embed(self, tokens: I32) -> None:
        self.executor.embed(self._find_rows(tokens))
        self._join(len(tokens))

    def _join(self, count: int) -> None:
        if self._given is not None:
            self.executor.join(self._given[:count])
            self._given = self._given[count:] if len(self._given) > count else None

    def _find_rows(self, tokens: I32) -> I32:
        """Rows of the embedding that the executor has; layers' own embeddings are read as well."""
        if self._layer_embedding is not None:
            self._layer_embedding.load(tokens)
        return tokens if self._embedding is None else self._embedding.load(tokens)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        executor, feed_forward, rows = self.executor, self.feed_forward, self._rows
        self._chunks = 1
        if self._is_single:
            executor.select_chunk(0)
            self._embed(tokens)
        else:
            executor.begin_step(self._find_rows(tokens), sequences, positions)
            self._join(len(tokens))
        feed_forward.begin_step(len(tokens))
        names = False
        for layer in range(self._layers):
            is_dense = feed_forward.decode_is_dense(layer)
            names |= not is_dense
            if not is_dense:
                feed_forward.prepare_sparse(layer)
            rows.attend(layer, positions[0])
            if is_dense:
                for _ in feed_forward.run_dense(layer):
                    pass
            else:
                feed_forward.run_sparse(layer)
        if names:
            feed_forward.end_token()
        logits = rows.logits(0)
        if len(logits) == len(tokens):
            return logits
        parts = [logits.copy()]
        while (done := sum(map(len, parts))) < len(tokens):
            parts.append(rows.logits(done).copy())
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that compute in a layer of an MoE model."""

    owners: I32
    """Expert of every neuron in stored order [neurons]."""
    computes: Bits
    """Whether an expert computes a token [T, experts]."""


FfnObserver = Callable[[int, F32, F32, Routing | None], None]
"""Called with a layer, its FFN's input [T, hidden] and its activations [T, neurons] in stored
order, of the tokens of a chunk; and with the routing of an MoE model, else None."""


class DenseObserver(ExecutorObserver):
    """Tells ``observer`` of every dense layer of an executor that it observes."""

    def __init__(
        self,
        executor: Executor,
        request: BuildRequest,
        observer: FfnObserver,
        compute: Callable[[BuildRequest, F32, U8, F32 | None], F32] | None = None,
    ) -> None:
        """``compute`` replaces activations of bundles, neurons last."""
        self._executor = executor
        self._request = request
        self._observer = observer
        self._compute = compute or compute_activations
        self._pieces: dict[int, list[F32]] = {}
        self._owners: dict[int, list[I32]] = {}
        self._chunk = 0

    def select_chunk(self, number: int) -> None:
        self._chunk = number

    def begin_ffn(self, layer: int) -> None:
        self._pieces.pop(self._chunk, None)
        self._owners.pop(self._chunk, None)

    def add_dense(self, layer: int, bundles: U8, first: int) -> None:
        whole, request = bundles, self._request
        if request.scales is not None:
            rows = slice(first, first + len(bundles))
            whole = join_scales(bundles, request.scales[layer], request.bundle, rows)
        cutoffs = self._executor.read_cutoffs()
        values = self._compute(request, self._read_input(), whole, cutoffs)
        if self._request.model.moe is not None:
            owners = slice_experts(whole, request.whole_bundle)
            values *= self._find_computing()[:, owners]
            self._owners.setdefault(self._chunk, []).append(owners)
        self._pieces.setdefault(self._chunk, []).append(values)

    def end_ffn(self, layer: int) -> None:
        """Tell the observer of a layer all of whose neurons were computed."""
        if pieces := self._pieces.pop(self._chunk, None):
            routing = None
            if owners := self._owners.pop(self._chunk, None):
                routing = Routing(np.concatenate(owners), self._find_computing())
            # In stored order: `FeedForward` sees to it for executors that are observed.
            values = np.concatenate(pieces, axis=-1)
            self._observer(layer, self._read_input(), values, routing)

    def _read_input(self) -> F32:
        return self._executor.share_input()[0]

    def _find_computing(self) -> Bits:
        """Whether an expert computes a token [T, experts]."""
        return np.asarray(self._executor.read_routes() != 0)


def compute_activations(
    request: BuildRequest, inputs: F32, bundles: U8, cutoffs: F32 | None
) -> F32:
    """Activations [T, n] of neurons for ``inputs`` [T, hidden] and, if the layer has them,
    ``cutoffs`` [T, 1] of gates. ``bundles`` [n, .] are laid out as ``request.whole_bundle``."""
    from pi2.backends.reference import neurons

    return neurons.compute_activations(
        request.model, request.whole_bundle, inputs, bundles, cutoffs=cutoffs
    )


def refuse_layers() -> LayerModel:
    """UserError P662 for callers that want to observe layers."""
    raise UserError.of(
        "P662",
        "this run does not show what its neurons do, and shows none of its layers",
        help="take a plan of a store whose split gives the neurons to a CPU, and the backend cpu "
        "or reference",
    )
