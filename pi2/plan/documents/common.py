"""What the three kinds of documents have in common."""

import hashlib
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeGuard,
    Union,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

MAX_COMPARED = 200
"""Names that a misspelt one is compared with: documents have fewer, hostile files may not."""


def strip_annotation(annotation: Any) -> Any:
    """The type itself, without ``Annotated`` and without ``| None``."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, types.UnionType):
            options = [item for item in get_args(annotation) if item is not type(None)]
            if len(options) != 1:
                return annotation
            annotation = options[0]
        else:
            return annotation


def is_table(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Whether a type is a table with known keys."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def find_type(root: type[BaseModel], path: Sequence[str | int]) -> Any:
    """Type of the value at ``path`` below ``root``; None where the models have no such path."""
    current: Any = root
    for part in path:
        current = strip_annotation(current)
        origin = get_origin(current)
        if is_table(current):
            field = current.model_fields.get(str(part))
            if field is None:
                return None
            current = field.annotation
        elif origin is dict:
            current = get_args(current)[1]
        elif origin is tuple and isinstance(part, int):
            current = get_args(current)[0]
        else:
            return None
    return strip_annotation(current)


def list_known_keys(root: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Names of the keys that the table at ``path`` may have; empty where any key may stand."""
    found = find_type(root, path)
    return list(found.model_fields) if is_table(found) else []


def find_field(root: type[BaseModel], path: Sequence[str | int]) -> "FieldInfo | None":
    """What the table around the key at ``path`` says of it; None for entries and users' names."""
    table = find_type(root, path[:-1])
    return table.model_fields.get(str(path[-1])) if is_table(table) else None


def suggest(word: str, known: Iterable[str]) -> str | None:
    """The known name nearest to ``word``, if one is near."""
    names = {name.lower(): name for name in islice(known, MAX_COMPARED)}
    cutoff = 0.6 if len(word) > 3 else 0.7  # two letters of three are no likeness: cpu, gpu
    letters = sorted(word.lower())
    turned = [name for name in names if sorted(name) == letters]  # hto, hot
    from difflib import get_close_matches

    near = turned or get_close_matches(word.lower(), list(names), n=1, cutoff=cutoff)
    return names[near[0]] if near else None


SCHEMA_VERSION = 3
"""The plan language's newest version."""

Identifier = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64),
    Field(examples=["cpu"]),
]
"""A short name: lower-case letters, digits, ``.``, ``_`` and ``-``."""

FilePath = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", min_length=1, max_length=500)]
"""A path or a name of something in files; one with a NUL character can be no file's."""

Reference = Annotated[FilePath, Field(examples=["host", "../my.device.toml"])]
"""A relative path, or the short name of a shipped document."""

Share = Annotated[float, Field(ge=0.0, le=1.0, examples=[0.25])]
"""A part of a whole, from 0 to 1."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1, examples=[4])]
"""A whole number, one or more."""

LayerNumber = Annotated[int, Field(ge=0, le=1023, examples=[0])]
"""A layer, the first being 0."""


class Table(BaseModel):
    """A TOML table with known keys: frozen, strict, nothing unknown."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        defer_build=True,  # one validator per kind of document, not one per table
    )

    @classmethod
    def default(cls) -> Self:
        """All defaults, made without building the table's own validator."""
        return cls.model_construct()


COMPOSITION = ("extends", "inherit", "remove")
"""Keys of documents that are put together from several; a composed document has none of them."""


class Document(Table):
    """The keys that every document starts with."""

    VERSION: ClassVar[int] = 2
    """The version in which documents of this kind changed last: those before are old."""
    schema_version: Literal[2, 3]
    """Version of the plan language that the file is written in."""
    name: str = Field(default="", max_length=120, examples=["Demo"])
    """Display name."""
    description: str = Field(default="", max_length=4000, examples=["The demo model here."])
    """One or two sentences for the reader."""
    extends: tuple[str, ...] = Field(default=(), exclude=True, examples=[["base.plan.toml"]])
    """Documents of the same kind that this one extends, weakest first: relative paths that end
    in `.toml`, short names, or locked references. Tables merge, other values are replaced,
    arrays of tables that have an `id` merge by it."""
    inherit: dict[str, Any] = Field(
        default={}, exclude=True, examples=[{"layers": {"overrides": "append"}}]
    )
    """Inherited arrays that this document adds to instead of replacing, by key: `append` or
    `prepend`, such as `inherit.layers.overrides = "append"`."""
    remove: tuple[str, ...] = Field(default=(), exclude=True, examples=[["units.npu"]])
    """Inherited keys to remove before the document's own are merged."""


Provenance = Literal["measured", "vendor-claimed", "published", "estimated"]
"""How a figure came to be known."""


class Origin(Table):
    """The origin of a figure."""

    status: Provenance
    """``measured`` (on the device), ``vendor-claimed``, ``published`` or ``estimated``."""
    source: str = Field(min_length=1, max_length=500, examples=["PowerInfer-2, section 2.3.2"])
    """The tool, page or paper that states it."""
    samples: Count | None = None
    """Number of measurements behind a measured figure."""
    spread: float | None = Field(default=None, ge=0.0, examples=[0.02])
    """Standard deviation of the measurements relative to their mean."""


class Sampling(Table):
    """How a token is drawn, unless a run says otherwise.

    In this order: penalties, DRY, temperature, top-k, top-p, min-p. For keys that a plan does not
    state, chats and servers take the values of the model's authors. Without these they have
    temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05; `pi2 run --prompt` is greedy."""

    temperature: Annotated[float, Field(ge=0.0, le=100.0, examples=[0.7])] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1, examples=[40])] = 0
    """Sample from the k most likely tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0, examples=[0.9])] = 1.0
    """Sample from the smallest set of tokens with at least this total probability."""
    min_p: Share = 0.0
    """Sample from tokens with at least this fraction of the top probability."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, examples=[1.1])] = 1.0
    """Penalty for tokens that were already used: divides their positive logits, multiplies
    negative ones."""
    presence_penalty: Annotated[float, Field(ge=-100.0, le=100.0, examples=[0.5])] = 0.0
    """Subtracted from the logits of generated tokens."""
    frequency_penalty: Annotated[float, Field(ge=-100.0, le=100.0, examples=[0.5])] = 0.0
    """Subtracted from the logits of generated tokens for each time that they came."""
    penalty_window: Annotated[int, Field(ge=-1, le=2**31 - 1, examples=[64])] = -1
    """Number of last tokens that the three penalties count; -1 for all."""
    dry_multiplier: Annotated[float, Field(ge=0.0, le=100.0, examples=[0.8])] = 0.0
    """Strength of DRY, a penalty for tokens that would continue a repeated sequence; 0 is off."""
    dry_base: Annotated[float, Field(ge=1.0, le=100.0, examples=[1.75])] = 1.75
    """Factor of DRY's penalty for each further token of a repeated sequence."""
    dry_allowed_length: Annotated[int, Field(ge=1, le=2**31 - 1, examples=[2])] = 2
    """Tokens of a repeated sequence from which DRY counts."""
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1, examples=[512])] = -1
    """Number of last tokens in which DRY looks for repeated sequences; -1 for all."""
    dry_sequence_breakers: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=40)], ...],
        Field(max_length=64, examples=[["\n"]]),
    ] = ("\n", ":", '"', "*")
    """Texts at which a sequence begins anew for DRY: a token that has one ends it."""
    end_repeats: Annotated[bool, Field(examples=[False])] | None = None
    """Whether an answer ends that only repeats: 20 tokens or fewer for 160 tokens, or up to 64
    tokens eight times. Absent means in chats and servers only."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, examples=[1])] | None = None
    """Random seed; absent means a new one for every run."""


_FIRST = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
CHAT = Sampling.model_construct(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, end_repeats=True)
"""How answers of chats and servers are drawn where neither plan nor model says it."""
_LATER: dict[str, dict[str, Any]] = {
    "sampling": Sampling.default().model_dump(mode="json", exclude=_FIRST),
    "serve": {"idle": None, "pin": False, "load": "room"},
    "memory": {"pressure": "ignore"},
    "chat": {"system": None, "template": None, "stop": []},
}
"""Keys that plans had no value for at first, with their defaults."""


def choose_chat_sampling(plan: Sampling, model: Sampling | None) -> dict[str, tuple[Any, str]]:
    """Values of answers in chats and servers, each with its origin."""
    origins = [(plan, "the plan"), (CHAT, "pi2's default for chats")]
    if model is not None:
        origins.insert(1, (model, "the model's authors"))
    found = {key: (getattr(plan, key), "default") for key in Sampling.model_fields}
    for stated, origin in reversed(origins):
        found |= {key: (getattr(stated, key), origin) for key in stated.model_fields_set}
    return found


BACKEND_FOLDERS = [Path(__file__).parents[2] / "backends"]
"""The package of backends: each is a folder with a module ``backend``."""


def list_backend_names() -> tuple[str, ...]:
    """Names of all backends, sorted; none of them is imported."""
    found = {path.parent.name for folder in BACKEND_FOLDERS for path in folder.glob("*/backend.py")}
    return tuple(sorted(found))


_COSMETIC = frozenset({"schema_version", "name", "description", "quality", "speed"})
"""Keys that decide nothing that is computed: ``quality`` stands for settings, which count."""


def flatten(tables: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by their dotted keys."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{start}{key}.")
        else:
            yield start + key, value


def hash_json(value: Any) -> str:
    """SHA-256, hexadecimal, of the sorted, compact JSON of plain data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def dump_plain(document: BaseModel) -> dict[str, Any]:
    """All keys, defaults filled in, quantities as exact texts; without cosmetic keys."""
    values: dict[str, Any] = document.model_dump(mode="json")
    for unit in values.get("units", {}).values():
        # Devices without it have the digests that they had before there was such a key.
        if unit.get("emulated") is None:
            unit.pop("emulated", None)
    # The same holds for plans that state none of the later keys.
    for table, later in _LATER.items():
        own = values.get(table) or {}
        for key in [key for key in own if key in later and own[key] == later[key]]:
            del own[key]
    if not values.get("chat"):
        values.pop("chat", None)
    formats = values.get("quantization", {})
    if formats.get("gate_up") is None:
        formats.pop("gate_up", None)
    return {key: value for key, value in values.items() if key not in _COSMETIC}
