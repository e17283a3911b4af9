"""``python -m pi2`` is ``pi2``."""

from __future__ import annotations

from pi2.cli.main import main

main()
