"""What the engine and a worker of an NPU say to each other; plain Python.

Both see one region of memory.  The engine writes a *hello*, the worker maps the region and answers
with one; then every *message* names a graph and where its operands are, in bytes from the region's
start, and gets one *reply*.  Messages are answered in order; the end of messages ends the worker.
Everything is 32-bit, little-endian, as on the NPU; `dsp/protocol.h` says the same in C.
"""

from __future__ import annotations

import struct

PROTOCOL = 1
"""Version of all that follows."""
MAGIC = 0x4E324950
"""``PI2N``."""

OPERANDS = 28
"""Operands of a message."""
WORDS = 4 + OPERANDS
MESSAGE = struct.Struct(f"<{WORDS}I")
"""`MAGIC`, its number, the graph's number (`NOTHING` asks for a reply alone), how many operands
follow, and the operands."""
NOTHING = 0xFFFFFFFF
HELLO = MESSAGE
"""`MAGIC`, `PROTOCOL`, the file descriptor of the region, its bytes, and the most bytes that graphs
keep while they run, whose place is the last operand of each; the rest is 0."""

REPLY_WORDS = 8
REPLY = struct.Struct(f"<{REPLY_WORDS}I")
"""`MAGIC`, the message's number, 0 or what failed (`FAILURES`), 0, when the work began and when it
ended: seconds and nanoseconds of the monotonic clock each.  The reply to a hello has `PROTOCOL` for
the number, and how many graphs the library has in the fourth place."""

FAILURES = {
    1: "its worker cannot map the memory",
    2: "its worker does not know the graph",
    3: "its worker speaks another version of the protocol",
    4: "the vendor's library reported an error",
}
