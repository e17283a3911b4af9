"""Simulation of a plan on a device that need not be at hand: numbers of neurons are drawn for each
token and layer, and `pi2.costs` gives their times."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pi2.costs.constants import Constants, Range, describe_statuses
from pi2.costs.cost import (
    Cost,
    Description,
    cost_description,
    describe_range,
    list_dense_units,
    read_plan_rates,
)
from pi2.costs.cost_layer import PromptCost, cost_prompt
from pi2.costs.kernel_times import Rates
from pi2.costs.rates import list_missing_reads
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import approximate_number
from pi2.simulate.decode import DecodeRun, Progress, simulate_decode
from pi2.tracing import add_legend, make_figure, save_figure

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Estimate from the device's power figures; a unit at rest counts as nothing."""

    token_j: float
    mean_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Outcome of `simulate`."""

    inputs: Description
    seed: int
    prompt_tokens: int
    prefill: PromptCost | None
    """None if the device states no arithmetic rate."""
    decode: DecodeRun

    @property
    def tokens_s(self) -> float:
        batch = self.inputs.settings.batch
        return batch * len(self.decode.token_s) / float(self.decode.token_s.sum())

    @property
    def mean_s(self) -> float:
        return float(self.decode.token_s.mean())

    def find_percentile_s(self, percent: float) -> float:
        """Time that ``percent`` of all tokens do not exceed."""
        return float(np.percentile(self.decode.token_s, percent))

    @property
    def waiting_share(self) -> float:
        """Part of the time in which nothing computed because of reads."""
        return float(self.decode.waiting_s.sum() / self.decode.token_s.sum())

    @property
    def miss_rate(self) -> float:
        active = float(self.decode.active_neurons.sum())
        return float(self.decode.missing_neurons.sum()) / active if active else 0.0

    @property
    def energy(self) -> Energy | None:
        """Power of the working units times their time: all units, the CPU or the other one."""
        rates, run = self.inputs.rates, self.decode
        if rates.power_w is None and rates.both_w is None:
            return None
        cpu_w = rates.power_w or rates.both_w or 0.0
        total = float(run.token_s.sum())
        dense_s = min(float(run.dense_s.sum()), total) if self.inputs.uses_dense else 0.0
        energy = cpu_w * (total - dense_s) + (rates.both_w or cpu_w) * dense_s
        tokens = len(run.token_s) * self.inputs.settings.batch
        return Energy(token_j=energy / tokens, mean_w=energy / total)

    @property
    def expected(self) -> Cost:
        """Use expected numbers of neurons instead of drawn ones, as `pi2 plan` does."""
        return cost_description(self.inputs)

    @property
    def range_tokens_s(self) -> Range:
        """Tokens per second of the run, and of the same with all rates low or high."""
        low, expected, high = astuple(self.expected.range_tokens_s)
        return Range(
            low=self.tokens_s * low / expected,
            expected=self.tokens_s,
            high=self.tokens_s * high / expected,
        )

    def describe(self) -> dict[str, Any]:
        run, prefill, energy = self.decode, self.prefill, self.energy
        tokens = len(run.token_s)
        active = run.active_neurons + (run.active_neurons == 0)
        return {
            "simulated": True,
            "plan": self.inputs.name,
            "plan_digest": self.inputs.digest,
            "seed": self.seed,
            "prompt_tokens": self.prompt_tokens,
            "tokens": tokens,
            "prefill": None
            if prefill is None
            else {
                "tokens_s": _round(prefill.tokens_s),
                "duration_s": _round(prefill.duration_s),
                "read_bytes": round(prefill.read_bytes),
            },
            "decode": {
                "tokens_s": _round(self.tokens_s),
                "range": self.range_tokens_s.describe(),
                "mean_ms": _round(self.mean_s * 1e3),
                **{
                    f"p{percent}_ms": _round(self.find_percentile_s(percent) * 1e3)
                    for percent in PERCENTILES
                },
                "waiting_share": _round(self.waiting_share),
                "flash_share": _round(float(run.flash_s.sum() / run.token_s.sum())),
                "cpu_share": _round(float(run.cpu_s.sum() / run.token_s.sum())),
                "dense_share": _round(float(run.dense_s.sum() / run.token_s.sum())),
                "hit_rate": _round(1.0 - self.miss_rate),
                "miss_rate_p99": _round(float(np.percentile(run.missing_neurons / active, 99))),
                "active_neurons": round(float(run.active_neurons.mean())),
                "read_bytes_per_token": round(float(run.read_bytes.mean())),
            },
            "expected": {
                "tokens_s": _round(self.expected.tokens_s),
                "range": self.expected.range_tokens_s.describe(),
                "context": self.inputs.settings.position,
            },
            "energy": None
            if energy is None
            else {"token_j": _round(energy.token_j), "mean_w": _round(energy.mean_w)},
            "assumptions": list(self.inputs.assumptions),
            "provenance": {
                "figures": dict(sorted(self.inputs.count_statuses().items())),
                "sources": [
                    {"name": item.name, "status": item.status, "source": item.source}
                    for item in self.inputs.figures
                ],
            },
        }

    def summarise(self) -> str:
        from pi2.plan.documents.quantities import approximate_bytes, approximate_share

        run, decode = self.describe()["decode"], self.decode
        lines = [f"SIMULATED, not measured: {self.inputs.name}"]
        if self.prefill is None:
            unit = self.inputs.prompts.unit
            lines.append(
                f"prefill   not simulated: {unit} computes prompts, and the device states no "
                f"units.{unit}.compute"
            )
        else:
            lines.append(
                f"prefill   {self.prefill.tokens_s:.1f} tokens/s, {self.prefill.tokens} tokens "
                f"in {self.prefill.duration_s:.2f} s, "
                f"{approximate_bytes(self.prefill.read_bytes)} read"
            )
        percentiles = " · ".join(f"P{p} {run[f'p{p}_ms']:.1f}" for p in PERCENTILES)
        lines.append(
            f"decode    {self.range_tokens_s.write()} tokens/s over {len(decode.token_s)} tokens; "
            f"ms per token: mean {run['mean_ms']:.1f} · {percentiles}"
        )
        cost = self.expected
        lines.append(
            f"expected  {cost.range_tokens_s.write()} tokens/s after {cost.settings.position} "
            "tokens of context, as `pi2 plan` and `pi2 explain --cost` say"
        )
        hits = f"cache hits {run['hit_rate']:.1%}"
        if self.inputs.settings.predictor == "none":
            hits = "every neuron is computed, and nothing is put into the cache"
        lines.append(
            f"reads     {approximate_bytes(run['read_bytes_per_token'])} per token; flash busy "
            f"{run['flash_share']:.0%}, computing waits for it "
            f"{approximate_share(run['waiting_share'])}; {hits}"
        )
        if self.energy is not None:
            lines.append(
                f"energy    about {self.energy.token_j:.3f} J per token, {self.energy.mean_w:.1f} W"
            )
        lines += [f"assumed   {text}" for text in self.inputs.assumptions]
        lines.append("inputs    " + describe_statuses(self.inputs.figures))
        return "\n".join(lines)


def _round(value: float) -> float:
    return round(value, 4)


def draw_run(result: SimulationResult, file_format: str) -> bytes:
    """Draw times between tokens in order and sorted; UserError P632 without matplotlib."""
    milliseconds = result.decode.token_s * 1e3
    figure = make_figure(10, 4)
    left, right = figure.subplots(1, 2)
    left.plot(np.arange(1, len(milliseconds) + 1), milliseconds, linewidth=0.8)
    left.set_xlabel("token")
    left.set_ylim(bottom=0.0)
    left.set_ylabel("ms per token")
    ordered = np.sort(milliseconds)
    right.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    for percent, line in zip(PERCENTILES, (":", "--", "-."), strict=True):
        place = result.find_percentile_s(percent) * 1e3
        label = f"P{percent:g}: {approximate_number(place, 4)} ms"
        right.axvline(place, linestyle=line, linewidth=1.0, color="gray", label=label)
    add_legend(right)
    right.set_xlabel("ms per token")
    right.set_ylabel("share of tokens that take no longer")
    figure.suptitle(f"Simulated, not measured: {result.inputs.name}")
    return save_figure(figure, file_format)


def simulate(
    description: Description,
    *,
    prompt_tokens: int = 64,
    tokens: int = 1024,
    seed: int = 0,
    progress: Progress | None = None,
) -> SimulationResult:
    """Simulate a prompt and a generation; the same seed gives the same result."""
    return SimulationResult(
        inputs=description,
        seed=seed,
        prompt_tokens=prompt_tokens,
        prefill=cost_prompt(description, prompt_tokens),
        decode=simulate_decode(
            description, prompt_tokens=prompt_tokens, tokens=tokens, seed=seed, progress=progress
        ),
    )


MISSING_FIGURE = "P330"
UNSUPPORTED_SPLIT = "P331"


def read_inputs(
    resolved: ResolvedPlan, rates: Rates | None = None, constants: Constants | None = None
) -> Description:
    """Describe a plan; UserError P330, P331 for missing figures.  ``rates`` replace its own."""
    findings = list(_check_units(resolved))
    try:
        rates = read_plan_rates(resolved, constants) if rates is None else rates
        description = describe_range(resolved, rates, store=resolved.store_path)
    except UserError as error:
        span = Span.of_file(str(resolved.path))
        found = dict.fromkeys(error.diagnostics)
        if any(layer.hot < 1.0 for layer in resolved.layers):
            # What is missing first hides what is missing later.
            found |= dict.fromkeys(list_missing_reads(resolved.device))
        findings += [replace(item, code=MISSING_FIGURE, span=span) for item in found]
    if findings:
        raise UserError(tuple(findings), exit_code=2)
    return description


def _check_units(resolved: ResolvedPlan) -> Iterator[Diagnostic]:
    names, span = list_dense_units(resolved), Span.of_file(str(resolved.path))
    refuse = partial(Diagnostic, code=UNSUPPORTED_SPLIT, span=span)
    if len(names) > 1:
        message = f"layers are given to {', '.join(names)}: the simulator knows the CPU and one "
        yield refuse(
            message=f"{message}other unit", help=f"give the layers of `{names[-1]}` to `{names[0]}`"
        )
    if names and resolved.device.units[names[0]].emulated:
        message = f"the unit {names[0]!r} is the processor itself, emulating another one"
        yield refuse(message=message, help="give the layers to `cpu`")


__all__ = ["SimulationResult", "read_inputs", "simulate"]
