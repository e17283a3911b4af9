"""The machines that bundles are built for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from pi2.diagnostics import UserError
from pi2.phone.contents import DENSE_BACKENDS, SPARSE_BACKENDS
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import IsaFeature

Triple = Literal["x86_64-linux-gnu", "aarch64-linux-gnu", "aarch64-linux-android"]
"""A machine by LLVM's name."""
Architecture = Literal["x86-64", "aarch64"]

ARCHITECTURES: Mapping[Triple, Architecture] = {
    "x86_64-linux-gnu": "x86-64",
    "aarch64-linux-gnu": "aarch64",
    "aarch64-linux-android": "aarch64",
}
USUAL_FEATURES: Mapping[Architecture, tuple[IsaFeature, ...]] = {
    "x86-64": ("avx2", "f16c", "fma"),
    "aarch64": ("dotprod", "fp16", "neon"),
}
"""What kernels use where device and user leave it open: processors since 2013 (Haswell), and
since 2018 (Cortex-A76)."""
USUAL_THREADS = 4
"""The big cores of most phones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a bundle is to run on."""

    triple: Triple
    features: tuple[IsaFeature, ...] | None = None
    """Features that kernels may use; None: those of the plan's device, else the usual ones."""
    threads: int | None = None
    """Compute threads; None: those of the plan, else the cores of its device, else four."""
    probe: bool = True
    """Whether the bundle has the kernels that its probe times."""


def aim_plan(resolved: ResolvedPlan, wish: Wish) -> ResolvedPlan:
    """Return the plan as the bundle has it: everything stated that a run asks the machine for.

    UserError P673 where it is for another architecture, for units that bundles do not have, or
    has another model guess tokens.
    """
    architecture = ARCHITECTURES[wish.triple]
    unit = resolved.device.units[resolved.sparse_unit]
    _check_units(resolved)
    if resolved.draft is not None:
        raise UserError.of(
            "P673",
            "bundles have one model, and this plan has another one guess for it",
            help='write decode.speculation.drafts = "prompt" or "resident" without a plan',
        )
    if unit.architecture not in (None, architecture):
        raise UserError.of(
            "P673",
            f"the plan's device {resolved.device.id!r} has an {unit.architecture} processor, the"
            f" target {wish.triple} is {architecture}",
            help="choose the other target, or a plan for such a device",
        )
    features = wish.features or unit.features or USUAL_FEATURES[architecture]
    cores = sum(cluster.cores for cluster in unit.clusters)
    threads = wish.threads or resolved.plan.threads.compute or cores or USUAL_THREADS
    aimed = unit.model_copy(
        update={"architecture": architecture, "features": tuple(sorted(features))}
    )
    units = {**resolved.device.units, resolved.sparse_unit: aimed}
    settings = resolved.plan.threads.model_copy(update={"compute": threads})
    return ResolvedPlan(
        plan=resolved.plan.model_copy(update={"threads": settings, "store": "store"}),
        device=resolved.device.model_copy(update={"units": units}),
        model=resolved.model,
        path=resolved.path,
        thresholds=resolved.thresholds,
    )


def _check_units(resolved: ResolvedPlan) -> None:
    allowed = {resolved.sparse_unit: SPARSE_BACKENDS}
    allowed |= dict.fromkeys(resolved.dense_units, DENSE_BACKENDS)
    backends = {name: resolved.name_backend(name) for name in allowed}
    wrong = {name: backend for name, backend in backends.items() if backend not in allowed[name]}
    if wrong:
        listed = ", ".join(f"{name} ({backend})" for name, backend in wrong.items())
        raise UserError.of(
            "P673",
            f"bundles run on a processor and a Hexagon NPU, the plan gives work to {listed}",
            help="build a plan whose split names these alone; `pi2 plan` finds one",
        )


def parse_features(names: Sequence[str], triple: Triple) -> tuple[IsaFeature, ...]:
    """Return features by their names; UserError P673 for unknown ones."""
    from typing import get_args

    known = get_args(IsaFeature)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UserError.of(
            "P673",
            f"no kernels know a feature {unknown[0]!r} of {triple}",
            help=f"known are {', '.join(known)}",
        )
    return cast("tuple[IsaFeature, ...]", tuple(sorted(set(names))))
