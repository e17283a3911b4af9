"""What changed from one version of the plan language to the next.

A step works on the tables of a document, plain ones or those of tomlkit, and is used both where an
old document is read and where `pi2 migrate` rewrites it.  Keys that were only renamed stand in
`pi2.plan.reading.deprecations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeGuard

from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.plan.toml.source import Kind

Step = Callable[[MutableMapping[str, Any], Kind], None]
"""Changes a document of one version into one of the next, but for ``schema_version``."""


def divide_layers(document: MutableMapping[str, Any], kind: Kind) -> None:
    """Version 2: ``layers.split`` divides each layer between units that compute at the same time,
    and ``decode.phases`` is called ``decode.passes``.  Every other key means what it meant."""
    del document, kind


STEPS: Mapping[int, Step] = {1: divide_layers}
"""Steps by the version that they begin with."""


def is_old(version: object) -> TypeGuard[int]:
    """Whether ``schema_version`` is that of a version before this one."""
    return type(version) is int and 1 <= version < SCHEMA_VERSION
