"""From a path to a plan that may run: read, compose, resolve, and run all rules.

The pages of codes are in a TOML file per range of codes. It has a table per code with the keys
``what``, ``why``, ``example`` and ``fix``, which are Markdown.

A finding is shown at a line of its author, never in a document that comes with pi2. A document may
extend a shipped or a fetched one, which is not changed. A finding about a value from there is shown
at the entry of ``extends``, with the line to write in the author's own file."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pi2.diagnostics
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.diagnostics.texts import Page
from pi2.fitting.completion import FillPlan
from pi2.fitting.inspection import Inspection, Reuse
from pi2.fitting.rules import list_rules
from pi2.fitting.sources import find_source
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sources import Completion
from pi2.plan.checking import Fact, Facts, Finding, Rule
from pi2.plan.documents.common import Document
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.reading.references import (
    Located,
    Resolver,
    find_shipped_folder,
    has_scheme,
    list_documents,
)
from pi2.plan.reading.thresholds import GivenThresholds
from pi2.plan.reading.trees import Chain, Link
from pi2.plan.toml.source import CANNOT_READ, Kind, SourceFile, detect_kind, read_source
from pi2.plan.toml.text import KeyPath, format_path, name_path

FOLDER = Path(pi2.diagnostics.__path__[0]) / "pages"


def load_pages() -> dict[str, Page]:
    """All pages by code, in the order of the codes."""
    import tomli

    pages = []
    for file in FOLDER.glob("*.toml"):
        tables = tomli.loads(file.read_text(encoding="utf-8"))
        pages += [Page(code=code, **texts) for code, texts in tables.items()]
    return {page.code: page for page in sorted(pages, key=lambda page: page.code)}


def find_page(code: str) -> Page | None:
    """The page about ``code``; None where there is none."""
    return load_pages().get(code)


@dataclass(frozen=True, kw_only=True)
class Report:
    diagnostics: tuple[Diagnostic, ...]
    resolved: ResolvedPlan | None = None
    """The plan, if a plan was checked and has no errors."""
    candidate: ResolvedPlan | None = None
    """The plan, even if rules found errors in it: sizes that do not fit can be fitted."""
    document: Document | None = None
    """The document itself, if its own file has no schema errors."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Texts by name, for showing source lines."""
    files: Mapping[Kind, SourceFile] = field(default_factory=dict)
    """The documents' files, put together with the documents that they extend."""
    derives: bool = False
    """Whether a plan was checked that leaves out sizes, which are derived whenever it is read."""
    runs_file: bool = False
    """Whether a plan was checked that runs a GGUF file as it is."""

    @property
    def is_sound(self) -> bool:
        return all(item.severity != "error" for item in self.diagnostics)

    def make_error(self) -> UserError:
        unread = any(item.code in CANNOT_READ for item in self.diagnostics)
        return UserError(self.diagnostics, exit_code=2 if unread else 1, sources=self.sources)


def check_file(
    path: Path,
    *,
    name: str | None = None,
    resolver: Resolver | None = None,
    reference: str | None = None,
    text: str | None = None,
    reuse: Reuse | None = None,
    fill: FillPlan | None = None,
) -> Report:
    """Check the file at ``path`` by its suffix; ``text`` replaces its content."""
    shown = name or str(path)
    kind = detect_kind(path.name)
    if kind == "plan" or (fill is not None and fill.describe(path) is not None):
        return check_plan(
            path,
            name=shown,
            resolver=resolver,
            reference=reference,
            text=text,
            reuse=reuse,
            fill=fill,
        )
    check = Inspection(resolver, root=path.parent)
    if kind is None:
        check.diagnostics += _report_suffix(path, shown)
        return _report(check, kind="plan")
    check.read(Located(path=path, file_name=path.name, name=shown, reference=reference), kind, text)
    if kind in check.documents:
        run_rules(check, {kind: check.documents[kind]}, set())
    return _report(check, kind=kind)


def _report_suffix(path: Path, name: str) -> Iterator[Diagnostic]:
    if path.is_dir() and list_documents([path]) == [path]:
        yield Diagnostic(
            code="P002",
            message="there is no document in this folder, nor in those below it",
            help="documents are called *.plan.toml, *.device.toml or *.model.toml",
            span=Span.of_file(name),
        )
        return
    source = read_source(path, name)
    if isinstance(source, list) and source[0].code in CANNOT_READ:
        yield from source
        return
    yield Diagnostic(
        code="P009",
        message="expected a file name that ends in .plan.toml, .device.toml or .model.toml",
        help="the suffix says what the document is",
        span=Span.of_file(name),
    )


def check_plan(
    path: Path,
    *,
    name: str | None = None,
    overrides: Mapping[str, object] | None = None,
    resolver: Resolver | None = None,
    reference: str | None = None,
    text: str | None = None,
    reuse: Reuse | None = None,
    thresholds: GivenThresholds = None,
    drafts: bool = True,
    fill: FillPlan | None = None,
    root: Path | None = None,
) -> Report:
    """Read, resolve and validate a plan with its device and model. ``thresholds`` replace the
    plan's; without ``drafts`` a draft plan is not read; ``fill`` completes plans of GGUF files,
    and says which plan such a file stands for; ``root``: folder of the document that the user
    named, if it is another one."""
    root = path.parent if root is None else root
    check = Inspection(resolver, reuse, fill, root)
    if overrides:
        check.override(overrides)
    shown = name or str(path)
    located = Located(path=path, file_name=path.name, name=shown, reference=reference)
    values = None if fill is None else fill.describe(path)
    if values is None:
        check.read(located, "plan", text)
    else:
        check.take(located, values)
    check.follow("device")
    check.follow("model")

    done: set[str] = set()
    if check.is_open:
        run_rules(check, dict(check.documents.items()), done, early=True)
        check.close_plan()
    facts: dict[Fact, object] = dict(check.documents.items())
    run_rules(check, facts, done)
    if thresholds is None:
        thresholds = check.follow_thresholds()
    resolved = _resolve(check, thresholds)
    draft = check.locate_draft() if drafts else None
    if draft is not None:
        report = check_plan(
            draft.path, name=draft.name, resolver=resolver, drafts=False, fill=fill, root=root
        )
        check.add_draft(report.diagnostics, report.sources)
        if resolved is not None:
            resolved = replace(resolved, draft=report.resolved)
    elif resolved is not None and (head := resolved.source.draft) is not None:
        resolved = replace(resolved, draft=_resolve_head(resolved, head))
    if resolved is not None:
        run_rules(check, {**facts, "resolved": resolved}, done)
    return _report(check, kind="plan", resolved=resolved)


def run_rules(
    check: Inspection, facts: Mapping[Fact, object], done: set[str], *, early: bool = False
) -> None:
    """Run rules that did not run and whose needs are met; ``early``: only those with needs."""
    for rule in list_rules():
        if early and not rule.needs:
            continue
        if rule.code in done or not set(rule.needs) <= set(facts):
            continue
        done.add(rule.code)
        if not rule.needs:
            for kind, document in check.documents.items():
                check.diagnostics += _run_alone(check, rule, kind, document)
        elif rule.needs[0] in check.documents and len(rule.needs) == 1:
            kind = rule.needs[0]
            found = _run_alone(check, rule, kind, check.documents[kind])
            check.diagnostics += found
            if any(item.severity == "error" for item in found):
                check.contradictory.add(kind)
        else:
            check.diagnostics += _run_rule(check, rule, facts)


def _run_rule(
    check: Inspection, rule: Rule, facts: Mapping[Fact, object]
) -> tuple[Diagnostic, ...]:
    known = Facts(known=facts, files=check.file_names)
    return tuple(_locate(check, rule, finding) for finding in rule.check(known))


def _run_alone(
    check: Inspection, rule: Rule, kind: Kind, document: Document
) -> tuple[Diagnostic, ...]:
    """What a rule finds in one document, from an earlier check if there was one."""
    reuse = check.reuse
    if reuse is None or kind == "plan":
        return _run_rule(check, rule, {kind: document})
    key = (rule.code, id(document))
    if key not in reuse.findings:
        found = _run_rule(check, rule, {kind: document})
        if not any(item.documents.get(kind) is document for item in reuse.read.values()):
            return found  # it may go, and another one get its identity
        reuse.findings[key] = found
    return reuse.findings[key]


def _locate(check: Inspection, rule: Rule, finding: Finding) -> Diagnostic:
    notes = []
    for origin in finding.origins:
        spans = check.files[origin.document].spans
        remark = "" if spans.has(origin.path) else " (default)"
        notes.append(f"{spans.find_value(origin.path).place}: {origin.text}{remark}")
    file, help_text = check.files[finding.document or rule.document], finding.help
    inherited = [] if type(file) is SourceFile else _list_inherited(file, finding.path)
    if inherited:
        notes += [f"{span.place}: inherited: {text}" for span, text in inherited]
        remedy = f'remove = ["{name_path(finding.path)}"] drops the inherited ones'
        help_text = f"{help_text}, or {remedy}" if help_text else remedy
    find = file.spans.find_key if finding.at == "key" else file.spans.find_value
    item = Diagnostic(
        code=rule.code,
        severity=rule.severity,
        message=finding.message,
        help=help_text,
        span=find(finding.path),
        notes=tuple(notes),
        path=name_path(finding.path),
    )
    return give_to_author(item, finding, check) if check.chains else item


def _list_inherited(file: SourceFile, path: KeyPath) -> list[tuple[Span, str]]:
    """What a table of a composed document has from other files."""
    from pi2.plan.reading.trees import ComposedPlaces

    places = file.spans
    return places.list_inherited(path) if isinstance(places, ComposedPlaces) else []


_MAX_SHOWN = 80
"""Longest line of another document that is shown, in characters."""

_WRITE = re.compile(r"write (?P<key>[\w-]+) = ")


def give_to_author(item: Diagnostic, finding: Finding, check: Inspection) -> Diagnostic:
    """Move a finding from a shipped or fetched document to the ``extends`` that takes it up."""
    span = item.span
    link = None if span is None else _find_entry(span.file, check.chains.get(span.file, ()))
    if span is None or link is None:
        return item
    lines = check.sources.get(span.file, "").split("\n")
    line = lines[span.line - 1].strip() if span.line <= len(lines) else ""
    shown = line if len(line) <= _MAX_SHOWN else f"{line[: _MAX_SHOWN - 3]}..."
    return replace(
        item,
        span=link.file.spans.find_value(link.path),
        notes=(f"{span.place}: {shown}", *item.notes),
        help=_advise(item.help, finding, link.file.name),
    )


def _find_entry(name: str, chain: Chain) -> Link | None:
    """The entry in an author's file from which the way leads to the document ``name`` that is not
    theirs; None where ``name`` is an author's itself, or nothing on the way is."""
    if not _is_foreign(name):
        return None
    return next((link for link in reversed(chain) if not _is_foreign(link.file.name)), None)


def _is_foreign(name: str) -> bool:
    """Whether a document is one that pi2 ships or that was fetched."""
    return has_scheme(name) or Path(name).resolve().is_relative_to(find_shipped_folder())


def _advise(help: str | None, finding: Finding, file: str) -> str:
    key = format_path(finding.path)
    if finding.at == "key":
        remedy = f'write remove = ["{key}"] in {file} to leave it out'
        return remedy if help is None else f"{help}; {remedy}"
    wanted = _WRITE.match(help or "")
    if help is not None and wanted is not None and wanted["key"] == finding.path[-1]:
        value = help[wanted.end() :].removesuffix(", or leave it out")
        return f"in {file}, write {key} = {value}"
    remedy = f"write {key} in {file}, and it counts instead"
    return remedy if help is None else f"{help}; {remedy}"


def _resolve(check: Inspection, thresholds: GivenThresholds) -> ResolvedPlan | None:
    plan, device, model = (check.documents.get(kind) for kind in ("plan", "device", "model"))
    if not (isinstance(plan, Plan) and isinstance(device, Device) and isinstance(model, Model)):
        return None
    if "model" in check.contradictory:  # sizes of what cannot be are nobody's concern
        return None
    return ResolvedPlan(
        plan=plan,
        device=device,
        model=model,
        path=check.files["plan"].path,
        find_source=find_source,
        file=check.facts,
        derived=check.derived,
        thresholds=None if thresholds == "none" or plan.sparsity is None else thresholds,
    )


def _resolve_head(resolved: ResolvedPlan, head: Completion) -> ResolvedPlan:
    """The plan of the MTP head that drafts for another, from values that were derived."""
    plan = Plan.model_validate_json(json.dumps(head.values))
    assert head.model is not None
    return replace(resolved, plan=plan, model=head.model, file=head.facts, derived={})


def _report(check: Inspection, *, kind: Kind, resolved: ResolvedPlan | None = None) -> Report:
    found = check.list_findings()
    return Report(
        diagnostics=found,
        resolved=None if any(item.severity == "error" for item in found) else resolved,
        candidate=resolved,
        document=check.documents.get(kind),
        sources=check.sources,
        files=check.files,
        derives=check.is_open,
        runs_file=check.runs_file,
    )


def load_plan(
    path: str | Path,
    *,
    overrides: Mapping[str, object] | None = None,
    resolver: Resolver | None = None,
    thresholds: GivenThresholds = None,
) -> ResolvedPlan:
    """Load a valid plan with ``overrides`` by dotted key; UserError with all findings.
    ``thresholds`` replace the plan's, ``"none"`` drops them."""
    report = check_plan(
        Path(path), overrides=overrides or {}, resolver=resolver, thresholds=thresholds
    )
    if report.resolved is None:
        raise report.make_error()
    return report.resolved
