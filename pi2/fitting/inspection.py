"""Reads documents with the documents that they name, and gathers the findings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pi2.diagnostics import Diagnostic, UserError
from pi2.diagnostics.diagnostic import sort_diagnostics
from pi2.fitting.completion import (
    FillPlan,
    Origin,
    StoreOrigin,
    complete_plan,
    fill_gaps,
    has_tables,
    leaves_out,
)
from pi2.plan.arithmetic.sources import Completion, FileFacts
from pi2.plan.documents.common import COMPOSITION, Document
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.reading.block_entries import spread_blocks
from pi2.plan.reading.deprecations import modernise
from pi2.plan.reading.references import (
    DOCUMENTS,
    FOREIGN,
    Located,
    Resolver,
    UnknownName,
    check_inside,
    check_suffix,
    guess_kind,
    locate_document,
    read_document,
    report_kind,
)
from pi2.plan.reading.schema_check import check_schema
from pi2.plan.reading.thresholds import Thresholds
from pi2.plan.reading.trees import Chain, Overrides, Removal
from pi2.plan.toml.source import CANNOT_READ, Kind, SourceFile, parse_source
from pi2.plan.toml.text import KeyPath, name_path

Key = tuple[Kind, Path, str, Path | None, tuple[int, ...]]


@dataclass
class Reuse:
    """Documents read before, with findings."""

    keeps_all: bool = False
    """Whether no file is read twice; else files may change, and documents that extend others, which
    may change as well, are read again."""
    read: dict[Key, Inspection] = field(default_factory=dict)
    findings: dict[tuple[str, int], tuple[Diagnostic, ...]] = field(default_factory=dict)
    """Findings by the rule's code and the document's identity, which ``read`` keeps alive."""

    def make_key(self, located: Located, kind: Kind, root: Path | None) -> Key | None:
        """Name a file and its state; None if it is not a file of this machine."""
        own = kind, located.path, located.name, root
        if self.keeps_all:
            return (*own, ())
        if located.reference is not None:
            return None
        try:
            status = os.stat(located.path)
        except (OSError, ValueError):
            return None
        return (*own, (status.st_ino, status.st_mtime_ns, status.st_size))

    def keep(self, key: Key, read: Inspection) -> None:
        is_alone = read.composed is not None and type(read.composed[0]) is SourceFile
        if self.keeps_all or (is_alone and key[0] != "plan"):
            self.read[key] = read


_MISSING = "P102"
"""Code of a key that is missing."""
_ABOUT_REFERENCES = CANNOT_READ | FOREIGN | {"P009", "P014"}
"""Findings in a device or model that mean that the plan names the wrong file."""


class Inspection:
    """Gathers the sources, documents and findings of one check."""

    def __init__(
        self,
        resolver: Resolver | None = None,
        reuse: Reuse | None = None,
        fill: FillPlan | None = None,
        root: Path | None = None,
    ) -> None:
        self.root = root
        """Folder of the document that the user named."""
        self.resolver = resolver
        self.reuse = reuse
        self.fill = fill
        """Completes plans that run a GGUF file."""
        self.origin: Origin | None = None
        """The open file that the plan runs."""
        self.facts: FileFacts | None = None
        self.runs_file = False
        """Whether the plan's weights are a GGUF file."""
        self.is_open = False
        """Whether the plan leaves out values that its device and model determine."""
        self.is_whole = True
        self.own: dict[KeyPath, str] = {}
        """Documents that the plan does not name, with the reasons."""
        self.derived: Mapping[KeyPath, str] = {}
        self.overrides: Overrides | None = None
        self.composed: tuple[SourceFile, bool] | None = None
        """A document of which only one is read, and whether all exists that it extends."""
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
        """Take values that replace the plan's."""
        from pi2.plan.reading.trees import prepare_overrides
        from pi2.plan.toml.source import SET

        self.overrides, findings = prepare_overrides(values)
        self.diagnostics += findings
        self.sources[SET] = self.overrides.text

    def read(self, located: Located, kind: Kind, text: str | None = None) -> None:
        """Read the file of a document, or take its ``text``, and validate it against its schema;
        a device or model may be from an earlier check."""
        reuse = None if text is not None else self.reuse
        key = None if reuse is None else reuse.make_key(located, kind, self.root)
        other = None if reuse is None or key is None else reuse.read.get(key)
        if other is None:
            other = Inspection(self.resolver, root=self.root)
            other.composed = other.put_together(located, kind, text)
            if kind != "plan" and other.composed is not None:
                source, whole = other.composed
                other.accept(source, kind, located, whole)
            if reuse is not None and key is not None:
                reuse.keep(key, other)
        self.diagnostics += other.diagnostics
        self.sources.update(other.sources)
        self.removed += other.removed
        for name, chain in other.chains.items():
            self.chains.setdefault(name, chain)
        if kind == "plan" and other.composed is not None:
            source, whole = other.composed
            self.accept(replace(source, values=dict(source.values)), kind, located, whole)
        self.files.update(other.files)
        self.file_names.update(other.file_names)
        self.references.update(other.references)
        self.documents.update(other.documents)

    def put_together(
        self, located: Located, kind: Kind, text: str | None
    ) -> tuple[SourceFile, bool] | None:
        """A document with everything it extends, and whether all of that exists; or None."""
        path, name = located.path, located.name
        wrong = check_suffix(located.file_name, name, kind)
        if wrong is not None and os.path.exists(path):
            self.diagnostics.append(wrong)
            return None
        if text is not None:
            source = parse_source(path, name, text)
        else:
            root = self.root if located.reference is None else None
            source = read_document(path, name, f".{kind}.toml", root)
        if isinstance(source, list):
            self.diagnostics += source
            return None
        self.sources[name] = source.text
        other = guess_kind(source.values, kind)
        if other is not None:
            self.diagnostics.append(report_kind(source.spans.find_key(()), kind, other))
            return None
        source, warnings = modernise(source, kind)
        self.diagnostics += warnings
        source, faults = spread_blocks(source) if kind == "model" else (source, [])
        self.diagnostics += faults
        if any(key in source.values for key in COMPOSITION):
            source, composes = self.compose(source, kind, located.reference)
            return source, composes and not faults
        return source, not faults

    def take(self, located: Located, values: Mapping[str, Any]) -> None:
        """Take ``values`` for a plan's: the file is none itself."""
        text = "".join(f"{key} = {value!r}\n" for key, value in values.items())
        text = text.encode("utf-8", "backslashreplace").decode()
        self.sources[located.name] = text
        self.accept(SourceFile(located.path, located.name, text, dict(values)), "plan", located)

    def accept(self, source: SourceFile, kind: Kind, located: Located, whole: bool = True) -> None:
        """Take a document's values, ``whole`` unless something that it extends is not there, and
        validate them against its schema."""
        if kind == "plan" and self.overrides is not None:
            from pi2.plan.reading.trees import apply_overrides

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
        values, fill = source.values, self.fill
        if kind == "plan":
            names = fill is not None and fill.names_file(values.get("weights"), source.path)
            self.runs_file = names
            if names and not has_tables(values):
                whole = False
            elif names or leaves_out(values):
                if fill is not None and names:
                    whole &= self.open_file(source, fill)
                if "device" not in values:
                    values["device"] = "host"
                    self.own[("device",)] = "this machine"
                self.is_open, self.is_whole = True, whole
                return
        self.check_values(source, kind, whole)

    def check_values(self, source: SourceFile, kind: Kind, whole: bool) -> None:
        """Validate a document's values against its schema."""
        document, findings = check_schema(source, DOCUMENTS[kind])
        # What a document lacks may stand in a file that it extends and that was not found.
        found = (item for item in findings if whole or item.code != _MISSING)
        self.diagnostics += (self.add_removal(item) for item in found)
        if document is not None and whole:
            self.documents[kind] = document

    def open_file(self, source: SourceFile, fill: FillPlan) -> bool:
        """Open the GGUF file that a plan runs, which states the model; False if that fails."""
        try:
            self.origin = fill(source.values, source.path, self._find_draft(source))
        except UserError as error:
            span = source.spans.find_value(("weights",))
            self.diagnostics += (
                item if item.span is not None else replace(item, span=span, path="weights")
                for item in error.diagnostics
            )
            return False
        self.documents["model"] = model = self.origin.model
        if "model" not in source.values:
            source.values["model"] = model.id
            self.own[("model",)] = "what the file's metadata say"
        return True

    def close_plan(self) -> None:
        """Derive what a plan leaves out, once its device and model are known."""
        source = self.files["plan"]
        device, model = self.documents.get("device"), self.documents.get("model")
        if self.contradictory or not (isinstance(device, Device) and isinstance(model, Model)):
            # Whether anything else is wrong with the plan is seen without them.
            found = Completion(fill_gaps(source.values), is_sound=False)
        else:
            memory = None if self.fill is None else self.fill.find_memory
            origin = StoreOrigin(model) if self.origin is None else self.origin
            try:
                found = complete_plan(source.values, device, origin, memory)
            except UserError as error:
                self.note_at(("memory", "budget"), error.diagnostics)
                return
            self.derived, self.facts = self.own | found.reasons, found.facts
        source = self.files["plan"] = replace(source, values=found.values)
        self.check_values(source, "plan", self.is_whole)
        if not found.is_sound:
            self.documents.pop("plan", None)

    def _find_draft(self, source: SourceFile) -> Path | None:
        """The plan or GGUF file that a plan names as its draft, if it may."""
        stated = Completion(source.values).read("decode", "speculation", "plan")
        if not isinstance(stated, str):
            return None
        path: Path = source.path.parent / stated
        try:
            if not self.is_replaced(("decode", "speculation", "plan")):
                check_inside(path, source.path.parent, self.root)
        except (UserError, ValueError, OSError):
            return None
        return path

    def compose(
        self, source: SourceFile, kind: Kind, reference: str | None
    ) -> tuple[SourceFile, bool]:
        """Put a document together with the documents it extends; False if one is missing."""
        from pi2.plan.reading.compose import Composition

        result = Composition(source, kind, resolver=self.resolver, origin=reference, root=self.root)
        self.diagnostics += result.diagnostics + result.warnings
        self.removed += result.removed
        self.sources.update({name: file.text for name, file in result.files.items()})
        for name, chain in result.chains.items():
            self.chains.setdefault(name, chain)
        return result.file, result.is_whole

    def follow(self, kind: Kind) -> None:
        """Read the device or model that the plan names, even if the plan has other errors."""
        plan = self.files.get("plan")
        if kind == "model" and self.runs_file:
            if self.origin is not None:
                path, name = self.origin.path, self.origin.path.name
                self.files[kind] = SourceFile(path, name, f"# read from {name}\n", {})
                self.file_names[kind] = Path(f"{self.origin.model.id}.model.toml")
            return
        reference = None if plan is None else plan.values.get(kind)
        if kind == "model" and plan is not None and reference is None and self.fill is not None:
            reference = self.fill.find_model(plan.values.get("weights"), plan.path)
            if reference is not None:
                plan.values["model"] = reference
                self.own[("model",)] = "the store's model"
        if plan is None or not isinstance(reference, str) or not 0 < len(reference) <= 500:
            return
        located = self.locate_named(reference, kind, (kind,), is_given=(kind,) in self.own)
        if located is None:
            return
        before, name = len(self.diagnostics), located.name
        self.read(located, kind)
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
        plan = self.documents.get("plan")
        if not isinstance(plan, Plan) or plan.sparsity is None or plan.sparsity.thresholds is None:
            return None
        from pi2.plan.reading.thresholds import read_thresholds

        file, path = self.files["plan"], ("sparsity", "thresholds")
        place = file.path.parent / plan.sparsity.thresholds
        try:
            if not self.is_replaced(path):
                check_inside(place, file.path.parent, self.root)
            return read_thresholds(place, self.root)
        except UserError as error:
            self.sources.update(error.sources)
            for item in error.diagnostics:
                if item.code in ("P028", *FOREIGN):
                    self.note_at(path, [item])
                else:
                    self.diagnostics.append(item)
            return None

    def locate_draft(self) -> Located | None:
        """Find the plan of the model that drafts tokens, if the plan names one."""
        plan = self.documents.get("plan")
        if not isinstance(plan, Plan) or plan.decode.speculation is None:
            return None
        reference = plan.decode.speculation.plan
        if reference is None or (self.runs_file and plan.decode.speculation.drafts == "mtp"):
            return None
        return self.locate_named(reference, "plan", ("decode", "speculation", "plan"))

    def locate_named(
        self, reference: str, kind: Kind, path: KeyPath, *, is_given: bool = False
    ) -> Located | None:
        """Find the document that the plan names at ``path``; ``is_given``: pi2 names it."""
        file, origin = self.files["plan"], self.references["plan"]
        try:
            return locate_document(
                reference,
                kind,
                file.path.parent,
                resolver=self.resolver,
                origin=origin,
                is_given=is_given or self.is_replaced(path),
                root=self.root,
            )
        except UserError as error:
            self.note_at(path, error.diagnostics)
        except UnknownName as error:
            self.note_at(path, [Diagnostic(code="P015", message=str(error), help=error.hint)])
        return None

    def is_replaced(self, path: KeyPath) -> bool:
        """Whether the user gives the value at ``path``, not the plan."""
        replaced = self.files["plan"].replaced
        return any(path[:end] in replaced for end in range(1, len(path) + 1))

    def note_at(self, path: KeyPath, found: Iterable[Diagnostic]) -> None:
        """Take notice of findings about what stands at ``path`` of the plan."""
        span = self.files["plan"].spans.find_value(path)
        self.diagnostics += (replace(item, span=span, path=name_path(path)) for item in found)

    def add_draft(self, diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> None:
        """Take notice of the errors in the plan of the model that drafts tokens."""
        self.sources.update(sources)
        for item in (item for item in diagnostics if item.severity == "error"):
            if item.code in CANNOT_READ:
                path = ("decode", "speculation", "plan")
                self.note_at(path, [replace(item, code="P015")])
            else:
                self.diagnostics.append(item)

    def add_removal(self, item: Diagnostic) -> Diagnostic:
        """State why a key is missing: it was removed, or nothing states a model."""
        own = [r.note for r in self.removed if item.code == "P102" and r.covers(item.path)]
        if item.code == "P102" and item.path == "model":
            own.append("the store that `weights` names is not here, or states no model of pi2's")
        return replace(item, notes=(*item.notes, *own)) if own else item

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
