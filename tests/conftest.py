"""What all tests share: how hypothesis draws, and quiet third parties."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# No deadline: other work on the machine makes single examples slow.  CI draws the same examples
# every time, so that a change is to blame for a failure.
settings.register_profile("local", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell starts what runs in its background with SIGINT ignored, and programs that tests start and
# interrupt would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
