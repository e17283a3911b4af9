"""A store's statement of its model: parts of the document, their digest, its weights'.  And whether
plan and store fit together, as far as the manifest and file sizes tell."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.caches import check_regular
from pi2.diagnostics import Diagnostic, UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.common import flatten, hash_json
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.weights.layout import Tensor

if TYPE_CHECKING:
    from pi2.store.manifest import Manifest, StoredBundle, StoredFile

_OTHERS = frozenset(
    {
        *("schema_version", "id", "name", "description", "licence", "extends", "inherit", "remove"),
        *("pooling", "tokenizer", "tensors", "predictor", "sparsity", "sampling"),
    }
)
"""Keys of a model that change no weights of a store."""
_OLDEST: Mapping[str, list[str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)["oldest"]
"""Options of the first stores that had a table, which are always described; others where they are
used: stores stay readable."""


def describe_weights(model: Model) -> dict[str, Any]:
    """Return those parts as plain JSON values: shape, operators, precisions, predictor rank.

    Keys that are absent from the document are left out: an option that a later pi2 adds does not
    change the digest of models that do not use it."""
    kept = set(type(model).model_fields) - _OTHERS
    parts = model.model_dump(mode="json", include=kept, exclude_none=True)
    if model.other_rope is not None:
        parts["other_rope"] = model.other_rope.model_dump(mode="json", exclude_defaults=True)
    for table, oldest in _OLDEST.items():
        if table not in parts:
            continue
        fields = type(getattr(model, table)).model_fields
        for option in [option for option in parts[table] if option not in oldest]:
            if parts[table][option] in (fields[option].default, []):
                del parts[table][option]
        if not parts[table]:
            del parts[table]
    if model.residual == "sequential":
        del parts["residual"]
    for option in ("head_bias", "layer_scale", "operators"):
        if not parts[option]:
            del parts[option]
    if model.predictor is not None:
        parts["predictor"] = {"rank": model.predictor.rank}
    return parts


def identify_weights(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, of what tells a model from others of its shape: the float32 tensors of a
    store (norms, biases, routers), which neither rounding nor the order or distance of neurons
    changes; predictors, which may be trained again, are left out."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.precision is None and "predictor" not in name:
            digest.update(name.encode() + b"\0")
            digest.update(tensor.weights.tobytes())
    return digest.hexdigest()


def list_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Say where two descriptions differ: ``"shape.ffn is 1024 in the store, 2048 in ..."``."""
    left, right = dict(flatten(stored)), dict(flatten(wanted))
    return [
        f"{key} is {_show(left, key)} in the store, {_show(right, key)} in the model document"
        for key in dict.fromkeys([*left, *right])
        if left.get(key, _ABSENT) != right.get(key, _ABSENT)
    ]


_ABSENT = object()


def _show(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


def find_bundle_misfits(resolved: ResolvedPlan, stored: StoredBundle) -> Iterator[Diagnostic]:
    """P520 if the store's bundles do not lie as the plan says."""
    planned = resolved.bundle
    found, keys, options = [], [], []
    if stored.stride != planned.stride:
        found.append(f"the store's bundles are {stored.stride} bytes apart, not {planned.stride}")
        keys.append(f'bundle.stride = "{format_bytes(stored.stride)}"')
        options.append(f"--stride '{planned.stride} B'")
    if stored.scales != planned.scales:
        found.append(f"its scales are {stored.scales}, not {planned.scales}")
        keys.append(f'bundle.scales = "{stored.scales}"')
        options.append(f"--scales {planned.scales}")
    if found:
        yield Diagnostic(
            code="P520",
            message=f"the store {resolved.store_path} is not as the plan says: "
            f"{', and '.join(found)}",
            help=f"set {' and '.join(keys)}, or write the store anew: `pi2 store repack "
            f"{resolved.store_path} {' '.join(options)}`",
            path="bundle.stride" if stored.stride != planned.stride else "bundle.scales",
        )


def check_model(folder: Path, manifest: Manifest, model: Model) -> None:
    """UserError P505 if the store in ``folder`` is of another model."""
    wanted = describe_weights(model)
    if manifest.model.digest == hash_json(wanted):
        return
    differences = list_differences(manifest.model.parts, wanted)
    raise UserError(
        [
            Diagnostic(
                code="P505",
                message=f"the store {folder} is not of this model: {'; '.join(differences)}",
                help=f"use a store of {model.id!r}, or convert its checkpoint again"
                if manifest.model.id != model.id
                else "convert the checkpoint again with this model document, or undo its change",
            )
        ],
        exit_code=2,
    )


def check_files(folder: Path, manifest: Manifest) -> None:
    """UserError P506 if a file is missing or has another size, P508 if it cannot be looked at."""
    for entry in manifest.files:
        path = folder / entry.path
        try:
            size = check_regular(path).st_size
        except FileNotFoundError:
            raise UserError.of(
                "P506",
                f"{path} is missing from the neuron store",
                help="make the store again, or copy it again as a whole",
            ) from None
        except OSError as error:
            raise UserError.of("P508", f"cannot read {path}: {error.strerror}") from None
        if size != entry.bytes:
            raise report_size(path, entry, size)


def report_size(path: Path, entry: StoredFile, size: int) -> UserError:
    """P506: a file of the store has another size than its manifest says."""
    return UserError.of(
        "P506",
        f"{path} has {size} bytes instead of {entry.bytes}: it was cut or replaced",
        help="make the store again, or copy it again as a whole",
    )
