"""A plan's neuron store: opened, compared with the plan, its hashes checked while it is loaded."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from pi2.diagnostics import UserError
from pi2.engine.loading import keeps_mapped, read_tokenizer
from pi2.fit import locate_findings
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.store.agreement import find_bundle_misfits
from pi2.store.reader import NeuronStore
from pi2.store.verification import HashCheck

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def open_store(resolved: ResolvedPlan, cleanup: ExitStack) -> tuple[NeuronStore, Tokenizer]:
    """Open the plan's neuron store, to be closed by ``cleanup``, and read its tokenizer."""
    store = NeuronStore.open(resolved.store_path, model=resolved.model)
    cleanup.callback(store.close)
    check_bundles(resolved, store)
    return store, read_tokenizer(store.tokenizer_path)


def begin_hashes(
    resolved: ResolvedPlan, store: NeuronStore, cleanup: ExitStack
) -> HashCheck | None:
    """Begin to compare the store's other files with their hashes, where the plan wants it, while
    the rest is loaded; to be closed by ``cleanup``."""
    if resolved.plan.io.verify == "never":
        return None
    hashes = HashCheck(
        store.path,
        store.manifest,
        reader_compares=not (resolved.has_whole_unit or keeps_mapped(resolved)),
    )
    cleanup.callback(hashes.close)
    return hashes


def is_by_hotness(store: NeuronStore | None) -> bool:
    """Whether stored order says which neurons are used often."""
    return store is not None and store.manifest.order != "index"


def check_bundles(resolved: ResolvedPlan, store: NeuronStore) -> None:
    """UserError P520 if the store's bundles do not lie as the plan says."""
    found = list(find_bundle_misfits(resolved, store.manifest.bundle))
    if found:
        raise UserError(locate_findings(found, resolved.path), exit_code=2)
