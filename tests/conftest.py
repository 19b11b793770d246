"""What every test shares: quiet threads, and hypothesis without a clock on machines that are busy."""

from __future__ import annotations

import os

from hypothesis import settings

# Before anything imports torch: the ranks of a test share the machine's few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("steady", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
