"""What `pi2.backends.protocol.Backend` asks of the cpu backend."""

from collections.abc import Callable, Mapping

from pi2.backends.blocks.contract import OF_STORES as FILES
from pi2.backends.blocks.contract import BlockSpec, describe_libraries, list_libraries
from pi2.backends.cpu.needs import count_chunk_bytes, need_workspace
from pi2.backends.kernels.spec import KernelSpec, describe_kernels
from pi2.backends.protocol import BuildRequest, Executor
from pi2.formats import find_packing
from pi2.model.options import describe_unknown
from pi2.model.tensor import name_layer_tensor, takes_blocks
from pi2.plan.arithmetic.units import UnitFacts, list_undivided
from pi2.plan.documents.device import UnitKind
from pi2.plan.documents.plan import ActivationType
from pi2.tile_permission import permit_tiles

PLANES: Mapping[ActivationType, int] = {"int8": 1, "int16": 2, "fp32": 4}
"""Bytes of an activation."""


def make_spec(request: BuildRequest) -> KernelSpec:
    """Return the spec of the library of neurons."""
    model, tensors, several = request.model, request.tensors, request.step_tokens > 1
    predictors = (name_layer_tensor(n, "predictor_in") for n in range(model.shape.layers))
    found = {tensors[name].rows // model.expert_count for name in predictors if name in tensors}
    return describe_kernels(
        model,
        gates=request.gate_rows is not None,
        ranks=tuple(sorted(found)),
        stride=request.bundle.stride,
        scales=request.bundle.scales,
        threads=request.threads,
        planes=PLANES[request.token_type],
        chunk_planes=PLANES[request.chunk_type],
        upper_steps=several and (request.token_type, request.step_type) == ("int16", "int8"),
        sequences=several,
        looks_ahead=request.looks_ahead and len(found) > 0,
        # With gates that are known there is less to read in a row: measured in notes/kernels.md.
        passes=request.passes or (1 if request.gate_rows is None else 2),
        architecture=request.architecture,
        features=tuple(sorted(request.features)),
    )


def list_specs(request: BuildRequest) -> list[KernelSpec | BlockSpec]:
    """Return the specs of all libraries that an executor takes."""
    return [make_spec(request), *list_programs(request)]


def list_programs(request: BuildRequest) -> list[BlockSpec]:
    """Return the libraries of instructions that everything but neurons is computed by."""
    model = request.model
    dense = (own for own in model.dense_tensors if takes_blocks(own.name))
    formats = {own.packing.joined for own in dense}
    names = [*list_libraries(model, request.kv_type), *sorted(formats)]
    return describe_libraries(names, request.features, request.architecture)


__all__ = [
    "COMPUTES",
    "FIXED",
    "KINDS",
    "NATIVE",
    "build",
    "count_chunk_bytes",
    "find_limits",
    "find_obstacles",
    "need_workspace",
    "prepare",
]

COMPUTES = True
NATIVE = True
KINDS: tuple[UnitKind, ...] = ("cpu",)
ONLY_EMULATED = False
FIXED: Mapping[str, tuple[object, ...]] = {"memory.weights": ("loaded",)}
COMPUTED = frozenset(option for option in FILES if not option.startswith("attention.index"))
"""Options of models that there are kernels for."""


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return what keeps the kernels from running here."""
    from pi2.backends.compiler.functions import find_obstacles as find_missing
    from pi2.backends.kernels.isa import ARCHITECTURES, choose_isa

    if architecture not in ARCHITECTURES:
        return [f"no kernels for architecture {architecture}", *find_missing()]
    obstacles = []
    if choose_isa(features, architecture).blocks and not permit_tiles():
        obstacles.append("the system does not let this process use amx-int8")
    return obstacles + find_missing()


def find_limits(facts: UnitFacts) -> list[str]:
    """Return the parts of a plan that it cannot compute."""
    rows, model = facts.resolved.divided_rows, facts.resolved.model
    limits = describe_unknown(model, COMPUTED, facts.resolved.plan.kv.context)
    whole = ["norm.outputs"] if rows is not None and rows.output else []
    whole += ["attention.latent"] if rows is not None and (rows.qkv or rows.output) else []
    limits += list_undivided(facts, whole)
    has_gates = facts.resolved.plan.decode.predictor == "gate"
    if has_gates and find_packing(model.quantization.ffn).shares_down_scales:
        limits.append(f"keeps no gates of {model.quantization.ffn}: no `gate` predictor")
    return limits


def prepare(request: BuildRequest) -> Callable[[BuildRequest], Executor]:
    """Compile the kernels unless they are cached."""
    from pi2.backends.compiler.cache import load_or_compile, load_or_compile_several

    spec = make_spec(request)
    path = load_or_compile(spec, request.progress)
    programs = list_programs(request)
    if request.has_little_memory:
        for own in programs:
            load_or_compile(own, request.progress)
    load_or_compile_several(programs, request.progress)

    def build(request: BuildRequest) -> Executor:
        from pi2.backends.cpu.executor import CpuExecutor

        return CpuExecutor(request, spec, path)

    return build


def build(request: BuildRequest) -> Executor:
    return prepare(request)(request)
