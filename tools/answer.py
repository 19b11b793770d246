"""Puts the optional command `answer` of the conformance suite in front of ckptspec, as an example of it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy

from ckptspec.cli.main import main as ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.fetch import Opened, fetch
from ckptspec.engine.holding import ArrayHolding
from ckptspec.engine.pool import shared_pool
from ckptspec.engine.read import read
from ckptspec.errors import PlanError, ShardError
from ckptspec.format import objects, schemas
from ckptspec.format.box import Box, pieces
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import layout_from_document, mesh_from_document
from ckptspec.format.placement import resolve
from ckptspec.format.target import parse
from ckptspec.planner.destination import Destination, destination
from ckptspec.planner.routes import Routes

Answer = dict[str, Any]


def about_object(q: Mapping[str, Any]) -> Answer:
    """Return the bytes that the value in `hex` is written as, or the rule that refuses them."""
    try:
        return {"hex": objects.pack(objects.unpack(bytes.fromhex(q["hex"]), numpy=False)).hex()}
    except ShardError as e:
        return {"refused": e.rule}


def about_placement(q: Mapping[str, Any]) -> Answer:
    """Return what each rank holds and stores of a tensor."""
    layout, itemsize = layout_from_document(q["layout"]), DTYPES[q["dtype"]].itemsize
    mesh = q["mesh"] and mesh_from_document(q["mesh"])
    place = resolve(layout, {q["layout"]["mesh"]: mesh} if mesh else {})
    held, stored = {}, {}
    for rank in range(q["world_size"]):
        boxes = place.boxes(q["shape"], rank)
        kept = place.stored(q["shape"], itemsize, q["name"], q["copies"], rank) if boxes else ()
        held[str(rank)] = [[list(b.offsets), list(b.sizes)] for b in boxes]
        stored[str(rank)] = [[list(p.offsets), list(p.sizes)] for b in kept for p in pieces(b, itemsize)]
    return {"held": held, "stored": stored}


def about_document(q: Mapping[str, Any]) -> Answer:
    """Return the codes of what a schema finds in a file."""
    found = schemas.check(q["schema"], json.loads(Path(q["file"]).read_bytes()))
    return {"codes": sorted({f.code for f in found})}


def about_tensors(q: Mapping[str, Any]) -> Answer:
    """Return dtype, shape and SHA-256 of every tensor; null for a dtype that numpy lacks."""
    _, manifest = load_manifest(q["path"])
    return {"tensors": {name: _tensor(q["path"], name, t.dtype) for name, t in manifest.tensors.items()}}


def _tensor(path: str, name: str, dtype: str) -> Answer | None:
    try:
        array = read(path, [name])[name]
    except PlanError:
        return None
    if isinstance(array, dict):
        return {"dtype": dtype, "ranks": {str(rank): _value(one) for rank, one in array.items()}}
    return {"dtype": dtype, **_value(array)}


def _value(array: Any) -> Answer:
    return {"shape": list(array.shape), "sha256": hashlib.sha256(array.tobytes()).hexdigest()}


def about_reshard(q: Mapping[str, Any]) -> Answer:
    """Return what each rank of a target holds: by tensor its boxes, and the SHA-256 of their bytes in order."""
    folder, manifest = load_manifest(q["path"])
    d = destination(manifest, parse(Path(q["target"]).read_bytes()))
    opened = Opened(folder, manifest)
    return {"ranks": {str(rank): _held(opened, d, rank) for rank in range(d.world_size)}}


def _held(opened: Opened, d: Destination, rank: int) -> Answer:
    held = {}
    for name, t in d.tensors.items():
        boxes = resolve(d.layouts[t.layout], d.meshes).boxes(t.shape or (), rank)
        arrays = [filled(opened, d.routes, name, box) for box in boxes]
        digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
        held[name] = {"boxes": [[list(b.offsets), list(b.sizes)] for b in boxes], "sha256": digest}
    return held


def filled(opened: Opened, routes: Routes, name: str, box: Box) -> Any:
    """Return a box of a wanted tensor as an array of raw elements; what no member of a flat one holds is zero."""
    route = routes.find(name)
    assert route is not None
    kind = DTYPES[route.dtype]
    array = numpy.zeros(box.sizes, numpy.dtype((numpy.void, kind.itemsize)))
    wants = []
    for ask in route.asks(box):
        part, origin = array, box.offsets
        if ask.land is not None:
            start = ask.land.start - box.offsets[0]
            part = array[start : start + ask.land.box.numel].reshape(ask.land.box.sizes)
            origin = ask.land.box.offsets
        wants.append((ask.need, ArrayHolding(part, origin, kind)))
    fetch(opened, wants, shared_pool())
    return array


ABOUT: Mapping[str, Callable[[Mapping[str, Any]], Answer]] = {
    "object": about_object,
    "placement": about_placement,
    "document": about_document,
    "tensors": about_tensors,
    "reshard": about_reshard,
}


def main() -> int:
    """Answer questions from standard input, or pass the arguments on to ckptspec."""
    if sys.argv[1:] != ["answer"]:
        return ckptspec(sys.argv[1:])
    for line in sys.stdin:
        q = json.loads(line)
        print(json.dumps(ABOUT[q["ask"]](q) if q["ask"] in ABOUT else {"unsupported": True}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
