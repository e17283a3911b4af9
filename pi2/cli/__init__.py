"""The command line.

What is set here must be set before the first import of anything large.
"""

from __future__ import annotations

import gc
import os

# Imports make many objects that stay: looking for garbage among them takes a tenth of the time.
gc.set_threshold(100_000, 20, 20)
# pydantic would look through all installed packages for plugins, 0.03 s.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
