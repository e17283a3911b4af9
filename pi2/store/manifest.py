"""The manifest of a neuron store, with all offsets: opening needs no Arrow library, `pi2 store
verify` compares."""

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from pi2.caches import read_regular
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.formats import find_packing
from pi2.model.tensor import DenseTensor, StoredPrecision
from pi2.model.tensors import list_tensors
from pi2.plan.documents.common import Count, Identifier, Table, hash_json
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import BlockFormat, FfnPrecision
from pi2.plan.weights.layout import GROUP, BundleLayout, PartName, ScalesPlace, lay_out_bundle

FORMAT: Literal["pi2-store"] = "pi2-store"
FORMAT_VERSION: Literal[1] = 1
MANIFEST = "manifest.json"
DENSE_FILE = "dense.arrow"
GONE = {"twin": "twin.arrow", "gates": "gates.arrow"}
"""Fields of older manifests that are ignored, and the files that they described."""
ALIGNMENT = 64
"""Bytes; begin of every buffer."""
PAGE = 4096
"""Bytes; begin of the bundles."""
CHECKED_BYTES = 1 << 20
"""Every so many bytes of a file have a check of their own."""

Order = Literal["hotness", "coactivation", "expert", "index"]
"""Most active first; the same in bands, within which neurons that fire together, or belong to one
expert, are neighbours; or as in the checkpoint."""
Offset = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def check_store_path(text: str) -> str:
    """Return ``text`` if it is a plain path inside a store; else `ValueError`."""
    path = PurePosixPath(text)
    safe = not path.is_absolute() and ".." not in path.parts and "\\" not in text
    if not safe or str(path) != text or "\0" in text or text in ("", ".", MANIFEST):
        raise ValueError(f"the file {text!r} is not a plain path inside the store")
    return text


StorePath = Annotated[str, StringConstraints(max_length=500), AfterValidator(check_store_path)]


def name_layer_file(layer: int) -> str:
    """Path of a layer's neurons inside the store, for example ``layers/ffn-003.arrow``."""
    return f"layers/ffn-{layer:03d}.arrow"


def name_scales_file(layer: int) -> str:
    """Path of a layer's scales inside a store whose bundles have none."""
    return f"layers/scales-{layer:03d}.arrow"


class StoredModel(Table):
    """The model that the weights belong to."""

    id: Identifier
    """Short name of the model document."""
    digest: Sha256
    """SHA-256 of the canonical JSON of ``parts``."""
    parts: dict[str, Any]
    """What of the model document decides the weights (`pi2.store.identity`)."""


class StoredPart(Table):
    """First bytes of one vector of a bundle."""

    name: PartName
    """Name of the vector: ``gate``, ``up`` or ``down``."""
    weights_offset: Offset
    """Byte of its first weight."""
    scales_offset: Offset
    """Byte of its first scale; resident ones, in the neuron's row of scales."""


class StoredBundle(Table):
    """Layout of a neuron in its file."""

    hidden: Count
    """Elements of each vector."""
    precision: FfnPrecision
    """Type of the weights."""
    gate_up: BlockFormat | None = None
    """Type of gate and up rows that are as in a GGUF file."""
    stride: Count
    """Bytes from one neuron to the next."""
    used_bytes: Count
    """Bytes of a neuron without its padding."""
    parts: tuple[StoredPart, ...]
    """The vectors of a bundle."""
    biases: tuple[Offset, ...] = ()
    """Bytes of its float32 biases, in the order of the vectors that they belong to."""
    factor_offset: Offset | None = None
    """Byte of the factor of its normalised activation (float32)."""
    expert_offset: Offset | None = None
    """Byte of its expert's number (int32), in an MoE model."""
    scales: ScalesPlace = "inline"
    """Place of the scales: in the bundle, or in a file of their own."""

    @classmethod
    def describe(cls, layout: BundleLayout) -> Self:
        """Describe ``layout``, of neurons themselves."""
        return cls(
            hidden=layout.hidden,
            precision=layout.precision,
            gate_up=None if layout.gate_up == layout.precision else layout.gate_up,
            stride=layout.stride,
            scales=layout.scales,
            **_list_places(layout),
        )

    @model_validator(mode="after")
    def _lies_as_the_layout_says(self) -> Self:
        if self.hidden % 32 or self.stride < self.used_bytes or self.stride % ALIGNMENT:
            raise ValueError(f"a stride of {self.stride} bytes does not fit the bundles")
        if self.gate_up is not None and self.hidden % find_packing(self.gate_up).length_step:
            raise ValueError(f"{self.hidden} elements are no whole blocks of {self.gate_up}")
        if any(getattr(self, key) != own for key, own in _list_places(self.layout).items()):
            raise ValueError("the parts of a bundle do not lie as format version 1 says")
        return self

    @property
    def layout(self) -> BundleLayout:
        return lay_out_bundle(
            self.hidden,
            self.precision,
            self.stride,
            gated=len(self.parts) == 3,
            bias=bool(self.biases),
            factor=self.factor_offset is not None,
            mixed=self.expert_offset is not None,
            scales=self.scales,
            gate_up=self.gate_up,
        )


def _list_places(layout: BundleLayout) -> dict[str, Any]:
    """Fields of `StoredBundle` that follow from the others."""
    parts = (
        StoredPart(
            name=part.name, weights_offset=part.weights_offset, scales_offset=part.scales_offset
        )
        for part in layout.parts
    )
    return {
        "used_bytes": layout.used_bytes,
        "parts": tuple(parts),
        "biases": tuple(bias.offset for bias in layout.biases),
        "factor_offset": layout.factor_offset,
        "expert_offset": layout.expert_offset,
    }


class StoredPredictor(Table):
    """Low-rank predictors in the store."""

    rank: tuple[Count, ...]
    """Rank by layer."""


class StoredFile(Table):
    path: StorePath
    """Path of the file inside the store, with ``/``."""
    bytes: Offset
    """Size of the file in bytes."""
    sha256: Sha256
    """Hash of its contents."""
    rows: Count | None = None
    """Neurons of a layer's file, tensors of the dense file."""
    bundles_offset: Offset | None = None
    """Byte at which bundle 0 begins, a multiple of 4096."""
    neurons_offset: Offset | None = None
    """Byte at which the original indices begin (int32)."""
    checks_offset: Offset | None = None
    """Byte at which the CRC-32 of every bundle begins (uint32, of all ``stride`` bytes)."""
    scales_offset: Offset | None = None
    """Byte at which the scales of neuron 0 begin, in a file of scales."""
    checks: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] | None = None
    """CRC-32 of every MiB of a file that is read as a whole; older stores have none."""


class Column(NamedTuple):
    """A column of a file of neurons."""

    name: str
    key: str
    """Names its offset in `StoredFile`."""
    row_bytes: int
    alignment: int


class StoredTensor(Table):
    """A dense tensor and its place in ``dense.arrow``."""

    name: str
    """Name of the tensor (`pi2.model.tensors`)."""
    precision: StoredPrecision
    """Type of its elements."""
    rows: Count
    """Vectors."""
    length: Count
    """Elements of a vector."""
    weights_offset: Offset
    """Byte of its first weight, a multiple of 64."""
    scales_offset: Offset
    """Byte of its first scale, a multiple of 64."""

    @property
    def dense(self) -> DenseTensor:
        """The tensor's name, type and sizes, without its place in the file."""
        return DenseTensor(
            name=self.name, precision=self.precision, rows=self.rows, length=self.length
        )

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First byte and number of bytes of the weights, and of the scales."""
        offsets = (self.weights_offset, self.scales_offset)
        return list(zip(offsets, self.dense.count_bytes(), strict=True))


class Manifest(Table):
    """``manifest.json``, format version 1."""

    format: Literal["pi2-store"]
    """Says what the file is."""
    format_version: Literal[1]
    """Version of the store's format."""
    created_by: str
    """Program that wrote it."""
    model: StoredModel
    """The model that the weights belong to."""
    synthetic: bool
    """Whether the weights are random, for measuring only."""
    order: Order
    """Order of neurons in a file."""
    bundle: StoredBundle
    """Neuron bundles."""
    predictor: StoredPredictor | None
    """Activation predictors, if any."""
    files: tuple[StoredFile, ...]
    """Every file but the manifest."""
    tensors: tuple[StoredTensor, ...]
    """Dense tensors."""

    def dump(self) -> dict[str, Any]:
        """Return the values of the file, which has no key for blocks if it has none."""
        absent = {"bundle": {"gate_up"}} if self.bundle.gate_up is None else None
        return self.model_dump(mode="json", exclude=absent)

    def find_file(self, path: str) -> StoredFile | None:
        return next((entry for entry in self.files if entry.path == path), None)

    def describe_model(self) -> Model:
        """The model document, as far as it decides the store's contents."""
        document = {"schema_version": 2, "id": self.model.id, **self.model.parts}
        return Model.model_validate_json(json.dumps(document))

    @property
    def layers(self) -> int:
        return sum(entry.bundles_offset is not None for entry in self.files)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if hash_json(self.model.parts) != self.model.digest:
            raise ValueError("the model's digest does not belong to its parts")
        for entry in self.files:
            pieces = -(-entry.bytes // CHECKED_BYTES)
            if entry.checks is not None and len(entry.checks) != pieces:
                raise ValueError(f"{entry.path} has {len(entry.checks)} checks, not {pieces}")
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a file is listed twice")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError("a tensor is listed twice")
        neurons = self._check_model()
        for path, columns in self.list_columns():
            self._check_columns(path, columns, neurons)
        dense = self.find_file(DENSE_FILE)
        if dense is None:
            raise ValueError(f"{DENSE_FILE} is not listed")
        for tensor in self.tensors:
            _check_tensor(tensor, dense.bytes)
        return self

    def _check_model(self) -> int:
        """Layers, bundles and tensors must match the model that the manifest describes; returns the
        neurons of a layer."""
        model = self.describe_model()
        if self.layers != model.shape.layers:
            raise ValueError(f"{self.layers} layer files for {model.shape.layers} layers")
        own, formats = self.bundle, model.quantization
        wanted = (model.stored_neuron_width, formats.ffn, formats.gate_up)
        if (own.hidden, own.precision, own.gate_up) != wanted:
            raise ValueError("the bundles do not fit the model's shape or precision")
        ranks = None if self.predictor is None else self.predictor.rank
        if ranks is not None and len(ranks) != model.shape.layers:
            raise ValueError(f"{len(ranks)} predictors for {model.shape.layers} layers")
        if [tensor.dense for tensor in self.tensors] != list_tensors(model, ranks):
            raise ValueError("the tensors are not the model's")
        return model.layer_neurons

    def list_columns(self) -> Iterator[tuple[str, tuple[Column, ...]]]:
        """Paths of all files of neurons, and what each must have."""
        scales = Column("scales", "scales_offset", self.bundle.layout.scales_stride, ALIGNMENT)
        neurons = (
            Column("bundle", "bundles_offset", self.bundle.stride, PAGE),
            Column("neuron", "neurons_offset", 4, 4),
            Column("check", "checks_offset", 4, 4),
        )
        for layer in range(self.layers):
            yield name_layer_file(layer), neurons
            if self.bundle.scales == "resident":
                yield name_scales_file(layer), (scales,)

    def _check_columns(self, path: str, columns: tuple[Column, ...], neurons: int) -> None:
        entry = self.find_file(path)
        if entry is None or entry.rows != neurons:
            raise ValueError(f"{path} is not listed with {neurons} neurons")
        for column in columns:
            offset: int | None = getattr(entry, column.key)
            if offset is None:
                raise ValueError(f"{path} has no {column.key}")
            if offset % column.alignment or offset + neurons * column.row_bytes > entry.bytes:
                raise ValueError(f"{path} is too short for its contents, or they are misplaced")


def _check_tensor(tensor: StoredTensor, file_bytes: int) -> None:
    if tensor.length % GROUP and not tensor.dense.packing.is_float32:
        raise ValueError(f"tensor {tensor.name!r}: its length is not a multiple of 32")
    for offset, size in tensor.ranges:
        if offset % ALIGNMENT or offset + size > file_bytes:
            raise ValueError(f"tensor {tensor.name!r} does not lie inside {DENSE_FILE}")


def read_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json``; `UserError` P501-P504 and P508 name the store's fault."""
    file = folder / MANIFEST
    try:
        if not folder.exists():
            raise UserError.of(
                "P501",
                f"there is no neuron store at {os.path.normpath(folder)}",
                help=f"make it: `pi2 convert CHECKPOINT -o {os.path.normpath(folder)}`",
            )
        if not folder.is_dir():
            raise UserError.of("P501", f"{folder} is not a folder, so not a neuron store")
        if not file.is_file():
            raise UserError.of(
                "P502",
                f"{folder} has no {MANIFEST}: it is not a neuron store, or not a finished one",
                help="make the store again with `pi2 convert`",
            )
        content = read_regular(file)
    except OSError as error:
        raise UserError.of("P508", f"cannot read {file}: {error.strerror}") from None
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        raise _invalid(file, ["it is not JSON"]) from None
    return parse_manifest(fields, file)


def parse_manifest(fields: Any, file: Path) -> Manifest:
    """Check the parsed JSON ``fields`` of ``file``; `UserError` P503 or P504."""
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise _invalid(file, [f'its "format" is not "{FORMAT}"'])
    version = fields.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UserError.of(
            "P504",
            f"the store has format version {version}, this pi2 reads version {FORMAT_VERSION}",
            help="use a newer pi2, or convert the model again with this one",
            file=str(file),
        )
    files = fields.get("files")
    if isinstance(files, list) and fields.keys() & GONE.keys():
        kept = [
            item
            for item in files
            if not (isinstance(item, dict) and item.get("path") in GONE.values())
        ]
        fields = {key: value for key, value in fields.items() if key not in GONE} | {"files": kept}
    try:
        # JSON mode: arrays become tuples although the models are strict.
        return Manifest.model_validate_json(json.dumps(fields))
    except (ValidationError, ValueError, RecursionError) as error:
        raise _invalid(file, _list_problems(error)) from None


def _list_problems(error: Exception) -> list[str]:
    if not isinstance(error, ValidationError):
        return [str(error)]
    problems = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(step) for step in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        problems.append(f"{place}: {message}" if place else message)
    return problems


def _invalid(file: Path, problems: list[str]) -> UserError:
    span = Span(str(file), 1, 1, 1, 1)
    shown = problems[:10]
    return UserError(
        [
            Diagnostic(
                code="P503",
                message=f"the store's manifest is damaged: {problem}",
                help="make the store again with `pi2 convert`" if problem == shown[-1] else None,
                span=span,
            )
            for problem in shown
        ],
        exit_code=2,
    )
