"""Whether a plan and its neuron store fit together, as far as the manifest and file sizes tell."""

from collections.abc import Iterator
from pathlib import Path

from pi2.caches import check_regular
from pi2.diagnostics import Diagnostic, UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import format_bytes
from pi2.store.identity import compute_digest, describe_weights, list_differences
from pi2.store.manifest import Manifest, StoredBundle, StoredFile


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
    if manifest.model.digest == compute_digest(wanted):
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
