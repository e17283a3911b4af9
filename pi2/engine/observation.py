"""What each FFN reads while prompts are processed, and what its neurons answer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32, U8, Bits
from pi2.backends.executor import ExecutorObserver
from pi2.backends.protocol import BuildRequest, Executor, InputReader
from pi2.backends.reference import operators
from pi2.diagnostics import UserError
from pi2.plan.weights.bundles import join_scales, slice_experts


class ShareObserver:
    """Observes shares in the thread that drives them, doing nothing itself; times are of
    `time.perf_counter`."""

    def note_work(self, unit: str, name: str, start_s: float, end_s: float) -> None:
        """A unit has computed something; it is told when the job is finished."""

    def note_unit_wait(self, unit: str, layer: int | None, start_s: float, end_s: float) -> None:
        """The caller has waited for a unit, which had work of ``layer``, or of the head."""


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
        """``compute`` replaces activations of bundles, neurons last; UserError P662 if the backend
        hides FFN inputs."""
        if not isinstance(executor, InputReader):
            raise UserError.of(
                "P662",
                "this backend does not show what its neurons do",
                help="use the cpu or the reference backend: --set 'backends.cpu=\"reference\"'",
            )
        self._input: InputReader = executor
        self._share_input = executor.share_input
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
        cutoffs = self._input.read_cutoffs()
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
        return self._share_input()[0]

    def _find_computing(self) -> Bits:
        """Whether an expert computes a token [T, experts]."""
        return np.asarray(self._input.read_routes() != 0)


def compute_activations(
    request: BuildRequest, inputs: F32, bundles: U8, cutoffs: F32 | None
) -> F32:
    """Activations [T, n] of neurons for ``inputs`` [T, hidden] and, if the layer has them,
    ``cutoffs`` [T, 1] of gates. ``bundles`` [n, .] are laid out as ``request.whole_bundle``."""
    return operators.compute_activations(
        request.model, request.whole_bundle, inputs, bundles, cutoffs=cutoffs
    )
