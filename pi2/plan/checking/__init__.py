"""What rules work with: the facts of a plan, and the findings they make."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pi2.plan.arithmetic.resolved import PlacedSplit, ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.family import Family
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.source import Kind
from pi2.plan.toml.text import KeyPath


def list_row_splits(plan: Plan) -> Iterator[PlacedSplit]:
    table = plan.projections
    for name, split in (("attention", table.attention), ("head", table.head)):
        if split is not None:
            path: KeyPath = ("projections", name)
            yield PlacedSplit(split=split, path=path, subject=f"projections.{name}")


Fact = Literal["plan", "device", "model", "family", "resolved"]


@dataclass(frozen=True)
class Origin:
    document: Kind
    path: KeyPath
    text: str


@dataclass(frozen=True)
class Finding:
    """What a rule found, by document and key path; places in files are found when reported."""

    path: KeyPath
    message: str
    help: str | None = None
    document: Kind | None = None
    """None for the only document that the rule reads, else the plan."""
    at: Literal["key", "value"] = "value"
    origins: tuple[Origin, ...] = ()


class Facts:
    """The facts when a rule runs. A rule states the facts it needs; using others is a bug."""

    plan: Plan
    device: Device
    model: Model
    family: Family
    resolved: ResolvedPlan

    def __init__(self, known: Mapping[Fact, object], files: Mapping[Kind, Path]) -> None:
        """``files`` of the documents."""
        self.known, self.files = known, files
        for name, fact in known.items():
            setattr(self, name, fact)


Check = Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A function of ``pi2/plan/checking/rules``, and its subject."""

    code: str
    severity: Literal["error", "warning"]
    needs: tuple[Fact, ...]
    """The facts that the rule reads; a rule without any looks at each single document."""
    check: Check

    @property
    def document(self) -> Kind:
        """The document that findings are about unless they say otherwise."""
        return self.needs[0] if len(self.needs) == 1 and self.needs[0] != "resolved" else "plan"


def rule(code: str, severity: Literal["error", "warning"], *needs: Fact) -> Callable[[Check], Rule]:
    """Make a rule of a function; pi2/diagnostics/pages has the page of ``code``."""
    return lambda check: Rule(code=code, severity=severity, needs=needs, check=check)
