"""Which neurons are not computed exactly: dials of mixtures, thresholds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Count, Reference, Table
from pi2.plan.documents.plan_units import Selector
from pi2.plan.documents.selectors import list_layers


class ExpertLayers(Table):
    """Other numbers of experts for some layers of a mixture."""

    select: Selector
    """Which layers, such as ``"0-7,28-31"``."""
    read_best: Annotated[int, Field(ge=0, examples=[2])]
    """Replaces ``experts.read_best``."""


class Experts(Table):
    """How far generated tokens may deviate from a mixture's routing, so that less is read.

    Nothing of it is done by default: every expert that the router chose computes, and what is in
    memory changes no bit.  With ``decode.predictor = "router"``; a run's summary says how much of
    the routing weight was replaced or left out, and `pi2 evaluate` what that costs.
    """

    prefer_cached: Annotated[float, Field(ge=0.0, le=1.0, examples=[0.1])] = 0.0
    """Share of the spread of a token's router scores that experts in memory gain on others, so
    that they compute where the router is nearly indifferent."""
    keep_best: Count = 1
    """Number of a token's best experts that are never replaced by ``prefer_cached``."""
    least_weight: Annotated[float, Field(ge=0.0, le=1.0, examples=[0.05])] = 0.0
    """Share of a token's routing weight below which an expert that is not in memory is left out."""
    most_reads: Annotated[int, Field(ge=0, examples=[2])] | None = None
    """Maximum number of experts that a layer reads for a token; those with the smallest weights
    are left out. Absent reads all of them."""
    read_best: Annotated[int, Field(ge=0, examples=[4])] | None = None
    """Number of a token's best experts that are read where they are not in memory; the others
    compute where they are in memory, so that layers whose experts are cold have fewer. Absent
    reads all of them."""
    renormalise: bool = True
    """Whether the weights of the experts that compute are scaled to make up for those left out."""
    layers: Annotated[
        tuple[ExpertLayers, ...],
        Field(max_length=256, examples=[[{"select": "0-3", "read_best": 2}]]),
    ] = ()
    """Exceptions, in order, such as fewer reads in layers whose experts are often missing; of two
    that name a layer, the later one counts."""

    def list_read_best(self, layers: int) -> list[int | None]:
        """Return ``read_best`` of each of a model's layers."""
        found = [self.read_best] * layers
        for item in self.layers:
            for layer in list_layers(item.select, layers):
                found[layer] = item.read_best
        return found

    @property
    def is_lossy(self) -> bool:
        """Whether anything but the router's choice is computed."""
        return bool(self.prefer_cached) or self.leaves_out

    @property
    def leaves_out(self) -> bool:
        """Whether experts that are not in memory may be left out."""
        limited = (self.most_reads, self.read_best) != (None, None) or bool(self.layers)
        return bool(self.least_weight) or limited


SparsityMethod = Literal["cats", "cats-teal"]


class Sparsity(Table):
    """Which neurons of a SiLU or GELU model count as zero while tokens are generated.

    With ``decode.predictor = "gate"``, which keeps all gates in memory.  One of ``target``
    and ``max_perplexity_increase`` says how much; `pi2 sparsity calibrate` turns it into
    thresholds.  Prompts are computed whole.
    """

    method: SparsityMethod
    """``cats``: neurons whose act(gate) is small, so that up and down are not read; ``cats-teal``:
    also those whose act(gate) * up is small, so that down is not read, divided where it costs
    least."""
    target: Annotated[float, Field(gt=0.0, lt=1.0, examples=[0.5])] | None = None
    """Share of up and down projections that is skipped."""
    max_perplexity_increase: Annotated[float, Field(gt=0.0, examples=[0.02])] | None = None
    """Maximum relative increase in perplexity."""
    thresholds: Annotated[Reference, Field(examples=["llama.thresholds.toml"])] | None = None
    """File of the calibrated thresholds, relative to the plan file.  Without it a plan whose
    backends are all ``null`` can be simulated and counted, with ``target`` as the share that is
    skipped; any other plan needs it."""
