"""The small files of a store that come with the checkpoint: tokenizer, chat templates, notes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pi2.diagnostics import UserError
from pi2.importing.checkpoint import Checkpoint
from pi2.plan.documents.model import Model
from pi2.regular_file import read_regular
from pi2.sandbox.tokenizer import TokenizerRefused, try_tokenizer
from pi2.store.manifest import CHAT_TEMPLATE, TOKENIZER_CONFIG


def read_extra_files(
    source: Checkpoint,
    model: Model,
    activations: Path | None,
    extras: Mapping[str, Path],
) -> dict[str, bytes]:
    """Contents of the small files that go into the store, by their path in it."""
    name = model.tokenizer.file
    if name != Path(name).name:
        raise UserError.of(
            "P543",
            f"tokenizer.file is {name!r}: the tokenizer lies in the store's own folder",
            help='set tokenizer.file = "tokenizer.json" in the model document',
        )
    optional = {
        TOKENIZER_CONFIG: source.read_file(TOKENIZER_CONFIG),
        CHAT_TEMPLATE: source.read_template(),
    }
    contents = {path: content for path, content in optional.items() if content is not None}
    for label, template in source.list_templates().items():
        contents[f"chat_template.{label}.jinja"] = template
    paths = dict(extras)
    if activations is not None:
        paths["activations.parquet"] = activations
    for path, file in paths.items():
        contents[path] = _read_bytes(file)
    if name not in contents:
        found = source.read_tokenizer()
        if found is None:
            raise UserError.of(
                "P543",
                f"there is no {source.folder / name}",
                help="put the model's tokenizer.json or tokenizer.model there, or give it with "
                "--tokenizer",
            )
        contents[name] = found
    file = source.folder / name if source.given_tokenizer is None else source.given_tokenizer[0]
    _check_tokenizer(file, contents[name], model)
    return contents


def _read_bytes(file: Path) -> bytes:
    try:
        return read_regular(file)
    except OSError as error:
        raise UserError.of("P543", f"cannot read {file}: {error.strerror}") from None


def keep_old_notes(output: Path, notes: Mapping[str, bytes]) -> dict[str, bytes]:
    """The notes, and what stands in their place now, if it is something else."""
    kept = dict(notes)
    for path, content in notes.items():
        try:
            old = read_regular(output / path)
        except OSError:
            continue
        if old != content:
            kept[f"{path}.old"] = old
    return kept


def _check_tokenizer(file: Path, content: bytes, model: Model) -> None:
    """The tokenizer must work, and may not make tokens that the model lacks."""
    try:
        size = try_tokenizer(content).size
    except TokenizerRefused as error:
        raise UserError.of(
            "P543",
            f"cannot use the tokenizer {file}: {error}",
            help="give another tokenizer.json with --tokenizer",
        ) from None
    if size > model.shape.vocab:
        raise UserError.of(
            "P543",
            f"the tokenizer {file} has {size} tokens, the model only {model.shape.vocab}",
            help="give the tokenizer that belongs to the model",
        )
