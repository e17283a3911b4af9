"""Checking documents: everything that is found in a plan, its device and its model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import Diagnostic, Span
from pi2.diagnostics.diagnostic import sort_diagnostics
from pi2.plan.device import Device
from pi2.plan.documents import Document
from pi2.plan.findings import Fact, Facts, Finding, Rule
from pi2.plan.model import Model
from pi2.plan.paths import name_path
from pi2.plan.plan import Plan
from pi2.plan.references import UnknownName, find_document
from pi2.plan.resolved import (
    Resolved,
    ResolvedPlan,
    has_packable_shape,
    lay_out_plan_bundle,
    resolve_layers,
)
from pi2.plan.rules import load_rules
from pi2.plan.schema_check import check_schema
from pi2.plan.source import (
    CANNOT_READ,
    Kind,
    SourceFile,
    detect_kind,
    display_path,
    read_source,
)

if TYPE_CHECKING:
    from pi2.plan.overrides import Overrides

DOCUMENTS: Mapping[Kind, type[Document]] = {"plan": Plan, "device": Device, "model": Model}

_ABOUT_REFERENCES = CANNOT_READ | {"P009", "P014"}
"""Findings in a device or model that mean that the plan names the wrong file."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Outcome of a check."""

    diagnostics: tuple[Diagnostic, ...]
    resolved: ResolvedPlan | None = None
    """The plan, if a plan was checked and has no errors."""
    document: Document | None = None
    """The document itself, if its own file has no schema errors."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Texts by name, for showing source lines."""

    @property
    def is_sound(self) -> bool:
        """Whether there are no errors."""
        return all(item.severity != "error" for item in self.diagnostics)


class _Check:
    """Gathers the sources, documents and findings of one check."""

    def __init__(self) -> None:
        self.overrides: Overrides | None = None
        self.files: dict[Kind, SourceFile] = {}
        self.documents: dict[Kind, Document] = {}
        self.diagnostics: list[Diagnostic] = []
        self.sources: dict[str, str] = {}

    def override(self, values: Mapping[str, object]) -> None:
        """Take values that replace those of the plan."""
        from pi2.plan.overrides import SET, prepare_overrides

        self.overrides, findings = prepare_overrides(values)
        self.diagnostics += findings
        self.sources[SET] = self.overrides.text

    def read(self, path: Path, name: str, kind: Kind) -> None:
        """Read the file of a document and validate it against its schema."""
        wrong = _check_suffix(path.name, name, kind)
        if wrong is not None and os.path.exists(path):
            self.diagnostics.append(wrong)
            return
        source = read_source(path, name)
        if isinstance(source, list):
            self.diagnostics += source
            return
        self.sources[name] = source.text
        other = _guess_kind(source.values, kind)
        if other is not None:
            self.diagnostics.append(_report_kind(source.spans.find_key(()), kind, other))
            return
        if kind == "plan" and self.overrides is not None:
            from pi2.plan.overrides import apply_overrides

            values, misplaced = apply_overrides(source.values, self.overrides)
            self.diagnostics += misplaced
            source = replace(
                source,
                values=values,
                replaced={
                    item.path: (item.key_span, item.value_span) for item in self.overrides.items
                },
            )
        self.files[kind] = source
        document, findings = check_schema(source, DOCUMENTS[kind])
        self.diagnostics += findings
        if document is not None:
            self.documents[kind] = document

    def follow(self, kind: Kind) -> None:
        """Read the device or model that the plan names, even if the plan has other errors."""
        plan = self.files.get("plan")
        reference = None if plan is None else plan.values.get(kind)
        if plan is None or not isinstance(reference, str) or not 0 < len(reference) <= 500:
            return
        try:
            path = find_document(reference, kind, plan.path.parent)
        except UnknownName as error:
            self.diagnostics.append(
                Diagnostic(
                    code="P015",
                    message=str(error),
                    help=error.hint,
                    span=plan.spans.find_value((kind,)),
                    path=kind,
                )
            )
            return
        before = len(self.diagnostics)
        name = display_path(path)
        self.read(path, name, kind)
        for number in range(before, len(self.diagnostics)):
            item = self.diagnostics[number]
            if item.code in _ABOUT_REFERENCES:
                self.diagnostics[number] = replace(
                    item,
                    code="P015" if item.code in CANNOT_READ else item.code,
                    message=f"{name}: {item.message}",
                    span=plan.spans.find_value((kind,)),
                    path=kind,
                )

    def run_rules(self, facts: Mapping[Fact, object], done: set[str]) -> None:
        """Run the rules whose needs are met and that did not run before."""
        known = Facts(known=facts, files={kind: source.path for kind, source in self.files.items()})
        for rule in load_rules():
            if rule.code in done or not set(rule.needs) <= set(facts):
                continue
            done.add(rule.code)
            self.diagnostics += (self.locate(rule, finding) for finding in rule.check(known))

    def locate(self, rule: Rule, finding: Finding) -> Diagnostic:
        """Find the places of a finding and of its origins."""
        notes = []
        for origin in finding.origins:
            spans = self.files[origin.document].spans
            remark = "" if spans.has(origin.path) else " (default)"
            notes.append(f"{spans.find_value(origin.path).place}: {origin.text}{remark}")
        spans = self.files[finding.document].spans
        find = spans.find_key if finding.at == "key" else spans.find_value
        return Diagnostic(
            code=rule.code,
            severity=rule.severity,
            message=finding.message,
            help=finding.help,
            span=find(finding.path),
            notes=tuple(notes),
            path=name_path(finding.path),
        )

    def report(self, *, kind: Kind, resolved: Resolved | None = None) -> Report:
        diagnostics = sort_diagnostics(tuple(dict.fromkeys(self.diagnostics)))
        report = Report(
            diagnostics=diagnostics, document=self.documents.get(kind), sources=self.sources
        )
        if resolved is None or not report.is_sound:
            return report
        from pi2.plan.digest import compute_digest

        path = self.files["plan"].path
        runnable = ResolvedPlan(
            plan=resolved.plan,
            device=resolved.device,
            model=resolved.model,
            layers=resolved.layers,
            bundle=resolved.bundle,
            path=path,
            store_path=path.parent / resolved.plan.store,
            digest=compute_digest(resolved),
            warnings=diagnostics,
        )
        return replace(report, resolved=runnable)


def _check_suffix(file_name: str, name: str, kind: Kind) -> Diagnostic | None:
    found = detect_kind(file_name)
    if found == kind:
        return None
    span = Span.of_file(name)
    if found is None:
        return Diagnostic(
            code="P009",
            message=f"expected a file name that ends in .{kind}.toml",
            span=span,
        )
    return _report_kind(span, kind, found)


def _report_kind(span: Span, wanted: Kind, found: Kind) -> Diagnostic:
    return Diagnostic(
        code="P014",
        message=f"this is a {found}, expected a {wanted}",
        help=f"a {wanted}'s file name ends in .{wanted}.toml and its keys are "
        f"{', '.join(_list_own_keys(wanted))}",
        span=span,
    )


def _list_own_keys(kind: Kind) -> list[str]:
    return [
        name
        for name, item in DOCUMENTS[kind].model_fields.items()
        if item.is_required() and name != "schema_version"
    ]


def _guess_kind(values: Mapping[str, Any], kind: Kind) -> Kind | None:
    """Another kind of document that ``values`` fit much better, judged by the required keys."""
    keys = set(values)
    scores: dict[Kind, float] = {}
    for other in DOCUMENTS:
        own = set(_list_own_keys(other))
        scores[other] = len(keys & own) / len(own)
    best = max(scores, key=lambda item: scores[item])
    unknown = keys - set(DOCUMENTS[kind].model_fields)
    if best != kind and scores[best] > 0.6 and scores[kind] < 0.4 and unknown:
        return best
    return None


def check_file(path: Path, *, name: str | None = None) -> Report:
    """Check the file at ``path``; its suffix says what it is."""
    shown = name or str(path)
    kind = detect_kind(path.name)
    if kind == "plan":
        return check_plan(path, name=shown)
    check = _Check()
    if kind is None:
        check.diagnostics += _report_suffix(path, shown)
        return check.report(kind="plan")
    check.read(path, shown, kind)
    if kind in check.documents:
        check.run_rules({kind: check.documents[kind]}, set())
    return check.report(kind=kind)


def _report_suffix(path: Path, name: str) -> Iterator[Diagnostic]:
    source = read_source(path, name)
    unread = isinstance(source, list) and source[0].code in CANNOT_READ
    if unread and isinstance(source, list):
        yield from source
        return
    yield Diagnostic(
        code="P009",
        message="expected a file name that ends in .plan.toml, .device.toml or .model.toml",
        help="the suffix says what the document is",
        span=Span.of_file(name),
    )


def check_plan(
    path: Path, *, name: str | None = None, overrides: Mapping[str, object] | None = None
) -> Report:
    """Read, resolve and validate a plan with its device and its model."""
    check = _Check()
    if overrides:
        check.override(overrides)
    check.read(path, name or str(path), "plan")
    check.follow("device")
    check.follow("model")

    done: set[str] = set()
    facts: dict[Fact, object] = dict(check.documents.items())
    check.run_rules(facts, done)
    resolved = _resolve(check.documents)
    if resolved is not None:
        check.run_rules({**facts, "resolved": resolved}, done)
    return check.report(kind="plan", resolved=resolved)


def _resolve(documents: Mapping[Kind, Document]) -> Resolved | None:
    plan, device, model = (documents.get(kind) for kind in ("plan", "device", "model"))
    if not (isinstance(plan, Plan) and isinstance(device, Device) and isinstance(model, Model)):
        return None
    if not has_packable_shape(model):
        return None
    return Resolved(
        plan=plan,
        device=device,
        model=model,
        layers=resolve_layers(plan, model),
        bundle=lay_out_plan_bundle(plan, model),
    )
