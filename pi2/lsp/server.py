"""The protocol: requests of an editor in, answers of the other modules out."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer

from pi2.diagnostics import Diagnostic, Span
from pi2.diagnostics.diagnostic import label_note
from pi2.fitting.check import find_page
from pi2.lsp.checked import Checked, Lines, explain_place, find_definition, list_fixes
from pi2.lsp.completion import SUGGESTED, complete
from pi2.plan.toml.source import detect_kind

_SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}
_ITEMS: dict[SUGGESTED, types.CompletionItemKind] = {
    "key": types.CompletionItemKind.Property,
    "table": types.CompletionItemKind.Module,
    "value": types.CompletionItemKind.Value,
    "file": types.CompletionItemKind.File,
}


class PlanServer(LanguageServer):
    """A server for one editor.  Texts are checked as they are in the editor, saved or not."""

    def __init__(self) -> None:
        super().__init__(
            "pi2", metadata.version("pi2"), text_document_sync_kind=types.TextDocumentSyncKind.Full
        )
        self.checked: dict[str, Checked] = {}

    def check(self, uri: str) -> Checked | None:
        """The document at ``uri``, checked once per text; None if it is no document of pi2."""
        name = uris.to_fs_path(uri)
        if name is None or detect_kind(name) is None:
            return None
        text = self.workspace.get_text_document(uri).source.replace("\r\n", "\n")
        known = self.checked.get(uri)
        if known is None or known.text != text:
            known = self.checked[uri] = Checked(Path(name), text)
        return known

    def count(self, text: str) -> Lines:
        return Lines(text, self.workspace.position_codec)

    def make_range(self, lines: Lines, span: Span) -> types.Range:
        first, start, last, end = lines.convert_span(span)
        return types.Range(types.Position(first, start), types.Position(last, end))

    def publish(self, uri: str) -> None:
        checked = self.check(uri)
        if checked is None:
            return
        lines = self.count(checked.text)
        found = [self.describe(checked, lines, *item) for item in checked.list_findings()]
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(uri=uri, diagnostics=found)
        )

    def describe(
        self, checked: Checked, lines: Lines, span: Span, item: Diagnostic
    ) -> types.Diagnostic:
        """One finding, with the place in another file if it has one."""
        message = item.message if item.help is None else f"{item.message}\nhelp: {item.help}"
        notes = "".join(f"\n{label_note(note)}" for note in item.notes)
        related = []
        if item.span is not None and item.span.file != str(checked.path):
            message = f"{Path(item.span.file).name}: {message}"
            place = self.locate(checked, item.span)
            if place is not None:
                related = [types.DiagnosticRelatedInformation(place, item.message)]
        page = find_page(item.code)
        return types.Diagnostic(
            range=self.make_range(lines, span),
            message=message + notes,
            severity=_SEVERITIES[item.severity],
            code=item.code,
            source="pi2",
            related_information=related or None,
            data=None if page is None else {"page": page.what},
        )

    def list_actions(
        self, checked: Checked, uri: str, area: types.Range
    ) -> Iterator[types.CodeAction]:
        """The fixes of all findings that ``area`` touches."""
        lines = self.count(checked.text)
        for span, item in checked.list_findings():
            place = self.make_range(lines, span)
            if place.end < area.start or area.end < place.start:
                continue
            finding = self.describe(checked, lines, span, item)
            for number, fix in enumerate(list_fixes(checked, span, item)):
                edit = types.TextEdit(self.make_range(lines, fix.span), fix.text)
                yield types.CodeAction(
                    title=fix.title,
                    kind=types.CodeActionKind.QuickFix,
                    diagnostics=[finding],
                    is_preferred=number == 0,
                    edit=types.WorkspaceEdit(changes={uri: [edit]}),
                )

    def locate(self, checked: Checked, span: Span) -> types.Location | None:
        """A place in another file; None for texts that are no file."""
        text = checked.report.sources.get(span.file)
        path = next(
            (item.path for item in checked.report.files.values() if item.name == span.file),
            Path(span.file),
        )
        uri = uris.from_fs_path(str(path.absolute())) if path.is_file() else None
        if text is None or uri is None:
            return None
        return types.Location(uri, self.make_range(self.count(text), span))


def make_server() -> PlanServer:
    server = PlanServer()

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def open_document(params: types.DidOpenTextDocumentParams) -> None:
        server.publish(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def change_document(params: types.DidChangeTextDocumentParams) -> None:
        server.publish(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def save_document(params: types.DidSaveTextDocumentParams) -> None:
        # Others may depend on what was saved.
        server.checked.clear()
        for uri in list(server.workspace.text_documents):
            server.publish(uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def close_document(params: types.DidCloseTextDocumentParams) -> None:
        server.checked.pop(params.text_document.uri, None)
        server.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(uri=params.text_document.uri, diagnostics=[])
        )

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(code_action_kinds=[types.CodeActionKind.QuickFix]),
    )
    def list_actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        checked = server.check(params.text_document.uri)
        wanted = params.context.only
        if checked is None or (wanted and types.CodeActionKind.QuickFix not in wanted):
            return []
        return list(server.list_actions(checked, params.text_document.uri, params.range))

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> types.Hover | None:
        place = _find_place(server, params)
        found = None if place is None else explain_place(*place)
        if found is None or place is None:
            return None
        span, text = found
        content = types.MarkupContent(types.MarkupKind.Markdown, text)
        return types.Hover(content, server.make_range(server.count(place[0].text), span))

    @server.feature(
        types.TEXT_DOCUMENT_COMPLETION,
        types.CompletionOptions(trigger_characters=['"', ".", "[", "=", " "]),
    )
    def list_completions(params: types.CompletionParams) -> types.CompletionList:
        checked = server.check(params.text_document.uri)
        if checked is None:
            return types.CompletionList(is_incomplete=False, items=[])
        lines = server.count(checked.text)
        offset = lines.find_offset(params.position.line, params.position.character)
        cursor, items = complete(checked, offset)
        replaced = types.Range(types.Position(*lines.convert_offset(cursor.start)), params.position)
        return types.CompletionList(
            is_incomplete=False,
            items=[
                types.CompletionItem(
                    label=item.label,
                    kind=_ITEMS[item.sort],
                    detail=item.detail or None,
                    documentation=types.MarkupContent(types.MarkupKind.Markdown, item.text)
                    if item.text
                    else None,
                    sort_text=f"{number:04}",
                    filter_text=item.insert,
                    text_edit=types.TextEdit(range=replaced, new_text=item.insert),
                )
                for number, item in enumerate(items)
            ],
        )

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    def go_to_definition(params: types.DefinitionParams) -> types.Location | None:
        place = _find_place(server, params)
        found = None if place is None else find_definition(*place)
        if found is None or place is None:
            return None
        path, span = found
        uri = uris.from_fs_path(str(path.resolve()))
        if uri is None:
            return None
        text = place[0].report.sources.get(span.file, "")
        start = types.Position(0, 0)
        area = types.Range(start, start)
        if text and not span.is_whole_file:
            area = server.make_range(server.count(text), span)
        return types.Location(uri, area)

    return server


def _find_place(
    server: PlanServer, params: types.HoverParams | types.DefinitionParams
) -> tuple[Checked, int, int] | None:
    checked = server.check(params.text_document.uri)
    if checked is None:
        return None
    lines = server.count(checked.text)
    offset = lines.find_offset(params.position.line, params.position.character)
    before = checked.text[:offset]
    return checked, before.count("\n") + 1, offset - before.rfind("\n")
