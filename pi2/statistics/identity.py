"""The model that statistics are of: Parquet files of counts name it beside their columns."""

from __future__ import annotations

from pathlib import Path

from pi2.diagnostics import UserError
from pi2.importing.activations import MODEL_NOTE, WEIGHTS_NOTE
from pi2.regular_file import check_regular
from pi2.statistics.recording import read_statistics
from pi2.store.identity import identify_weights
from pi2.store.reader import NeuronStore


def check_identity(file: Path, store: NeuronStore) -> None:
    """Raise `UserError` P540 if the counts in ``file`` say that they are of another model than
    ``store``.

    Weights are compared where the file names them, else names of models, also that of the folder's
    summary.  Files that say neither, or cannot be read, are left to whoever reads their columns.
    """
    notes = _read_notes(file)
    own = store.manifest.model.id
    named = notes.get(MODEL_NOTE)
    if WEIGHTS_NOTE in notes:
        if notes[WEIGHTS_NOTE] == identify_weights(store.tensors):
            return
        of_whom = f"of model {named!r}" if named != own else f"of another {own!r}, by its weights"
    else:
        summary = read_statistics(file.parent) if named is None else None
        named = named if summary is None else summary.model
        if named in (None, own):
            return
        of_whom = f"of model {named!r}"
    raise UserError.of(
        "P540",
        f"{file} has counts {of_whom}, and {store.path} is a store of {own!r}",
        help="record them with this store: `pi2 activations PLAN --text FILE -o STATS`",
    )


def _read_notes(file: Path) -> dict[str, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(file)
        found = pq.read_schema(file).metadata or {}
    except (OSError, pa.ArrowException):
        return {}
    return {
        key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for key, value in found.items()
    }
