"""A baseline: the findings that a project has already, so that only new ones are reported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pi2.diagnostics.diagnostic import Diagnostic
from pi2.diagnostics.errors import UserError
from pi2.diagnostics.fingerprints import compute_fingerprints

VERSION = 1
_KEY = "fingerprint"


def read_baseline(file: Path) -> dict[str, str]:
    """Files by the fingerprints of findings in them; UserError P031 if it cannot be read."""
    try:
        content = json.loads(file.read_text("utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"this is version {content['version']}, not {VERSION}")
        return {str(item[_KEY]): str(item["file"]) for item in content["findings"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError.of(
            "P031",
            f"cannot read the baseline: {reason}",
            file=str(file),
            help=f"make it with `pi2 validate --write-baseline --baseline {file} FILE...`",
        ) from None


def write_baseline(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> str:
    """The text of a baseline with these findings, in a stable order."""
    prints = compute_fingerprints(diagnostics, sources)
    rows = [
        {
            "file": "" if item.span is None else item.span.file,
            "code": item.code,
            "message": item.message,
            _KEY: print_,
        }
        for item, print_ in zip(diagnostics, prints, strict=True)
    ]
    rows.sort(key=lambda row: tuple(row.values()))
    return json.dumps({"version": VERSION, "findings": rows}, indent=1) + "\n"


def leave_out_known(
    diagnostics: Sequence[Diagnostic], sources: Mapping[str, str], baseline: Mapping[str, str]
) -> tuple[tuple[Diagnostic, ...], set[str]]:
    """The findings that are new, and fingerprints of the baseline that no finding has any more."""
    prints = compute_fingerprints(diagnostics, sources)
    new = [item for item, own in zip(diagnostics, prints, strict=True) if own not in baseline]
    return tuple(new), set(baseline) - set(prints)
