"""How tokens are drawn: a table of plans, and of models whose authors recommend something."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pi2.plan.documents.common import Share, Table


class Sampling(Table):
    """How a token is drawn, unless a run says otherwise; without this table, greedily.

    In this order: repetition penalty, temperature, top-k, top-p, min-p.
    """

    temperature: Annotated[float, Field(ge=0.0, le=100.0, examples=[0.7])] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1, examples=[40])] = 0
    """Sample from the k most likely tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0, examples=[0.9])] = 1.0
    """Sample from the smallest set of tokens with at least this total probability."""
    min_p: Share = 0.0
    """Sample from tokens with at least this fraction of the top probability."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, examples=[1.1])] = 1.0
    """Penalty for tokens that were already used: divides their positive logits, multiplies
    negative ones."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, examples=[1])] | None = None
    """Random seed; absent means a new one for every run."""
