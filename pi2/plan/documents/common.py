"""What the three kinds of documents have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

SCHEMA_VERSION = 2

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
"""Keys of documents that are put together from several; what is composed has them no more."""


class Document(Table):
    """The keys that every document starts with."""

    schema_version: Literal[2]
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
    """Where a figure comes from."""

    status: Provenance
    """``measured`` (on the device), ``vendor-claimed``, ``published`` or ``estimated``."""
    source: str = Field(min_length=1, max_length=500, examples=["PowerInfer-2, section 2.3.2"])
    """The tool, page or paper that states it."""
    samples: Count | None = None
    """Number of measurements behind a measured figure."""
    spread: float | None = Field(default=None, ge=0.0, examples=[0.02])
    """Standard deviation of the measurements relative to their mean."""
