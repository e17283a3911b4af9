"""What rules work with: the facts of a plan, and the findings they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.paths import KeyPath
from pi2.plan.toml.source import Kind

Fact = Literal["plan", "device", "model", "resolved"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Another place that matters to a finding."""

    document: Kind
    path: KeyPath
    text: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found, by document and key path; places in files are found when reported."""

    path: KeyPath
    message: str
    help: str | None = None
    document: Kind = "plan"
    at: Literal["key", "value"] = "value"
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known when a rule runs.  A rule names what it needs; asking for more is a bug."""

    known: Mapping[Fact, object]
    files: Mapping[Kind, Path] = field(default_factory=dict)
    """File of each document."""

    @property
    def plan(self) -> Plan:
        value = self.known["plan"]
        assert isinstance(value, Plan)
        return value

    @property
    def device(self) -> Device:
        value = self.known["device"]
        assert isinstance(value, Device)
        return value

    @property
    def model(self) -> Model:
        value = self.known["model"]
        assert isinstance(value, Model)
        return value

    @property
    def resolved(self) -> ResolvedPlan:
        value = self.known["resolved"]
        assert isinstance(value, ResolvedPlan)
        return value


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One module of ``pi2/plan/checking/rules``."""

    code: str
    severity: Literal["error", "warning"]
    needs: tuple[Fact, ...]
    """The facts that the rule reads; a rule without any looks at each document alone."""
    check: Callable[[Facts], Iterator[Finding]]
    documentation: str
