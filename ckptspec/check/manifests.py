"""Owns the level `manifest`: every rule one manifest can be held to by itself, beyond what its schema says."""

from __future__ import annotations

from collections.abc import Iterator

from ckptspec.check import contents, worlds
from ckptspec.format.manifest import Manifest
from ckptspec.format.report import Finding

CODES = (*worlds.rule.codes, *worlds.fit_rule.codes, *contents.rule.codes)


def check_manifest(manifest: Manifest) -> Iterator[Finding]:
    """Yield every breach of a manifest-level rule; none means that its ranks, layouts, names and groups add up."""
    yield from worlds.rule.run(manifest)
    yield from worlds.fit_rule.run(worlds.Fitted(manifest, tuple(worlds.misfits(manifest))))
    yield from contents.rule.run(manifest)
