"""A layer's neurons are divided between the sparse unit and at most one dense unit.

Why: the dense unit owns the first neurons in stored order, the hottest ones, and computes all of
them; the sparse unit computes what a predictor names of the rest.  There is one such boundary.

Example: ``split = { cpu = 0.4, gpu = 0.3, npu = 0.3 }``.

Fix: give each layer to one unit beside the sparse one; other layers may have another
(``layers.overrides``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pi2.plan.arithmetic.resolved import find_sparse_unit
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.checking.splits import list_placed_splits
from pi2.plan.documents.selectors import list_layers
from pi2.plan.toml.paths import KeyPath

CODE = "P262"
SEVERITY = "error"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Count the units of every split, and of each layer's split with those for several
    sequences."""
    sparse = find_sparse_unit(facts.plan, facts.device)
    subjects = {}
    for placed in list_placed_splits(facts.plan):
        subjects[placed.path] = placed.subject
        dense = _list_dense(placed.split, sparse)
        if len(dense) > 1:
            yield Finding(
                path=placed.path,
                message=f"{placed.subject} have two units beside `{sparse}`: "
                f"{', '.join(f'`{name}`' for name in dense)}",
                help=f"give the share of `{dense[-1]}` to `{dense[0]}` or `{sparse}`",
            )
    seen = set()
    for layer, splits in enumerate(_list_splits_of_layers(facts)):
        first: str | None = None
        for path, split in splits.items():
            dense = _list_dense(split, sparse)
            if len(dense) != 1:
                continue
            if first is None:
                first = dense[0]
            elif dense[0] != first and path not in seen:
                seen.add(path)
                yield Finding(
                    path=path,
                    message=f"{subjects[path]} name `{dense[0]}`, and layer {layer} has "
                    f"`{first}` otherwise",
                    help=f"name `{first}` here, too: a unit keeps its neurons whatever the batch",
                )


def _list_dense(split: Mapping[str, float], sparse: str) -> list[str]:
    return [name for name, share in split.items() if share > 0 and name != sparse]


def _list_splits_of_layers(facts: Facts) -> list[dict[KeyPath, Mapping[str, float]]]:
    """Every layer's splits by their places: that for one sequence, then those for several."""
    plan, count = facts.plan, facts.resolved.model.shape.layers
    base: KeyPath = ("layers",)
    owners: list[tuple[KeyPath, Mapping[str, float]]] = [(base, plan.layers.split)] * count
    tables = [(base, plan.layers.batches)] * count
    for number, override in enumerate(plan.layers.overrides):
        path: KeyPath = (*base, "overrides", number)
        for layer in list_layers(override.select, count):
            if override.split is not None:
                owners[layer] = (path, override.split)
            if override.batches is not None:
                tables[layer] = (path, override.batches)
    return [
        {(*owner, "split"): split}
        | {(*place, "batches", n, "split"): entry.split for n, entry in enumerate(table)}
        for (owner, split), (place, table) in zip(owners, tables, strict=True)
    ]
