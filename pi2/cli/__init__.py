"""The command line."""

from __future__ import annotations

import os

from pi2.cli.garbage import put_off_collection

put_off_collection()
# pydantic would look through all installed packages for plugins, 0.03 s.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
