"""Decides what moves where, with pure functions on documents; called, it is the public function `ckptspec.plan`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """This package: importing a module of it makes it the attribute `plan` of ckptspec, by contract a function."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return sys.modules["ckptspec"].__getattr__("plan")(*arguments, **options)


sys.modules[__name__].__class__ = _Package
