"""The one way to look at what units beside the executor do, and at waiting for them."""

from __future__ import annotations


class ShareObserver:
    """Is told by the shares that it observes, in the thread that drives them; does nothing itself.

    Times are of `time.perf_counter`.
    """

    def note_work(self, unit: str, name: str, start_s: float, end_s: float) -> None:
        """A unit has computed something; it is told when the job is finished."""

    def note_unit_wait(self, unit: str, layer: int | None, start_s: float, end_s: float) -> None:
        """The caller has waited for a unit, which had work of ``layer``, or of the head."""
