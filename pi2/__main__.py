"""``python -m pi2`` is ``pi2``."""

from pi2.cli.main import main

main()
