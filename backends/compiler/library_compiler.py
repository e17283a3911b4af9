"""Compiles in a process of its own, which loads no more of TVM than a library needs."""

import gc
import os
import sys
from types import ModuleType

from pi2.backends.compiler.signature import LIBRARY


def leave_parts_out() -> None:
    """Let TVM be imported without what functions for processors do not need."""
    os.environ["TVM_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # TVM goes on where this import fails, and it does without libtvm_runtime_extra.so.
    sys.modules["tvm.runtime.disco"] = None  # type: ignore[assignment]
    # TVM imports it last, and nothing else that is imported asks for it.
    sys.modules["tvm.relax"] = ModuleType("tvm.relax")


if __name__ == "__main__":
    # Files of other units need the rest.
    if sys.argv[3].endswith(LIBRARY):
        leave_parts_out()
    # Imported modules stay: looking for garbage in them takes a quarter of the imports' time.
    gc.disable()
    from pi2.backends.compiler.compile import main

    gc.collect()
    gc.freeze()
    gc.enable()
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # The compiler library's clean-up at exit takes time and serves nothing.
    os._exit(status)
