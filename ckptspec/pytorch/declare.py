"""Owns what a walked state declares to the other ranks, and hands the engine; refuses groups that do not add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.format import objects
from ckptspec.format.box import Box
from ckptspec.format.declaration import Declaration
from ckptspec.format.manifest import FlatGroup, Member
from ckptspec.format.names import name_fault
from ckptspec.format.pause import collector_paused
from ckptspec.pytorch.capture import LOCAL
from ckptspec.pytorch.record import Capture
from ckptspec.pytorch.values import encode_value, refuse


def flat_groups(capture: Capture) -> dict[str, FlatGroup]:
    """Return the flat groups of a walked state; raises StateError where tensors of one group differ in geometry."""
    out = {}
    for group, shards in capture.groups.items():
        name, first = shards[0]
        if fault := name_fault(group):
            raise refuse(name, f"group name: {fault}", rule="N-NAME")
        members = next((s.members for _, s in shards if s.members), ())
        for other, shard in shards[1:]:
            same = (shard.offset, shard.numel, shard.ranks, shard.bounds, len(shard.tensor))
            if same != (first.offset, first.numel, first.ranks, first.bounds, len(first.tensor)) or (
                shard.members and shard.members != members
            ):
                raise refuse(other, f"differs in geometry from {name!r}, of the same group {group!r}")
        last = [n.rsplit("/", 1)[-1] for n, _ in shards]
        keys = last if len(set(last)) == len(last) else [n for n, _ in shards]
        tensors = dict(zip(keys, (n for n, _ in shards), strict=True))
        out[group] = FlatGroup(first.numel, tuple(_members(members, first.numel, name)), tensors)
    return out


def _members(members: Any, numel: int, name: str) -> Iterator[Member]:
    """Yield the members; raises StateError [G-TILE] where they do not tile the buffer."""
    end = 0
    for m in members:
        of = m.get("of")
        shape = tuple(map(int, m["shape"]))
        if m["offset"] != end:
            raise refuse(name, "members must tile the buffer", rule="G-TILE", expected=f"offset {end}", found=repr(m))
        yield Member(
            m["name"],
            int(m["offset"]),
            shape,
            tuple(map(int, of["shape"])) if of else None,
            tuple(map(int, of["offsets"])) if of else None,
        )
        end += Box.whole(shape).numel
    if members and end != numel:
        raise refuse(name, "members must tile the buffer", rule="G-TILE", expected=str(numel), found=str(end))


def object_kinds(capture: Capture, names: Mapping[str, bytes]) -> dict[str, str]:
    """Return for each object `rank` where it, or anything in or around it, is Local, else `same`."""
    if capture.plain == LOCAL or "" in capture.private:
        return dict.fromkeys(names, "rank")
    inside = {p[:i] for p in capture.private for i in range(len(p)) if p[i] == "/"} | capture.private

    def private(name: str) -> bool:
        return name in inside or any(name[:i] in capture.private for i in range(len(name)) if name[i] == "/")

    return {name: "rank" if private(name) else "same" for name in names}


def snapshot(capture: Capture) -> Snapshot:
    """Return what the engine saves of a walked state: declaration, packed state tree, holdings and object bytes."""
    with collector_paused():
        return _snapshot(capture)


def _snapshot(capture: Capture) -> Snapshot:
    packed = objects.objects(capture.tree, encode=encode_value)
    for name in packed.keys() & capture.walked:
        raise refuse(name, "two keys have one name", rule="P-NAME")
    declaration = Declaration(
        capture.meshes,
        capture.layouts,
        {n: leaf.entry for n, leaf in capture.leaves.items()},
        object_kinds(capture, packed),
        flat_groups(capture),
        capture.aliases,
        capture.omitted,
    )
    state = objects.pack(capture.tree, encode=encode_value)
    holdings = {n: leaf.holding for n, leaf in capture.leaves.items()}
    local = {n: tuple(leaf.tensor.shape) for n, leaf in capture.leaves.items() if leaf.entry.shape is None}
    boxes = {n: leaf.boxes for n, leaf in capture.leaves.items()}
    tied = tuple(sorted(capture.walked & {*capture.ties, *capture.ties.values()}))
    return Snapshot(declaration, state, holdings, boxes, local, packed, capture.ties, tied)
