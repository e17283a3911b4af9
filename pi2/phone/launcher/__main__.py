"""Finds the bundle's code and begins: needs Python 3.11 or newer and numpy, nothing else."""

import os
import sys


def main():  # type: ignore[no-untyped-def] # older Pythons read this, too
    if sys.version_info < (3, 11):  # noqa: UP036 - what it is for
        sys.stderr.write("error[P670]: Python 3.11 or newer is needed\n")
        return 2
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.join(here, "packages"))
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        sys.stderr.write("error[P670]: numpy cannot be imported: %s\n" % error)  # noqa: UP031
        sys.stderr.write(
            "   = help: `pkg install python-numpy` in Termux, else `pip install numpy`\n"
        )
        return 2
    from pi2.phone.runtime.command import main as begin

    return begin(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[no-untyped-call]
