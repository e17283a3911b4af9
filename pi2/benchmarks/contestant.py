"""Programs under test."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from pi2.benchmarks.profile import Profile
from pi2.benchmarks.samples import Description, Sample, TokenBytes
from pi2.benchmarks.worker import Recipe, Worker
from pi2.benchmarks.workloads import Workload
from pi2.progress import Progress


class Contestant(Protocol):
    """A program that can be timed; it lives in a process of its own."""

    def describe(self) -> Description:
        """Describe the engine and the model."""

    def run(self, workload: Workload) -> Sample:
        """Do ``workload`` once; only its own tokens are timed."""

    def profile(self, workload: Workload) -> Profile | None:
        """Do it once more with a stopwatch on every call; None if it has no parts to time."""

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        """Bytes that a token must read, if that is known; ``active`` share of the neurons."""

    def close(self) -> None:
        """Release everything."""


class ContestantRecipe(Recipe, Protocol):
    """Makes a contestant."""

    @property
    def subject(self) -> str:
        """What findings call the program."""


class RemoteContestant:
    """A contestant as its caller sees it.  Use it as a context manager."""

    def __init__(self, recipe: ContestantRecipe, progress: Progress) -> None:
        self._worker = Worker(recipe, progress, recipe.subject)
        try:
            self.description: Description = self._worker.call("describe")
        except BaseException:
            self._worker.close()
            raise

    def run(self, workload: Workload) -> Sample:
        """See `Contestant`."""
        sample: Sample = self._worker.call("run", workload)
        return sample

    def profile(self, workload: Workload) -> Profile | None:
        """See `Contestant`."""
        found: Profile | None = self._worker.call("profile", workload)
        return found

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        """See `Contestant`."""
        found: TokenBytes | None = self._worker.call("count_bytes", workload, active)
        return found

    def read_peak_rss_bytes(self) -> int:
        """Highest resident set of its process so far."""
        return self._worker.read_peak_rss_bytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._worker.close()
