"""Owns `python -m ckptspec`, which is the command line."""

from __future__ import annotations

import sys

from ckptspec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
