"""Contracts of units next to an executor, and of units with a whole model.

A unit next to the executor, such as a GPU or an NPU: it keeps the hottest neurons of each layer and
computes all of them, while the executor computes the predicted ones among the others.

A backend that can do so has ``build_unit`` (`pi2.backends.protocol.Backend`). Of a layer's neurons
in stored order, hottest first, the unit owns the first ``UnitShare.neurons[layer]``.

Order of calls::

    offer_room(layer), keep(layer, ...)     once for each layer, while the model is loaded
    for each layer of each chunk or step:
        start(layer, inputs, routes)        -> a job; returns at once
        add(job, bundles, first)            any number of times: more neurons of the layer
        wait(job)                           before the memory of added bundles is changed
        finish(job)                         -> the sum [T, hidden]
    multiply(name, inputs)                  -> a job with rows of a matrix, finished as others
    give_up()                               after an error or an interrupt, at any point

Memory. A unit's weights are in its own memory, in any layout; ``allocate`` counts it in the plan's
``memory.units``. A unit whose memory the host can write may offer it (``offer_room``): bundles are
then read from flash straight into place, and nothing is copied. The arrays that are given to
``keep``, ``start`` and ``wait``-ed ``add`` are the caller's: a unit copies arrays that it needs for
longer.

Concurrency. Calls come from one thread. Jobs are computed in the order of their starts, while the
caller goes on; up to ``UnitShare.jobs`` of them are under way.

Failure. Any call but ``close`` may raise `UnitFailed`: the device is lost, or out of memory. The
unit is then closed, and nothing else is asked of it.

A model that a unit has as a whole, in its own memory: all weights, all neurons, the KV cache.

A backend that can do so has ``build_whole`` (`pi2.backends.protocol.WholeBackend`). The model's
layers need not be known then: tokens go in and logits come out, and nothing waits in between. The
unit itself finds the neurons that compute a token.

Order of calls::

    put(tensor, first)              dense tensors in pieces of rows, in any order, while loading
    keep(layer, first, bundles)     each layer's neurons in stored order
    expect(end)                     before each of the following
    prefill(tokens, sequence, position)     a chunk of a prompt, all neurons; returns at once
    logits(first)                           -> logits of the chunk's tokens from first on
    step(tokens, sequences, positions)      -> logits of a token each of several sequences"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pi2.arrays import F32, U8
from pi2.diagnostics import UserError
from pi2.plan.arithmetic.units import UnitShare
from pi2.plan.weights.bundles import join_scales
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.arrays import I32
    from pi2.backends.blocks.model import BlockModel
    from pi2.backends.executor import ExecutorObserver
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.weights.layout import Tensor


UnitObserver = Callable[[str, float, float], None]
"""Called with what a unit did, and when it began and ended: seconds of `time.perf_counter`."""


class UnitFailed(Exception):
    """A unit cannot go on; the text says why, as the end of a sentence."""

    def __init__(self, text: str, *, help: str | None = None) -> None:
        """``help`` says what can be done about it."""
        super().__init__(text)
        self.help = help


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    name: str
    """The unit's name in the device and the plan."""
    count: Callable[[int], None]
    """Counts bytes that the host does not see as an array, such as a GPU's."""
    progress: Progress = ignore_progress
    """Called with a label and the share done while something takes its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRequest(_Request):
    """Everything that a unit needs to compute its share of a model's layers."""

    share: UnitShare
    scales: Sequence[U8] | None = None
    """Per layer, the scales of its neurons [neurons, ``scales_stride``] in stored order, if bundles
    do not have them."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Its rows of ``share.matrices``, in main memory while the unit is made; it copies them."""
    allocate: Callable[[int], U8]
    """``allocate(size)`` gives zeroed bytes of main memory, page-aligned, counted as the unit's."""
    adopt: Callable[[U8], U8]
    """Counts memory that the unit has brought itself, and returns it."""

    def join_scales(self, layer: int, bundles: U8, first: int) -> U8:
        """Return ``bundles``, the neurons of a layer from ``first`` on, with their scales in
        them."""
        if self.scales is None:
            return bundles
        rows = slice(first, first + len(bundles))
        return join_scales(bundles, self.scales[layer], self.share.bundle, rows)

    def cut(self, layer: int, bundles: U8, first: int) -> Iterator[U8]:
        """Yield them likewise, no more at a time than are added at once."""
        for begin in range(0, len(bundles), self.share.stretch):
            piece = bundles[begin : begin + self.share.stretch]
            yield self.join_scales(layer, piece, first + begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """A unit's padding, because its programs have fixed shapes."""

    computed: int
    """Products of a token and a neuron, or a matrix's row, summed over jobs."""
    wanted: int
    """The requested ones."""

    @property
    def share(self) -> float:
        """Share of the computation; 0 of nothing."""
        return 1 - self.wanted / self.computed if self.computed else 0.0


class DenseUnit(Protocol):
    """A unit that computes neurons densely, next to the executor.  One calling thread.

    By default it copies all values at once, and counts the work that it notes."""

    observer: UnitObserver | None = None
    busy_s: float = 0.0
    """Seconds that the unit has worked, of the jobs that were finished."""

    def offer_room(self, layer: int) -> U8 | None:
        """Room [neurons, stride] for the layer's bundles as the store has them, which the host can
        write and where they stay; None if the unit rearranges them on their way."""
        return None

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Keep ``bundles`` [n, stride], the neurons of ``layer`` from stored index ``first`` on,
        within the unit's own; calls for a layer follow each other in stored order. They may be in
        the room that was offered for them."""

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        """Begin to compute the first ``neurons`` of the unit's neurons of ``layer``, by default all
        of them, for ``inputs`` [T, hidden]; return the job's number.

        ``routes`` [T, experts] are the weights of an MoE model's experts, 0 for experts that do not
        compute a token."""

    def multiply(self, name: str, inputs: F32) -> int:
        """Begin to multiply ``inputs`` [T, length] with the rows of a matrix that the unit has;
        return the job's number.  ``finish`` gives [T, rows]."""

    def add(self, job: int, bundles: U8, first: int) -> None:
        """Let the job compute ``bundles`` [n, stride] too, the neurons of its layer from stored
        index ``first`` on, which are not kept; they may not change until ``wait`` or ``finish``
        has returned."""

    def wait(self, job: int) -> None:
        """Return when nothing that was added to the job is read from the caller's memory."""
        return

    def finish(self, job: int) -> F32:
        """Wait for the job; return the sum [T, hidden] of its neurons, or the products [T, rows],
        valid until the next job begins."""

    def give_up(self) -> None:
        """Forget all jobs, after an error or an interrupt in the midst of any call; return when
        nothing is read from the caller's memory any more.  The unit can be used again then."""

    def observe(self, observer: UnitObserver | None) -> None:
        """Tell ``observer`` of each piece of work when its job is finished; None ends it."""
        self.observer = observer

    def note(self, name: str | None, start_s: float, end_s: float) -> None:
        """Count a piece of work, and tell of it if it has a name."""
        self.busy_s += end_s - start_s
        if self.observer is not None and name is not None:
            self.observer(name, start_s, end_s)

    @property
    def padding(self) -> Padding | None:
        """Of the jobs so far, if the unit's programs have fixed shapes."""
        return None

    def close(self) -> None:
        """Give back threads, processes and memory; jobs under way are given up.  Never fails, and
        may be called twice."""


Job = TypeVar("Job")


class NumberedUnit(DenseUnit, Generic[Job]):
    """A dense unit whose jobs have numbers, in the order in which they begin."""

    def __init__(self, request: UnitRequest) -> None:
        self._request, self._share = request, request.share
        self._jobs: dict[int, Job] = {}
        self._next = 0

    def _begin(self, job: Job) -> int:
        """Return the job's number."""
        assert len(self._jobs) < self._share.jobs, "more jobs than were asked for"
        number, self._next = self._next, self._next + 1
        self._jobs[number] = job
        return number

    def give_up(self) -> None:
        """Forget all jobs."""
        self._jobs.clear()


@contextmanager
def explain_failure() -> Iterator[None]:
    """Turn a diagnostic, and a lack of memory, into a failure of the unit."""
    try:
        yield
    except UserError as error:
        found = error.diagnostics[0]
        raise UnitFailed(found.message, help=found.help) from error
    except MemoryError as error:
        raise UnitFailed("there is no main memory left for it") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRequest(_Request):
    """Everything that a unit needs to have a model as a whole; bundles have their scales."""

    resolved: ResolvedPlan
    expert_neurons: Sequence[I32] | None = None
    """Per layer of an MoE model, the stored indices [neurons] of its neurons, expert by expert,
    ascending within each; needed to name neurons only."""


class SequenceModel(Protocol):
    """A model: tokens go in, logits come out. One calling thread."""

    @property
    def program(self) -> BlockModel | None:
        """The program that computes it, which keeps contexts and states and shows what the head
        reads; None if the unit keeps everything to itself."""

    def expect(self, end: int) -> None:
        """Tell that the calls that follow bring a sequence to ``end`` tokens at most."""

    def abandon(self) -> None:
        """Forget work that has begun and not ended."""

    def prefill(
        self, tokens: I32, sequence: int, position: int, progress: Callable[[float], None]
    ) -> None:
        """Begin to compute ``tokens`` [T] of a sequence, the first of which stands at ``position``,
        with all neurons; ``progress`` is told the share that is done, if it takes long."""

    def logits(self, first: int) -> F32:
        """Logits [n, vocab] of the last chunk's tokens from ``first`` on, n at most
        `pi2.plan.arithmetic.sizes.LOGIT_ROWS`; valid until the next call."""

    def read_head_input(self, first: int) -> F32:
        """What the head reads of the last chunk's tokens from ``first`` on [n, hidden], of as many
        as ``logits`` gives; valid until the next call. Of a model with a program."""

    def join(self, given: F32) -> None:
        """Join the embeddings of the next call's tokens with ``given`` [T, hidden], what the head
        of an MTP head's main model reads. Of a model with a program."""

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        """Compute ``tokens`` [T], the next ones of different sequences, with the neurons that the
        predictor names; return their logits [T, vocab], valid until the next call."""

    @property
    def waited_s(self) -> float:
        """Seconds that computing waited for reads."""

    @property
    def touched_bytes(self) -> int:
        """Bytes in memory of the neurons that steps have used; a step counts each once."""

    def count_work(self) -> Mapping[str, float | None]:
        """Counters since loading, by their names in `pi2.engine.statistics.RunStatistics`."""

    def observe(self, observer: ExecutorObserver | None) -> None:
        """Tell ``observer`` of all work from now on; None ends it."""


class WholeModel(SequenceModel, Protocol):
    """A model on a unit, whose weights are brought there; the unit keeps everything to itself."""

    program, touched_bytes, waited_s = None, 0, 0.0

    def expect(self, end: int) -> None:
        return

    def abandon(self) -> None:
        """Do nothing: work that has begun ends by itself."""
        return

    def observe(self, observer: ExecutorObserver | None) -> None:
        return

    def read_head_input(self, first: int) -> F32:
        raise AssertionError("a unit shows nothing of its model")

    def join(self, given: F32) -> None:
        raise AssertionError("a unit has no MTP head")

    def put(self, tensor: Tensor, first: int) -> None:
        """Copy rows of a dense tensor, from row ``first`` on, a multiple of 32. ``tensor`` has
        them: a multiple of 32 rows, or the last ones."""

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Copy ``bundles`` [n, stride], the neurons of ``layer`` from stored index ``first`` on."""

    def close(self) -> None:
        """Give the unit back.  Never fails, and may be called twice."""
        return
