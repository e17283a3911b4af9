"""What a backend is: a folder of this one whose module ``backend`` has the members of `Backend` and
those of `ExecutorBackend`, `WholeBackend`, `TextBackend` and `UnitBackend`, of one or more.

A backend serves compute units.  Its module imports nothing heavy: `pi2 validate` asks it what it
can compute and how much memory that takes.  ``build`` turns a `BuildRequest` (plain numbers and
arrays: a backend knows nothing of files, caches or plans' texts) into an `Executor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pi2.backends.build_request import BuildRequest, Tensor
from pi2.backends.executor import (
    CONTEXT_BLOCK,
    ContextKeeper,
    Executor,
    Foreseer,
    InputReader,
    LengthAware,
    PartAdder,
    RowDivider,
    StateKeeper,
    add_one_by_one,
)
from pi2.plan.arithmetic.units import GraphFacts, UnitFacts
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.model import Model

if TYPE_CHECKING:
    from pathlib import Path

    from pi2.backends.dense_unit import DenseUnit, UnitRequest
    from pi2.backends.text_model import TextModel, TextRequest
    from pi2.backends.whole_model import WholeModel, WholeRequest
    from pi2.plan.arithmetic.needs import Need
    from pi2.plan.arithmetic.resolved import ResolvedPlan

__all__ = [
    "CONTEXT_BLOCK",
    "Backend",
    "BuildRequest",
    "ContextKeeper",
    "Executor",
    "ExecutorBackend",
    "Foreseer",
    "GraphBackend",
    "InputReader",
    "LengthAware",
    "PartAdder",
    "Preparer",
    "RowDivider",
    "StateKeeper",
    "Tensor",
    "TextBackend",
    "UnitBackend",
    "WholeBackend",
    "add_one_by_one",
]


class Backend(Protocol):
    """Members of every backend's module ``backend``."""

    COMPUTES: bool
    """Whether it computes anything; one that does not runs plans dry, without a store."""
    NATIVE: bool
    """Whether it needs the processor that the device describes."""
    KINDS: tuple[UnitKind, ...]
    """Kinds of units that plans give to it unless somebody says otherwise; none for backends that
    stand in for others."""
    ONLY_EMULATED: bool
    """Whether its devices have been emulated so far, wherever it ran."""

    def find_obstacles(self, features: frozenset[str], architecture: str) -> list[str]:
        """What keeps this backend from running here; empty if nothing does."""

    def find_limits(self, facts: UnitFacts) -> list[str]:
        """What it cannot compute of a plan, each as the end of a sentence that begins with its
        name, such as ``computes no mixtures``; empty if nothing."""


class ExecutorBackend(Backend, Protocol):
    """Members of a backend's module that computes whole models."""

    def need_workspace(self, resolved: ResolvedPlan) -> Need:
        """Bytes that its executor needs in the segment ``workspace``, staging buffers of the engine
        not included."""

    def count_chunk_bytes(self, resolved: ResolvedPlan) -> int:
        """Bytes in ``workspace`` of every chunk of a prompt beyond the first that goes through a
        layer before the next layer begins."""

    def build(self, request: BuildRequest) -> Executor:
        """Compile or load kernels and make the executor."""


class Preparer(Protocol):
    """Members of a backend's module whose executors need something made first; a backend need not
    be one."""

    def prepare(self, request: BuildRequest) -> None:
        """Compile the kernels that ``build`` will load, unless they are cached.

        Called before any memory is filled, with a request that has no room in memory yet: tensors
        are those of the store.  Takes no memory that stays.
        """


class WholeBackend(Backend, Protocol):
    """Members of a backend's module whose units have whole models in their own memory."""

    def find_unit_obstacles(self, unit: Unit) -> list[str]:
        """What keeps a unit of the device from being used here; empty if nothing does."""

    def need_unit_memory(self, facts: UnitFacts) -> Need:
        """Bytes that a unit needs for what the plan gives it."""

    def build_whole(self, request: WholeRequest) -> WholeModel:
        """Compile or load kernels and make room for the model."""


class TextBackend(Backend, Protocol):
    """Members of a backend's module that drives a program which has a model as a whole and gives
    text, not logits."""

    WEIGHTS: str
    """The file by which its folders of weights are known; the plan's ``store`` is one."""

    def find_unit_obstacles(self, unit: Unit) -> list[str]:
        """What keeps the program from being started here; empty if nothing does."""

    def need_unit_memory(self, facts: UnitFacts) -> Need:
        """Bytes of the plan's budgets that it needs."""

    def check_weights(self, folder: Path, model: Model) -> None:
        """UserError unless the folder has weights of the model, as far as one can see."""

    def open_text(self, request: TextRequest) -> TextModel:
        """Start the program with its weights."""


class GraphBackend(Protocol):
    """A unit's backend whose programs have fixed shapes; a backend need not be one."""

    def list_graphs(self, facts: UnitFacts) -> tuple[GraphFacts, ...]:
        """Return the graphs of neurons that a unit of the plan has."""

    def list_graph_tokens(self, facts: UnitFacts) -> tuple[int, ...]:
        """Return the numbers of tokens that its graphs have, ascending."""


class UnitBackend(Backend, Protocol):
    """Members of a backend's module that serves units beside an executor."""

    def find_unit_obstacles(self, unit: Unit) -> list[str]:
        """What keeps a unit of the device from being used here, such as a driver that is missing;
        empty if nothing does.  May take a second."""

    def need_unit_memory(self, facts: UnitFacts) -> Need:
        """Bytes that a unit needs for what the plan gives it."""

    def build_unit(self, request: UnitRequest) -> DenseUnit:
        """Compile or load kernels and make the unit."""
