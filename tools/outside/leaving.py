"""Constants fitted to rows of all devices but one, and that device's errors with them.

A device's rows count by the root of their number, an error by its logarithm to the power of 1.5:
one bad row moves a constant less than squares would, and a class of few devices is not its median.
Shares of a peak that others measured directly count as a row each (`SHARES`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean

from pi2.costs.constants import Constants, Range

FITTED = (
    "arm_of_peak",
    "x86_of_peak",
    "wide_of_peak",
    "dense_of_peak",
    "card_of_peak",
    "recorded_kernel_s",
    "metal_kernel_s",
    "pipe_ops",
    "sustained_reads",
)
"""Constants that rows decide; the others come from papers and from other measurements."""
SHARES = (
    ("arm_of_peak", "oneplus-12", 0.572),  # 43.9 of 76.8 GB/s, arXiv 2406.06282v3
    ("dense_of_peak", "oneplus-12", 0.73),  # 56 of 76.8 GB/s
    ("x86_of_peak", "i5-6500", 0.587),  # 20.02 GB/s of DDR4-2133 x2
    ("x86_of_peak", "pc-rtx-4090", 0.75),  # 67.2 GB/s of DDR5-5600 x2
    ("wide_of_peak", "tr-7965wx", 0.77),  # 225 to 250 of 307 GB/s
    ("wide_of_peak", "m1-max", 0.57),  # 224 to 243 of 409.6 GB/s with all cores
)
_STEP = 1.06
_POWER = 1.5
_REACH = 20
"""Steps that a constant may move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row as a fit sees it."""

    id: str
    device: str
    measured: float
    predict: Callable[[Constants], float]
    find_range: Callable[[Constants], Range]


Steps = dict[str, int]
"""How far each constant is from the file's, in steps."""


@dataclass(slots=True)
class Fit:
    """Fits by one constant after the other; predictions are made once."""

    samples: Sequence[Sample]
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)
    _asked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Constants that a row depends on."""

    def __post_init__(self) -> None:
        for sample in self.samples:
            base = sample.predict(Constants())
            self._asked[sample.id] = tuple(
                name
                for name in FITTED
                if any(
                    abs(sample.predict(make_constants({name: step})) / base - 1.0) > 1e-4
                    for step in (-8, 3)
                )
            )

    def find(self, start: Mapping[str, int], left_out: str = "") -> Steps:
        """Steps that fit all samples but those of a device."""
        samples = [item for item in self.samples if item.device != left_out]
        steps = dict(start)
        least, before = self._weigh(samples, steps, left_out), None
        while steps != before:
            before = dict(steps)
            for name in FITTED:
                for step in (1, -1, 2, -2, 4, -4):
                    trial = {**steps, name: steps[name] + step}
                    while (
                        abs(trial[name]) <= _REACH
                        and (found := self._weigh(samples, trial, left_out)) < least - 1e-6
                    ):
                        steps, least = trial, found
                        trial = {**steps, name: steps[name] + step}
        return steps

    def _weigh(self, samples: Sequence[Sample], steps: Steps, left_out: str) -> float:
        errors: dict[str, list[float]] = {}
        for sample in samples:
            asked = tuple((name, steps[name]) for name in self._asked[sample.id])
            key = sample.id, asked
            if key not in self._known:
                predicted = sample.predict(make_constants(dict(asked)))
                self._known[key] = abs(log(predicted / sample.measured)) ** _POWER
            errors.setdefault(sample.device, []).append(self._known[key])
        constants = make_constants(steps)
        for name, device, share in SHARES:
            if device != left_out:
                error = abs(log(getattr(constants, name) / share)) ** _POWER
                errors.setdefault(device, []).append(error)
        return float(sum(fmean(items) * len(items) ** 0.5 for items in errors.values()))


def make_constants(steps: Mapping[str, int]) -> Constants:
    usual = Constants()
    values = {name: getattr(usual, name) * exp(log(_STEP) * n) for name, n in steps.items()}
    return Constants(
        **{name: min(x, 1.0) if getattr(usual, name) < 1 else x for name, x in values.items()}
    )


def leave_each_out(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Range]]:
    """Each sample with its range by constants that no row of its device has been seen for."""
    fit = Fit(samples)
    whole = fit.find(dict.fromkeys(FITTED, 0))
    for device in dict.fromkeys(item.device for item in samples):
        constants = make_constants(fit.find(whole, device))
        for sample in samples:
            if sample.device == device:
                yield sample, sample.find_range(constants)


def fit_all(samples: Sequence[Sample]) -> dict[str, float]:
    """The constants that fit all samples."""
    constants = make_constants(Fit(samples).find(dict.fromkeys(FITTED, 0)))
    return {name: getattr(constants, name) for name in FITTED}
