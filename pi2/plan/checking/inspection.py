"""Looking into documents: reads them with what they name, runs the rules, gathers findings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.diagnostics.diagnostic import sort_diagnostics
from pi2.plan.checking.findings import Fact, Facts, Finding, Rule
from pi2.plan.checking.reuse import ReadDocument, Reuse, make_key
from pi2.plan.checking.rules import load_rules
from pi2.plan.documents.common import COMPOSITION, Document
from pi2.plan.documents.plan import Plan
from pi2.plan.reading.deprecations import modernise
from pi2.plan.reading.kinds import DOCUMENTS, check_suffix, guess_kind, report_kind
from pi2.plan.reading.references import Located, Resolver, UnknownName, locate_document
from pi2.plan.reading.schema_check import check_schema
from pi2.plan.toml.paths import KeyPath, name_path
from pi2.plan.toml.source import CANNOT_READ, Kind, SourceFile, parse_source, read_source

if TYPE_CHECKING:
    from pi2.plan.arithmetic.file_facts import FileFacts, FillPlan
    from pi2.plan.composing.composed import Chain, Removal
    from pi2.plan.composing.overrides import Overrides
    from pi2.plan.reading.thresholds import Thresholds

_ABOUT_REFERENCES = CANNOT_READ | {"P009", "P014"}
"""Findings in a device or model that mean that the plan names the wrong file."""


class Inspection:
    """Gathers the sources, documents and findings of one check."""

    def __init__(
        self,
        resolver: Resolver | None = None,
        reuse: Reuse | None = None,
        fill: FillPlan | None = None,
    ) -> None:
        self.resolver = resolver
        self.reuse = reuse
        self.fill = fill
        """Completes plans that run a GGUF file."""
        self.facts: FileFacts | None = None
        self.overrides: Overrides | None = None
        self.files: dict[Kind, SourceFile] = {}
        self.documents: dict[Kind, Document] = {}
        self.diagnostics: list[Diagnostic] = []
        self.sources: dict[str, str] = {}
        self.file_names: dict[Kind, Path] = {}
        self.chains: dict[str, Chain] = {}
        self.removed: list[Removal] = []
        self.references: dict[Kind, str | None] = {}
        self.contradictory: set[Kind] = set()
        """Documents that are wrong by themselves: rules for one document found errors."""

    def override(self, values: Mapping[str, object]) -> None:
        """Take values that replace those of the plan."""
        from pi2.plan.composing.overrides import SET, prepare_overrides

        self.overrides, findings = prepare_overrides(values)
        self.diagnostics += findings
        self.sources[SET] = self.overrides.text

    def read(self, located: Located, kind: Kind, text: str | None = None) -> None:
        """Read the file of a document, or take its ``text``, and validate it against its schema."""
        path, name = located.path, located.name
        wrong = check_suffix(located.file_name, name, kind)
        if wrong is not None and os.path.exists(path):
            self.diagnostics.append(wrong)
            return
        source = read_source(path, name) if text is None else parse_source(path, name, text)
        if isinstance(source, list):
            self.diagnostics += source
            return
        self.sources[name] = source.text
        other = guess_kind(source.values, kind)
        if other is not None:
            self.diagnostics.append(report_kind(source.spans.find_key(()), kind, other))
            return
        source, warnings = modernise(source, kind)
        self.diagnostics += warnings
        whole = True
        if any(key in source.values for key in COMPOSITION):
            source, whole = self.compose(source, kind, located.reference)
        self.accept(source, kind, located, whole)

    def take(self, located: Located, values: Mapping[str, Any]) -> None:
        """Take ``values`` for those of a plan: the file is none itself."""
        text = "".join(f"{key} = {value!r}\n" for key, value in values.items())
        text = text.encode("utf-8", "backslashreplace").decode()
        self.sources[located.name] = text
        self.accept(SourceFile(located.path, located.name, text, dict(values)), "plan", located)

    def accept(self, source: SourceFile, kind: Kind, located: Located, whole: bool = True) -> None:
        """Take a document's values, ``whole`` unless something that it extends is not there, and
        validate them against its schema."""
        if kind == "plan" and self.overrides is not None:
            from pi2.plan.composing.overrides import apply_overrides

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
        self.file_names[kind] = Path(located.file_name)
        self.references[kind] = located.reference
        if kind == "plan" and self.fill is not None and "weights" in source.values:
            completed = self.complete(source, self.fill)
            if completed is None:
                return
            source = self.files[kind] = completed
        document, findings = check_schema(source, DOCUMENTS[kind])
        # What a document lacks may stand in a file that it extends and that was not found.
        found = (item for item in findings if whole or item.code != "P102")
        self.diagnostics += (self.add_removal(item) for item in found)
        if document is not None and whole:
            self.documents[kind] = document

    def complete(self, source: SourceFile, fill: FillPlan) -> SourceFile | None:
        """Derive what a plan that runs a GGUF file leaves out, and its model; None where that is
        not possible, with the reason among the findings."""
        if not isinstance(source.values["weights"], str):
            return source
        try:
            filled = fill(source.values, source.path)
        except UserError as error:
            span = source.spans.find_value(("weights",))
            self.diagnostics += (
                item if item.span is not None else replace(item, span=span, path="weights")
                for item in error.diagnostics
            )
            return None
        self.facts = filled.facts
        self.documents["model"] = filled.model
        return replace(source, values=filled.values)

    def read_again(self, located: Located, kind: Kind) -> None:
        """Take a device or model from an earlier check, or read it."""
        key = None if self.reuse is None else make_key(located, kind)
        if self.reuse is None or key is None:
            self.read(located, kind)
            return
        known = self.reuse.documents.get(key)
        if known is None:
            before = len(self.diagnostics)
            self.read(located, kind)
            file = self.files.get(kind)
            if file is not None and type(file) is SourceFile:
                found = tuple(self.diagnostics[before:])
                known = ReadDocument(file, self.documents.get(kind), found)
                self.reuse.documents[key] = known
            return
        self.diagnostics += known.diagnostics
        self.sources[located.name] = known.file.text
        self.files[kind] = known.file
        self.file_names[kind] = Path(located.file_name)
        self.references[kind] = None
        if known.document is not None:
            self.documents[kind] = known.document

    def compose(
        self, source: SourceFile, kind: Kind, reference: str | None
    ) -> tuple[SourceFile, bool]:
        """Put a document together with what it extends; False if something is not there."""
        from pi2.plan.composing.compose import compose

        result = compose(source, kind, resolver=self.resolver, origin=reference)
        self.diagnostics += result.diagnostics + result.warnings
        self.removed += result.removed
        self.sources.update({name: file.text for name, file in result.files.items()})
        for name, chain in result.chains.items():
            self.chains.setdefault(name, chain)
        return result.file, result.is_whole

    def follow(self, kind: Kind) -> None:
        """Read the device or model that the plan names, even if the plan has other errors."""
        plan = self.files.get("plan")
        if kind == "model" and self.facts is not None:
            text = f"# read from {self.facts.path.name}\n"
            self.files[kind] = SourceFile(self.facts.path, self.facts.path.name, text, {})
            self.file_names[kind] = Path(f"{self.facts.model_id}.model.toml")
            return
        reference = None if plan is None else plan.values.get(kind)
        if plan is None or not isinstance(reference, str) or not 0 < len(reference) <= 500:
            return
        try:
            located = locate_document(
                reference,
                kind,
                plan.path.parent,
                resolver=self.resolver,
                origin=self.references["plan"],
            )
        except UserError as error:
            span = plan.spans.find_value((kind,))
            self.diagnostics += (replace(i, span=span, path=kind) for i in error.diagnostics)
            return
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
        before, name = len(self.diagnostics), located.name
        self.read_again(located, kind)
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

    def follow_thresholds(self) -> Thresholds | None:
        """Read the thresholds that the plan names, if it does."""
        plan, file = self.documents.get("plan"), self.files.get("plan")
        if file is None or not isinstance(plan, Plan):
            return None
        if plan.sparsity is None or plan.sparsity.thresholds is None:
            return None
        from pi2.plan.reading.thresholds import read_thresholds

        try:
            return read_thresholds(file.path.parent / plan.sparsity.thresholds)
        except UserError as error:
            self.sources.update(error.sources)
            path = ("sparsity", "thresholds")
            span = file.spans.find_value(path)
            for item in error.diagnostics:
                named = item.code == "P028"
                self.diagnostics.append(
                    replace(item, span=span, path=name_path(path)) if named else item
                )
            return None

    def locate_draft(self) -> Located | None:
        """Find the plan of the model that guesses tokens, if the plan names one."""
        plan, file = self.documents.get("plan"), self.files.get("plan")
        if file is None or not isinstance(plan, Plan) or plan.decode.speculation is None:
            return None
        reference = plan.decode.speculation.plan
        if reference is None:
            return None
        path, origin = ("decode", "speculation", "plan"), self.references["plan"]
        try:
            folder = file.path.parent
            return locate_document(reference, "plan", folder, resolver=self.resolver, origin=origin)
        except UserError as error:
            found = error.diagnostics
        except UnknownName as error:
            found = (
                Diagnostic(code="P015", message=str(error), help=error.hint, severity="error"),
            )
        span = file.spans.find_value(path)
        self.diagnostics += (replace(item, span=span, path=name_path(path)) for item in found)
        return None

    def add_draft(self, diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> None:
        """Take notice of the errors in the plan of the model that guesses tokens."""
        path, file = ("decode", "speculation", "plan"), self.files["plan"]
        self.sources.update(sources)
        for item in diagnostics:
            if item.severity == "error" and item.code in CANNOT_READ:
                span = file.spans.find_value(path)
                item = replace(item, code="P015", span=span, path=name_path(path))
            if item.severity == "error":
                self.diagnostics.append(item)

    def run_rules(self, facts: Mapping[Fact, object], done: set[str]) -> None:
        """Run the rules whose needs are met and that did not run before.

        A rule without needs looks at each document alone.
        """
        for rule in load_rules():
            if rule.code in done or not set(rule.needs) <= set(facts):
                continue
            done.add(rule.code)
            if not rule.needs:
                for kind, document in self.documents.items():
                    self.diagnostics += self.run_alone(rule, kind, document)
            elif rule.needs[0] in self.documents and len(rule.needs) == 1:
                kind = rule.needs[0]
                found = self.run_alone(rule, kind, self.documents[kind])
                self.diagnostics += found
                if any(item.severity == "error" for item in found):
                    self.contradictory.add(kind)
            else:
                self.diagnostics += self.run_rule(rule, facts)

    def run_rule(self, rule: Rule, facts: Mapping[Fact, object]) -> tuple[Diagnostic, ...]:
        known = Facts(known=facts, files=self.file_names)
        return tuple(self.locate(rule, finding) for finding in rule.check(known))

    def run_alone(self, rule: Rule, kind: Kind, document: Document) -> tuple[Diagnostic, ...]:
        """What a rule finds in one document, from an earlier check if there was one."""
        if self.reuse is None or kind == "plan":
            return self.run_rule(rule, {kind: document})
        key = (rule.code, id(document))
        if key not in self.reuse.findings:
            found = self.run_rule(rule, {kind: document})
            if not any(item.document is document for item in self.reuse.documents.values()):
                return found  # it may go, and another one get its identity
            self.reuse.findings[key] = found
        return self.reuse.findings[key]

    def locate(self, rule: Rule, finding: Finding) -> Diagnostic:
        """Find the places of a finding and of its origins."""
        notes = []
        for origin in finding.origins:
            spans = self.files[origin.document].spans
            remark = "" if spans.has(origin.path) else " (default)"
            notes.append(f"{spans.find_value(origin.path).place}: {origin.text}{remark}")
        file, help_text = self.files[finding.document], finding.help
        spans = file.spans
        inherited = [] if type(file) is SourceFile else self.list_inherited(file, finding.path)
        if inherited:
            notes += [f"{span.place}: inherited: {text}" for span, text in inherited]
            remedy = f'remove = ["{name_path(finding.path)}"] drops what is inherited'
            help_text = f"{help_text}, or {remedy}" if help_text else remedy
        find = spans.find_key if finding.at == "key" else spans.find_value
        item = Diagnostic(
            code=rule.code,
            severity=rule.severity,
            message=finding.message,
            help=help_text,
            span=find(finding.path),
            notes=tuple(notes),
            path=name_path(finding.path),
        )
        if not self.chains:
            return item
        from pi2.plan.checking.authors import give_to_author

        return give_to_author(item, finding.path, finding.at, self.chains, self.sources)

    def add_removal(self, item: Diagnostic) -> Diagnostic:
        """Say of a missing key where it was removed, if it was."""
        own = [r.note for r in self.removed if item.code == "P102" and r.covers(item.path)]
        return replace(item, notes=(*item.notes, *own)) if own else item

    @staticmethod
    def list_inherited(file: SourceFile, path: KeyPath) -> list[tuple[Span, str]]:
        """What a table of a composed document has from other files."""
        from pi2.plan.composing.composed import ComposedPlaces

        places = file.spans
        return places.list_inherited(path) if isinstance(places, ComposedPlaces) else []

    def add_chain(self, item: Diagnostic) -> Diagnostic:
        """Say by which references a finding's file came to the document, where it is another."""
        chain = () if item.span is None else self.chains.get(item.span.file, ())
        if not chain:
            return item
        return replace(item, notes=item.notes + tuple(link.note for link in chain))

    def list_findings(self) -> tuple[Diagnostic, ...]:
        """All findings, each once, in the order in which they are shown."""
        found = (self.add_chain(item) for item in dict.fromkeys(self.diagnostics))
        return sort_diagnostics(tuple(found))
