"""What all ranks declare together, and what each is told: they say the same of whatever a rank holds."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.errors import SaveError
from ckptspec.format import declaration
from ckptspec.format.box import Box
from ckptspec.format.declaration import Declaration
from ckptspec.format.layout import Axis, BoxesLayout, LocalLayout, Mesh, MeshLayout
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.merging import Group, Merger
from ckptspec.format.placement import resolve
from ckptspec.format.settling import Settled, answer_of, settle

WORLD = 6
MESHES = {
    "world": Mesh((Axis("rank", WORLD, "data"),)),
    "grid": Mesh((Axis("dp", 3, "data"), Axis("tp", 2, "tensor"))),
}
LAYOUTS = {
    "replicated": MeshLayout("world"),
    "rows": MeshLayout("grid", (("tp",),)),
    "local": LocalLayout(),
}
Holders = Mapping[str, tuple[str, frozenset[int]]]  # by name: how it is held, and by whom
ROWS = [frozenset({0, 1}), frozenset({2, 3}), frozenset({0, 1, 4, 5}), frozenset(range(6))]  # whole rows of the grid


def box_of(rank: int) -> Box:
    """Two ranks each hold a third of six rows."""
    return Box((rank // 2 * 2,), (2,))


def declared(rank: int, holders: Holders) -> Declaration:
    """What a rank declares that holds these names."""
    tensors, objects, layouts = {}, {}, dict(LAYOUTS)
    for name, (kind, ranks) in holders.items():
        if rank not in ranks:
            continue
        if kind == "object":
            objects[name] = "same"
        elif kind == "boxes":
            layouts[f"boxes:{name}"] = BoxesLayout(((rank, box_of(rank)),))
            tensors[name] = TensorEntry("float32", (6,), f"boxes:{name}")
        else:
            tensors[name] = TensorEntry("float32", None if kind == "local" else (6,), kind)
    return Declaration(MESHES, layouts, tensors, objects)


def merged(declarations: Mapping[int, Declaration], *, whole: bool = False) -> tuple[Settled, dict[int, Settled]]:
    """Return what the coordinator has, and what each rank has, as after the round between them."""
    bodies = {rank: declaration.body(d, rank) for rank, d in declarations.items()}
    ranks: dict[str, list[int]] = {}
    for rank, body in bodies.items():
        ranks.setdefault(body.digest, []).append(rank)
    pieces = {}
    for body in bodies.values():
        pieces.update({d: declaration.decode(data) for d, data in zip(body.digests, body.encoded, strict=True)})
    groups = [Group(d, bodies[r[0]].digests, tuple(r), {i: bodies[i].boxes for i in r}) for d, r in ranks.items()]
    merger = Merger(groups, pieces, len(declarations))
    if whole:
        merger.check_whole()
    out = {}
    for group in groups:
        for boxes, answer in merger.answers(group):
            plain = json.loads(json.dumps(answer.plain()))
            for rank in group.ranks:
                if bodies[rank].boxes == boxes:
                    out[rank] = settle(bodies[rank], len(declarations), answer_of(plain))
    return merger.settled(declarations[0]), out


@st.composite
def worlds(draw: st.DrawFn) -> Holders:
    found = {}
    for name in draw(st.lists(st.sampled_from([f"{a}.{i}" for a in "abc" for i in range(3)]), unique=True)):
        kind = draw(st.sampled_from(["replicated", "rows", "local", "boxes", "object"]))
        anyone = st.frozensets(st.integers(0, WORLD - 1), min_size=1)
        ranks = draw({"rows": st.sampled_from(ROWS), "boxes": st.just(ROWS[-1])}.get(kind, anyone))
        found[name] = kind, ranks
    return found


@given(worlds())
def test_a_rank_is_told_what_the_coordinator_knows_of_what_it_holds(holders: Holders) -> None:
    all_settled, by_rank = merged({rank: declared(rank, holders) for rank in range(WORLD)})
    whole = all_settled.declaration
    assert whole.tensors.keys() | whole.objects.keys() == holders.keys()
    assert whole.layouts.keys() == {t.layout for t in whole.tensors.values()}
    for rank, settled in by_rank.items():
        own = settled.declaration
        assert own.tensors == {n: t for n, t in whole.tensors.items() if rank in holders[n][1]}
        for name, entry in own.tensors.items():
            if holders[name][0] == "local":
                continue
            ours, theirs = (resolve(d.layouts[entry.layout], d.meshes) for d in (own, whole))
            assert ours.boxes((6,), rank) == theirs.boxes((6,), rank) != ()
            for box in ours.boxes((6,), rank):
                assert ours.group(rank, box) == theirs.group(rank, box)
            assert set(theirs.ranks()) == holders[name][1]
        keys = dict(settled.holders)
        assert keys.keys() == own.objects.keys()
        for name, key in keys.items():
            told = {s.holders[name] for r, s in by_rank.items() if r in holders[name][1]}
            assert told == {key}
            assert (key == "") == (len(holders[name][1]) == WORLD)
    assert all_settled.holders == by_rank[0].holders


def test_names_keep_the_order_of_rank_0() -> None:
    names, everyone = ["z.1", "a", "z.0", "b.2"], frozenset(range(WORLD))
    declarations = {r: declared(r, dict.fromkeys(names, ("replicated", everyone))) for r in range(WORLD)}
    declarations[1] = declared(1, dict.fromkeys(["new", *reversed(names)], ("replicated", everyone)))
    settled, _ = merged(declarations)
    assert list(settled.declaration.tensors) == [*names, "new"]


@pytest.mark.parametrize(
    ("lacks", "brings", "refused"),
    [(("b",), (), True), ((), (), False), (("b",), ("own",), False), (("a", "b"), (), True)],
)
def test_a_rank_that_only_lacks_something_is_refused(
    lacks: tuple[str, ...], brings: tuple[str, ...], refused: bool
) -> None:
    everyone = frozenset(range(WORLD))
    holders = {n: ("replicated", everyone - {4} if n in lacks else everyone) for n in ("a", "b")}
    holders.update({n: ("replicated", frozenset({4})) for n in brings})
    declarations = {rank: declared(rank, holders) for rank in range(WORLD)}
    if refused:
        with pytest.raises(SaveError, match=f"rank 4 does not hold tensor '{lacks[0]}'") as e:
            merged(declarations, whole=True)
        assert (e.value.rank, e.value.rule) == (4, "P-DECLARE")
    else:
        merged(declarations, whole=True)
    merged(declarations)  # plain="held" takes both
