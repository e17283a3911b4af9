"""What a run did: times, neurons, bytes, memory."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from pi2.machine.memory import read_sizes


class Counters:
    """Dataclasses of counters are added and subtracted field by field.  None is not
    counted; tuples may have different lengths."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __add__(self, other: Self) -> Self:
        return self._combine(other, operator.add)

    def __sub__(self, other: Self) -> Self:
        return self._combine(other, operator.sub)

    def _combine(self, other: Self, combine: Callable[[Any, Any], Any]) -> Self:
        found: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, tuple):
                pairs = zip_longest(mine, theirs, fillvalue=0)
                found[name] = tuple(combine(*pair) for pair in pairs)
            else:
                found[name] = None if mine is None or theirs is None else combine(mine, theirs)
        return type(self)(**found)


@dataclass(frozen=True, slots=True)
class Phase(Counters):
    """Steps of as many sequences."""

    steps: int = 0
    tokens: int = 0
    """Tokens that they made."""
    seconds: float = 0.0
    read_bytes: int = 0
    waited_s: float = 0.0
    """Seconds in which computing waited for reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The work for all requests so far."""

    phases: Mapping[int, Phase] = field(default_factory=lambda: MappingProxyType({}))
    """Steps, by the number of sequences that went on in each."""
    prompt_tokens: int = 0
    """Tokens of prompts that were read."""
    prefill_s: float = 0.0
    """Seconds in them."""

    @property
    def whole(self) -> Phase:
        """All steps, of any number of sequences."""
        return reduce(operator.add, self.phases.values(), Phase())

    @property
    def stepped_sequences(self) -> int:
        return sum(sequences * phase.steps for sequences, phase in self.phases.items())

    def __sub__(self, other: Rounds) -> Rounds:
        phases = {
            sequences: phase - other.phases.get(sequences, Phase())
            for sequences, phase in sorted(self.phases.items())
        }
        return Rounds(
            phases=MappingProxyType({key: phase for key, phase in phases.items() if phase.steps}),
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            prefill_s=self.prefill_s - other.prefill_s,
        )

    def describe(self) -> dict[str, float]:
        whole = self.whole
        return {
            "steps": whole.steps,
            "stepped_sequences": self.stepped_sequences,
            "stepped_tokens": whole.tokens,
            "steps_s": whole.seconds,
            "prompt_tokens": self.prompt_tokens,
            "prefill_s": self.prefill_s,
        }


@dataclass(slots=True)
class NeuronCounters:
    """Neurons of sparse layers, summed over layers and tokens; ``predicted``: those computed."""

    predicted: int = 0
    active: int = 0
    possible: int = 0
    routed: int = 0
    """Experts that computed tokens in layers whose routing was looked ahead at."""
    foreseen: int = 0
    """Experts among them that prefetching had predicted."""
    touched: int = 0
    """Neurons that steps have used; a neuron of several tokens in a step counts once."""


@dataclass(slots=True, kw_only=True)
class SpeculationCounters(Counters):
    """What speculation has done since loading."""

    drafts: int = 0
    """Drafts of one token or more."""
    draft_tokens: int = 0
    """Tokens that were predicted."""
    accepted_tokens: int = 0
    """Accepted draft tokens."""
    accepted_by_position: tuple[int, ...] = ()
    """Accepted draft tokens that were the first of a draft, the second, and so on."""
    drafted_steps: int = 0
    """Steps with drafts."""
    drafted_tokens: int = 0
    """Tokens of these steps: accepted drafts and the tokens drawn after them."""
    drafted_bytes: int = 0
    """Bytes that these steps have touched in memory and on flash, drafting included."""
    drafted_flash_bytes: int = 0
    plain_tokens: int = 0
    """Tokens of steps without drafts."""
    plain_bytes: int = 0
    """Bytes that these have touched in memory and on flash."""
    plain_flash_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics(Counters):
    """Counters of a loaded model, from loading on; differences of two give a generation's."""

    predicted_neurons: int = 0
    """Neurons that the predictor named, over layers and tokens."""
    active_neurons: int | None = 0
    """Neurons of these with a non-zero activation; None if they are not counted."""
    possible_neurons: int = 0
    """Neurons of the layers that were computed sparsely, in an MoE model of the tokens' experts."""
    cache_hits: int = 0
    """Named neurons that were in memory."""
    cache_misses: int = 0
    """Named neurons that were read from flash."""
    cache_skips: int = 0
    """Named neurons that were not in memory, and not worth a read to the plan."""
    cache_evictions: int = 0
    """Neurons that made room."""
    flash_read_bytes: int = 0
    """Bytes of neurons read from flash, prefill and loading included."""
    waited_s: float = 0.0
    """Seconds that computing waited for these reads."""
    prefill_s: float = 0.0
    """Seconds of prompts."""
    steps_s: float = 0.0
    """Seconds of steps."""
    steps_waited_s: float = 0.0
    """Seconds of these in which computing waited for reads."""
    steps_read_bytes: int = 0
    """Bytes that steps read from flash."""
    step_bytes: int = 0
    """Bytes of weights and KV cache that steps read from memory."""
    dense_neurons: int = 0
    """Neurons of sparse layers that units other than the sparse one have computed."""
    routed_experts: int = 0
    """Experts that computed tokens in layers whose routing was looked ahead at."""
    foreseen_experts: int = 0
    """Experts among them that prefetching had predicted."""
    tokens_without_ahead: int = 0
    """Tokens that did not look ahead, because it did not pay."""
    expert_weight: float = 0.0
    """Routing weight of tokens whose experts the plan may replace or leave out, over layers."""
    replaced_weight: float = 0.0
    """Of experts in whose place others computed, which were in memory."""
    left_out_weight: float = 0.0
    """Of experts in whose place nothing computed."""
    score_mass: float = 0.0
    """Predictors' scores above the threshold, summed over named neurons of layers that are not all
    in memory; 0 if the plan reads all missing neurons."""
    left_out_mass: float = 0.0
    """Scores of neurons that were missing and not worth a read to the plan."""
    gate_reads: int = 0
    """Missing neurons whose gate was read first."""
    flash_saved_bytes: int = 0
    """Bytes of up and down that were not read, because gates were closed."""
    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)
    """What drafting tokens has brought, if the plan says `decode.speculation`."""

    @property
    def predicted_share(self) -> float | None:
        """Share of neurons that were computed; None if every layer ran densely."""
        computed = self.predicted_neurons + self.dense_neurons
        return divide(min(computed, self.possible_neurons), self.possible_neurons)

    @property
    def active_share(self) -> float | None:
        """Share of neurons with a non-zero activation; None if dense or not counted."""
        if self.active_neurons is None:
            return None
        return divide(self.active_neurons, self.possible_neurons)

    @property
    def routing_recall(self) -> float | None:
        """Share of the experts that looking ahead had named; None where it did not."""
        return divide(self.foreseen_experts, self.routed_experts)

    @property
    def replaced_share(self) -> float | None:
        """Share of the experts' weight that others have taken; None where routing is exact."""
        return divide(self.replaced_weight, self.expert_weight)

    @property
    def left_out_share(self) -> float | None:
        """Share of the experts' weight that was left out; None where routing is exact."""
        return divide(self.left_out_weight, self.expert_weight)

    @property
    def left_out_mass_share(self) -> float | None:
        """Share of the score mass that was left out; None where the plan leaves nothing out."""
        return divide(self.left_out_mass, self.score_mass)

    @property
    def hit_rate(self) -> float | None:
        """Share of named neurons that were in memory."""
        return divide(self.cache_hits, self.cache_hits + self.cache_misses)


Cause = Literal["disk", "waiting for reads", "memory bandwidth", "compute"]


def split_time(
    statistics: RunStatistics, memory_bytes_s: float | None, disk_bytes_s: float | None
) -> dict[Cause, float]:
    """Shares of the time of a run's steps, or of its prompt if it made none; empty without either.

    Waiting is measured.  It counts as the disk's for as long as the read bytes take at
    ``disk_bytes_s``; all of it does if the rate is unknown.  Memory has the time of the counted
    bytes at its rate, and computing has the rest."""
    steps_s = statistics.steps_s
    total_s = steps_s or statistics.prefill_s
    if not total_s:
        return {}
    read_bytes, waited_s = statistics.steps_read_bytes, statistics.steps_waited_s
    if not steps_s:
        read_bytes, waited_s = statistics.flash_read_bytes, statistics.waited_s
    waited_s = min(waited_s, total_s)
    disk_s = waited_s if disk_bytes_s is None else min(waited_s, read_bytes / disk_bytes_s)
    memory_s = 0.0
    if steps_s and memory_bytes_s is not None:
        memory_s = min(total_s - waited_s, statistics.step_bytes / memory_bytes_s)
    return {
        "disk": disk_s / total_s,
        "waiting for reads": (waited_s - disk_s) / total_s,
        "memory bandwidth": memory_s / total_s,
        "compute": (total_s - waited_s - memory_s) / total_s,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitUse:
    """The work of a unit but the sparse one since loading."""

    name: str
    """Its name in the device."""
    owned_share: float
    """Share of all neurons that it computes in steps of as many sequences as the plan has."""
    computed_neurons: int
    """Neurons that it has computed in steps, summed over layers and tokens."""
    busy_s: float
    """Seconds that it has worked, prompts included."""
    lost: str | None
    """Why the run has gone on without it, if it has."""
    padding: float | None = None
    """Share of its work that was padding of fixed shapes."""
    emulated: bool = False
    """Whether the CPU emulates it: its seconds mean nothing."""


def divide(part: float, whole: float) -> float | None:
    """``part / whole``, or None for an empty whole."""
    return part / whole if whole else None


def read_peak_rss_bytes() -> int:
    """Highest resident set in bytes, on Linux from VmHWM: ``ru_maxrss`` survives an exec."""
    if (peak := read_sizes(Path("/proc/self/status")).get("VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
