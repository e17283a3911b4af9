"""What documents need of pydantic's core: an error with a text."""

from collections.abc import Mapping
from typing import Any


class PydanticCustomError(ValueError):
    """A value does not fit its type."""

    def __init__(self, kind: str, template: str, context: Mapping[str, Any] | None = None) -> None:
        super().__init__(template.format(**(context or {})))
        self.kind = kind
