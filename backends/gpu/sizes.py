"""Bytes of neurons and jobs on a device; a layer's last tile of 32 neurons is filled up."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pi2.backends.gpu.kernels.specification import FfnKernels
from pi2.backends.gpu.launchers.interface import DeviceFacts
from pi2.model.tensor import EMBEDDING, HEAD
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Ffn
from pi2.plan.weights.layout import BundleLayout, Precision, round_up, scale_bytes, weight_bytes

TILE = 32
"""Rows of a tile."""
STAGING_BUFFERS = 2
"""One range of added neurons is uploaded while another is computed."""
PACKING_COPIES = 3
"""Copies of a range in main memory while it is rearranged for the device."""
PIECE_ROWS = 1024
"""Rows of a matrix that are rearranged at a time."""
_PARTIAL_ROWS = 64
"""Sums of parts of the neurons that there is room for, at least."""
_VECTOR_BYTES = 16
"""Arrays are whole vectors."""


def count_tile_bytes(layout: BundleLayout) -> dict[str, int]:
    """Bytes of a tile of neurons in each array of `pi2.backends.gpu.packing.pack_neurons`."""
    inputs = len(layout.parts) - 1
    weights = TILE * weight_bytes(layout.hidden, layout.precision)
    scales = TILE * scale_bytes(layout.hidden, layout.precision)
    sizes = {
        "gate_up_weights": inputs * weights,
        "gate_up_scales": inputs * scales,
        "down_weights": weights,
        "down_scales": scales,
        "biases": TILE * 4 * len(layout.biases),
        "experts": 0 if layout.expert_offset is None else TILE * 4,
    }
    return {name: size for name, size in sizes.items() if size}


def count_experts(model: Model) -> int:
    """Experts whose weights a job is given; 0 where the model is no MoE model."""
    return 0 if model.moe is None else model.expert_count


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSizes:
    """What a dense unit has on a device."""

    layout: BundleLayout
    """Bundles with their scales in them."""
    experts: int
    """Experts of an MoE model; 0 for a model without experts."""
    counts: Sequence[int]
    """Neurons that are kept of each layer."""
    chunk: int
    """Most tokens of a job."""
    jobs: int = 1
    """Most jobs under way at the same time."""
    stretch: int = 0
    """Most neurons that are added to a job at once; 0 where none are."""

    @property
    def partial_rows(self) -> int:
        """Sums of parts of the neurons, of a token each, that there is room for."""
        return max(_PARTIAL_ROWS, self.chunk)

    def list_common(self) -> dict[str, int]:
        """Bytes of the arrays that all jobs use, by name."""
        most = max(*self.counts, self.stretch, 1)
        return _round_all(
            {
                "values": 4 * self.chunk * most,
                "partials": 4 * self.partial_rows * self.layout.hidden,
            }
        )

    def list_job(self) -> dict[str, int]:
        """Bytes of the arrays of a job, by name; main memory has the same."""
        sizes = dict.fromkeys(("inputs", "sums"), 4 * self.chunk * self.layout.hidden)
        if self.experts:
            sizes["routes"] = 4 * self.chunk * self.experts
        return _round_all(sizes)

    def list_neurons(self, count: int) -> dict[str, int]:
        """Bytes of the arrays of ``count`` neurons, by name."""
        tiles = -(-count // TILE)
        return {name: tiles * size for name, size in count_tile_bytes(self.layout).items()}

    def list_arrays(self) -> Iterator[int]:
        yield from self.list_common().values()
        for _ in range(self.jobs):
            yield from self.list_job().values()
        for _ in range(STAGING_BUFFERS):
            yield from self.list_neurons(self.stretch).values()
        for count in self.counts:
            yield from self.list_neurons(count).values()

    @property
    def device_bytes(self) -> int:
        return sum(self.list_arrays())

    @property
    def host_bytes(self) -> int:
        """Further bytes of main memory: inputs and outputs of jobs, neurons on their way to the
        device and while they are rearranged."""
        copies = STAGING_BUFFERS + PACKING_COPIES
        moving = copies * sum(self.list_neurons(max(self.stretch, TILE)).values())
        return self.jobs * sum(self.list_job().values()) + moving


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixShape:
    """Rows of a matrix that a unit has."""

    rows: int
    length: int
    precision: Precision
    tokens: int
    """Most tokens that are multiplied with them at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """What rows of projections and of the head take on a device."""

    matrices: Mapping[str, MatrixShape]
    """By the names of their tensors."""
    jobs: int = 1
    """Most jobs under way at the same time."""

    def list_matrix(self, name: str) -> dict[str, int]:
        """Bytes of a matrix's arrays, by the names of kernels' parameters."""
        shape = self.matrices[name]
        rows = round_up(shape.rows, TILE)
        weights = rows * weight_bytes(shape.length, shape.precision)
        scales = rows * scale_bytes(shape.length, shape.precision)
        sizes = _round_all({"matrix_weights": weights, "matrix_scales": scales})
        return {key: size for key, size in sizes.items() if size}

    def list_job(self) -> dict[str, int]:
        """Bytes of the arrays of a job, by name; main memory has the same."""
        shapes = self.matrices.values()
        return _round_all(
            {
                "inputs": 4 * max(shape.tokens * shape.length for shape in shapes),
                "outputs": 4 * max(shape.tokens * shape.rows for shape in shapes),
            }
        )

    def list_arrays(self) -> Iterator[int]:
        for name in self.matrices:
            yield from self.list_matrix(name).values()
        for _ in range(self.jobs):
            yield from self.list_job().values()

    @property
    def host_bytes(self) -> int:
        """Further bytes of main memory: inputs and outputs of jobs, and rows being rearranged."""
        moving = max(
            min(shape.rows, PIECE_ROWS)
            * (
                weight_bytes(shape.length, shape.precision)
                + scale_bytes(shape.length, shape.precision)
            )
            for shape in self.matrices.values()
        )
        return self.jobs * sum(self.list_job().values()) + (PACKING_COPIES + 1) * moving


def describe_rows(
    matrices: Mapping[str, tuple[int, int, Precision]], chunk: int, jobs: int
) -> RowSizes | None:
    """Return what ``matrices`` (rows, length and precision) take with ``chunk`` tokens at once, of
    the head fewer; None where there are none."""
    heads = (EMBEDDING, HEAD)
    shapes = {
        name: MatrixShape(
            rows=rows,
            length=length,
            precision=precision,
            tokens=min(chunk, LOGIT_ROWS) if name in heads else chunk,
        )
        for name, (rows, length, precision) in matrices.items()
    }
    return RowSizes(matrices=shapes, jobs=jobs) if shapes else None


def _round_all(sizes: dict[str, int]) -> dict[str, int]:
    return {name: round_up(size, _VECTOR_BYTES) for name, size in sizes.items()}


_FEW_TOKENS = 16
"""With more tokens, products by tiles of 64 tokens are the cheaper ones."""
_GROUPS_PER_UNIT = 8
"""Work groups that keep a compute unit busy."""
_UNKNOWN_UNITS = 32
"""Compute units where the API does not say."""
_COLUMNS = {1: 256, 4: 256, 64: 64}
"""Elements of the FFN's sum that a work group computes, by the tokens of the kernel."""


def choose_kernel_tokens(tokens: int) -> int:
    """Return how many tokens a work group of the cheapest kernel computes with."""
    return 1 if tokens == 1 else 4 if tokens <= _FEW_TOKENS else 64


def count_busy_groups(facts: DeviceFacts) -> int:
    """Return how many work groups keep the device busy."""
    return _GROUPS_PER_UNIT * (facts.compute_units or _UNKNOWN_UNITS)


def choose_parts(
    facts: DeviceFacts, hidden: int, neurons: int, tokens: int, size: int, rows: int
) -> int:
    """Return into how many parts the sum over ``neurons`` is divided, by a kernel of ``size``
    tokens, if there is room for ``rows`` vectors of a part and a token."""
    groups = -(-hidden // _COLUMNS[size]) * -(-tokens // size)
    most = min(rows // tokens, -(-neurons // TILE))
    return max(1, min(-(-count_busy_groups(facts) // groups), most))


def describe_model_ffn(layout: BundleLayout, model: Model) -> FfnKernels:
    """Return the kernels for neurons of ``layout`` of a model, in tiles."""
    found = describe_ffn(layout, model.ffn, count_experts(model))
    weighs = model.moe is not None and model.moe.weighs == "input"
    return dataclasses.replace(found, weighs_input=weighs)


def describe_ffn(layout: BundleLayout, ffn: Ffn, experts: int = 0) -> FfnKernels:
    """Return the kernels for neurons of ``layout`` that compute ``ffn``."""
    options = ffn.model_copy(update={"absent_layers": (), "gate_sparsity": ()})
    return FfnKernels(
        hidden=layout.hidden, precision=layout.precision, options=options, experts=experts
    )
