"""Owns objects with state_dict and load_state_dict: schedulers, scalers, loaders; calls load_state_dict last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ckptspec.errors import PlanError
from ckptspec.format.layout import MeshLayout
from ckptspec.pytorch.adapters.base import ABSENT, Adapter, Chosen, Context, misfit
from ckptspec.pytorch.adapters.template import Template, plain
from ckptspec.pytorch.pieces import assemble


class ObjectAdapter(Adapter):
    """Any object with the two methods.

    What was saved alone decides the shape of what load_state_dict gets: a loader that has not begun may hold less than
    one that has. Live tensors of the same place are filled in place. It is loaded whole or not at all.
    """

    def __init__(self, value: Any, context: Context) -> None:
        live = value.state_dict()
        self._context = context
        self._partly = False
        super().__init__(value, self._template(live) if context.found is not ABSENT else counted(live))
        self._live = live

    def _template(self, live: Any) -> Any:
        saved = self._context.saved
        assert saved is not None

        def make(name: str, target: str, *what: Any) -> Tensor:
            layout = saved.manifest.layouts[saved.manifest.tensors[target].layout]
            if isinstance(layout, MeshLayout) and any(layout.dims):
                message = "the object has no tensor here whose mesh could take a part of the one saved"
                raise misfit(name, message, rule="R-LAYOUT", advice="give the object its tensors before the load")
            return plain(name, target, *what)

        template = Template(saved, make)
        tree = template.like(self._context.found, live, self._context.name)
        self._partly = template.dropped
        return tree

    def review(self, chosen: Chosen) -> Iterator[PlanError]:
        if self._partly and chosen.names:
            message = "an object is loaded whole or not at all"
            yield misfit(self._context.name, message, advice=f"skip or load all of {self._context.name!r}")

    def restore(self) -> Any:
        self.value.load_state_dict(like(self._live, assemble(self.tree)))
        return self.value


def counted(tree: Any) -> Any:
    """Return a tree with Counters as dicts, which is what can be stored of them."""
    if type(tree) is Counter:
        return dict(tree)
    if type(tree) is dict:
        return {k: counted(v) for k, v in tree.items()}
    return type(tree)(map(counted, tree)) if type(tree) in (list, tuple) else tree


def like(live: Any, tree: Any) -> Any:
    """Return a tree with Counters again where the live one has them."""
    if type(live) is Counter and type(tree) is dict:
        return Counter(tree)
    if type(live) is dict and type(tree) is dict:
        return {k: like(live.get(k), v) for k, v in tree.items()}
    if type(live) in (list, tuple) and type(tree) is type(live) and len(live) == len(tree):
        return type(tree)(map(like, live, tree))
    return tree
