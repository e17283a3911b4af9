"""What the code of the host loops depends on, besides its sources."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The loops are scalar code: any machine of this one's architecture and system runs them."""

    program: ClassVar[str] = "pi2.backends.host.program"
    architecture: str = field(default_factory=platform.machine)
    system: str = field(default_factory=platform.system)

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
