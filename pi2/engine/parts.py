"""The parts of a loaded model: what the orchestrator has built for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pi2.diagnostics import UserError
from pi2.records import dataclass

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.protocol import Executor
    from pi2.backends.units import SequenceModel
    from pi2.engine.feed_forward import FeedForward
    from pi2.engine.forward import Sequences
    from pi2.memory.budget import Budget
    from pi2.memory.cache import NeuronCache
    from pi2.memory.flash import FlashReader, NullReader
    from pi2.memory.weight_stream import Expected, FileReads
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.store.reader import NeuronStore
    from pi2.tokens.table_tokenizer import Coder
    from pi2.weights.gguf_weights import FileTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a model consists of that is computed layer by layer."""

    executor: Executor
    cache: NeuronCache
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that the orchestrator has built for a plan."""

    resolved: ResolvedPlan
    store: NeuronStore | FileTexts | None
    """None where the backend computes nothing."""
    tokenizer: Coder | None
    budget: Budget
    layers: LayerParts | None
    """None where a unit has the model as a whole."""
    whole: SequenceModel | None = None
    """None where it is computed layer by layer."""
    reader: FlashReader | NullReader | FileReads
    forward: Sequences
    load_s: float
    loaded_bytes: int = 0
    """Read from the store in bulk."""
    expected: Expected | None = None
    """None where nothing streams."""
    compute_threads: int
    resident: Sequence[U8] = ()
    """Resident weights that steps read, in one array or several."""
    lock_fallback: str | None = None
    """Why memory is not locked, if the plan wants it."""
    draft: Parts | None = None
    """The draft model's, if there is one."""
    release: ExitStack
    """Gives back threads, files and memory, the last that was taken first."""

    @property
    def executor(self) -> Executor:
        return self._get_layers().executor

    @property
    def cache(self) -> NeuronCache:
        return self._get_layers().cache

    @property
    def feed_forward(self) -> FeedForward:
        return self._get_layers().feed_forward

    def _get_layers(self) -> LayerParts:
        """UserError P662 if there are none, for callers that want to observe layers."""
        if self.layers is None:
            raise UserError.of(
                "P662",
                f"{self.resolved.sparse_unit!r} has the whole model and shows none of its layers",
                help="take a plan whose split gives the neurons to a CPU",
            )
        return self.layers
