"""Parts of a chunk are read in whole blocks, each block once, verified, and arrive as numpy would slice them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptspec.engine.execute import Source, Transfer, execute
from ckptspec.engine.holding import ArrayHolding
from ckptspec.engine.pool import Pool
from ckptspec.engine.saves.writer import Stored, plan_shard, write_shard
from ckptspec.engine.slabs import LEAST_IN_PLACE, Slab, Wish, slabs
from ckptspec.errors import IntegrityError
from ckptspec.format import shard
from ckptspec.format.box import Box
from ckptspec.format.dtypes import DType, dtype
from ckptspec.planner.views import View
from ckptspec.storage import local

KINDS = {1: "uint8", 2: "int16", 4: "float32", 8: "int64", 16: "complex128"}
numbers = itertools.count()


class Memory(ArrayHolding):
    """An array for one box, that counts how often it was asked for the bytes in place, and what it was given."""

    def __init__(self, box: Box, kind: DType, *, strided: bool = False) -> None:
        sizes = box.sizes if not strided else (*box.sizes, 3)
        whole = np.full(prod(sizes) * kind.itemsize, 0xEE, np.uint8).view(kind.numpy).reshape(sizes)
        self.array = whole[..., 1] if strided else whole
        self.asked = self.scattered = 0
        super().__init__(self.array, box.offsets, kind)

    def view(self, box: Box) -> memoryview | None:
        found = super().view(box)
        self.asked += found is not None
        return found

    def scatter(self, box: Box, data: memoryview, strides: Sequence[int]) -> None:
        self.scattered += box.numel
        super().scatter(box, data, strides)


def part(array: np.ndarray, box: Box, origin: Sequence[int]) -> np.ndarray:
    spans = zip(box.offsets, box.stops, origin, strict=True)
    return array[(*(slice(a - o, b - o) for a, b, o in spans), ...)]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()  # bit by bit: some are no numbers


@st.composite
def parts_of(draw: st.DrawFn, box: Box) -> Box:
    """A box, not empty, inside another."""
    start = [draw(st.integers(0, n - 1)) for n in box.sizes]
    sizes = tuple(draw(st.integers(1, n - a)) for n, a in zip(box.sizes, start, strict=True))
    return Box(tuple(o + a for o, a in zip(box.offsets, start, strict=True)), sizes)


@st.composite
def views_in(draw: st.DrawFn, numel: int) -> View:
    """A run of a chunk of one dimension as a box of any dimensions."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        sizes.append(draw(st.integers(1, max(1, numel // prod(sizes)))))
    box = Box(tuple(draw(st.integers(0, 5)) for _ in sizes), tuple(sizes))
    return View(draw(st.integers(0, numel - box.numel)), box)


@st.composite
def wishes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[View, Box]]:
    """Parts of one chunk: boxes of its own, and for one dimension boxes of views of it."""
    chunk = Box(tuple(draw(st.integers(0, 4)) for _ in shape), shape)
    out = []
    for _ in range(draw(st.integers(1, 4))):
        view = draw(views_in(shape[0])) if len(shape) == 1 and draw(st.booleans()) else View(0, chunk)
        out.append((view, draw(parts_of(view.box))))
    return out


def expected(array: np.ndarray, view: View, box: Box) -> np.ndarray:
    run = array.reshape(-1)[view.start : view.stop].reshape(view.box.sizes)
    return part(run, box, view.box.offsets)


def wanted(array: np.ndarray, several: Sequence[tuple[View, Box]]) -> np.ndarray:
    """Which bytes of the chunk somebody wants."""
    marks = np.zeros(array.size, bool)
    for view, box in several:
        part(marks[view.start : view.stop].reshape(view.box.sizes), box, view.box.offsets)[...] = True
    return np.repeat(marks, array.itemsize)


def gaps(marks: np.ndarray) -> Iterator[tuple[int, int]]:
    """The runs of bytes nobody wants, those before the first and behind the last wanted one too."""
    edges = np.flatnonzero(np.diff(np.concatenate([[True], marks, [True]]).astype(int)))
    yield from (
        itertools.batched(edges.tolist(), 2)
        if hasattr(itertools, "batched")
        else zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    )


def check_reads(reads: Sequence[tuple[int, int]], marks: np.ndarray, itemsize: int, block: int) -> None:
    """Whole blocks, each once (an element that straddles two may cost one a second time), and none in a large gap."""
    times: Counter[int] = Counter()
    for low, high in reads:
        assert 0 <= low < high <= len(marks)
        assert low % block == 0
        assert high % block == 0 or high == len(marks)
        times.update(range(low // block, -(-high // block)))
    again = sum(n - 1 for n in times.values())
    assert again == 0 if block % itemsize == 0 else again < len(reads)
    assert set((np.flatnonzero(marks) // block).tolist()) <= set(times)
    for low, high in gaps(marks):
        if high - low >= 2 * block:
            assert not times.keys() & set(range(-(-low // block), high // block))


def spread(shape: Sequence[int], itemsize: int) -> Any:
    """Values of which every byte differs from that of its neighbours."""
    data = np.arange(prod(shape) * itemsize, dtype=np.uint32) * 2654435761 >> 13
    return data.astype(np.uint8).view(KINDS[itemsize]).reshape(shape)


# ---- the cutting alone -----------------------------------------------------------------------------------------------


def moved(data: memoryview, itemsize: int, slab: Slab) -> None:
    """What the executor does with a slab."""
    read = data[slab.low : slab.high]
    if slab.place is not None:
        slab.place[:] = read
        return
    for view, box, holding in slab.pieces():
        start, stop = (e * itemsize - slab.low for e in view.hull(box))
        assert 0 <= start < stop <= len(read)
        strides = [prod(view.box.sizes[i + 1 :]) for i in range(view.box.ndim)]
        holding.scatter(box, read[start:stop], strides)


@given(st.data())
def test_any_parts_of_any_chunk_arrive_and_each_block_is_read_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), max_size=4)))
    itemsize = data.draw(st.sampled_from(sorted(KINDS)))
    block = data.draw(st.integers(itemsize, 100))
    room = data.draw(st.integers(2 * block, 6 * block))
    array = spread(shape, itemsize)
    several = data.draw(wishes_of(shape))
    kind = dtype(str(array.dtype))
    holdings = [Memory(box, kind, strided=data.draw(st.booleans())) for _, box in several]
    wishes = [Wish(view, box, holding) for (view, box), holding in zip(several, holdings, strict=True)]
    found = list(slabs(wishes, array.nbytes, itemsize, block, room))
    raw = memoryview(array.reshape(-1).view(np.uint8))
    for slab in found:
        assert slab.place is not None or slab.high - slab.low <= room
        moved(raw, itemsize, slab)
    for (view, box), holding in zip(several, holdings, strict=True):
        assert holding.array.tobytes() == expected(array, view, box).tobytes()
    check_reads([(s.low, s.high) for s in found], wanted(array, several), itemsize, block)


@given(st.data())
def test_a_chunk_cut_among_many_is_still_read_once(data: st.DataObject) -> None:
    """Pieces that tile a chunk, as the ranks of another layout want them: all bytes once, in few reads."""
    rows, columns, itemsize = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30)), 4
    block = data.draw(st.sampled_from([4, 16, 64, 256]))
    room = data.draw(st.integers(2, 8)) * block
    array = spread((rows, columns), itemsize)
    at = sorted({0, columns, *data.draw(st.lists(st.integers(1, columns), max_size=5))})
    boxes = [Box((0, a), (rows, b - a)) for a, b in itertools.pairwise(at)]
    holdings = [Memory(box, dtype("float32")) for box in boxes]
    whole = View(0, Box.whole(array.shape))
    wishes = [Wish(whole, box, h) for box, h in zip(boxes, holdings, strict=True)]
    found = list(slabs(data.draw(st.permutations(wishes)), array.nbytes, itemsize, block, room))
    assert sum(s.high - s.low for s in found) == array.nbytes
    assert len(found) <= -(-array.nbytes // room) or any(s.place is not None for s in found)
    for slab in found:
        moved(memoryview(array.reshape(-1).view(np.uint8)), itemsize, slab)
    assert all(h.array.tobytes() == part(array, b, (0, 0)).tobytes() for b, h in zip(boxes, holdings, strict=True))


def test_rows_are_read_in_place_between_two_blocks_that_are_cut() -> None:
    array = spread((100, 8), 4)
    box = Box((3, 0), (90, 8))
    memory = Memory(box, dtype("float32"))
    found = list(slabs([Wish(View(0, Box.whole((100, 8))), box, memory)], array.nbytes, 4, 64, 128))
    assert [(s.low, s.high, s.place is not None) for s in found] == [
        (64, 128, False),
        (128, 2944, True),
        (2944, 3008, False),
    ]
    for slab in found:
        moved(memoryview(array.reshape(-1).view(np.uint8)), 4, slab)
    assert same(memory.array, array[3:93])
    assert memory.scattered * 4 < 128


def test_the_last_block_of_a_chunk_may_be_short_and_is_read_in_place_with_the_others() -> None:
    array = spread((101, 8), 4)
    box = Box((1, 0), (100, 8))
    memory = Memory(box, dtype("float32"))
    found = list(slabs([Wish(View(0, Box.whole((101, 8))), box, memory)], array.nbytes, 4, 64, 128))
    assert [(s.low, s.high, s.place is not None) for s in found] == [(0, 64, False), (64, 3232, True)]
    for slab in found:
        moved(memoryview(array.reshape(-1).view(np.uint8)), 4, slab)
    assert same(memory.array, array[1:])


@given(st.sampled_from(sorted(KINDS)), st.integers(16, 100), st.data())
def test_a_row_of_elements_arrives_whatever_its_blocks_cut(itemsize: int, block: int, data: st.DataObject) -> None:
    array = spread((200 * 16 // itemsize,), itemsize)
    start = data.draw(st.integers(0, 20))
    box = Box((start,), (data.draw(st.integers(len(array) // 2, len(array) - start)),))
    memory = Memory(box, dtype(str(array.dtype)))
    wish = Wish(View(0, Box.whole(array.shape)), box, memory)
    found = list(slabs([wish], array.nbytes, itemsize, block, 2 * block))
    assert any(s.place is not None for s in found) == (block % itemsize == 0)
    for slab in found:
        moved(memoryview(array.view(np.uint8)), itemsize, slab)
    assert same(memory.array, part(array, box, (0,)))
    check_reads([(s.low, s.high) for s in found], wanted(array, [(wish.view, box)]), itemsize, block)


@pytest.mark.parametrize(("rows", "place"), [(2 * LEAST_IN_PLACE, True), (2 * LEAST_IN_PLACE - 1, False)])
def test_few_blocks_are_not_worth_a_read_in_place(rows: int, place: bool) -> None:
    box = Box((0, 0), (rows, 8))
    wish = Wish(View(0, Box.whole((100, 8))), box, Memory(box, dtype("float32")))
    assert any(s.place is not None for s in slabs([wish], 3200, 4, 64, 1 << 19)) is place


def test_memory_that_is_not_in_a_row_gets_nothing_in_place() -> None:
    box = Box((0, 0), (90, 8))
    wish = Wish(View(0, Box.whole((100, 8))), box, Memory(box, dtype("float32"), strided=True))
    assert not any(s.place is not None for s in slabs([wish], 3200, 4, 64, 1 << 19))


# ---- real files ------------------------------------------------------------------------------------------------------


def write(folder: Path, arrays: Sequence[np.ndarray], block: int = 4096) -> Source:
    """Write arrays as the tensors t0, t1, ... of a shard, each one chunk."""
    header = shard.Header("ab" * 16, 7, 0, 1, "xxh3-128", block)
    tensors = []
    for i, array in enumerate(arrays):
        holding = ArrayHolding(array, (0,) * array.ndim, dtype(str(array.dtype)))
        tensors.append(Stored(f"t{i}", str(array.dtype), array.shape, (Box.whole(array.shape),), holding))
    path = folder / f"{next(numbers)}.shard"
    write_shard(str(path), plan_shard(header, tensors, msgpack.packb("state")), pool_for(block))
    data = path.read_bytes()
    trailer = shard.decode_trailer(data[-64:], len(data))
    table = data[trailer.index_offset : trailer.index_offset + trailer.index_nbytes]
    return Source(str(path), path.name, 0, header, shard.decode_index(table, header))


def pool_for(block: int) -> Pool:
    return Pool(budget=max(1 << 20, 4 * block), buffer_nbytes=max(1 << 19, 2 * block), threads=2)


SHAPES = ((300, 1000), (70, 61, 41), (400, 333), (70_000,), (3, 5, 7, 11, 29), (1_300_007,))
LARGE = list(zip(SHAPES, (1, 2, 4, 8, 16, 1), strict=True))


@settings(max_examples=60)
@given(st.data())
def test_parts_of_large_chunks_arrive_in_whole_blocks_read_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape, itemsize = data.draw(st.sampled_from(LARGE))
    block = data.draw(st.sampled_from([64, 100, 4096, 5000, 1 << 16, 1 << 20]))
    array = spread(shape, itemsize)
    source = write(tmp_path_factory.mktemp("slabs"), [array], block)
    chunk = source.index.chunks[0]
    assert chunk.nbytes >= shard.LARGE
    several = []
    for _ in range(data.draw(st.integers(1, 3))):
        ragged = len(shape) == 1 and data.draw(st.booleans())
        view = data.draw(views_in(shape[0])) if ragged else View(0, chunk.box)
        several.append((view, data.draw(parts_of(view.box)), ragged))
    kind = dtype(str(array.dtype))
    holdings = [Memory(box, kind, strided=data.draw(st.booleans())) for _, box, _ in several]
    transfers = [
        Transfer(0, box, memory, view if ragged else None)
        for (view, box, ragged), memory in zip(several, holdings, strict=True)
    ]
    progress: list[int] = []
    with recorded() as read:
        execute([(source, transfers)], pool_for(block), progress.append)
    for (view, box, _), memory in zip(several, holdings, strict=True):
        assert memory.array.tobytes() == expected(array, view, box).tobytes()
    inside = [(low - chunk.start, high - chunk.start) for low, high in read]
    check_reads(inside, wanted(array, [(view, box) for view, box, _ in several]), itemsize, block)
    assert sum(progress) == sum(high - low for low, high in read)


@contextmanager
def recorded() -> Iterator[list[tuple[int, int]]]:
    """The byte ranges that are read from files meanwhile."""
    found: list[tuple[int, int]] = []
    read_at = local.read_at

    def counted(fd: int, view: memoryview, at: int) -> None:
        found.append((at, at + len(view)))
        read_at(fd, view, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "read_at", counted)
        yield found


def flipped(source: Source, at: int) -> None:
    """Flip one bit of a byte of the file."""
    with open(source.path, "r+b") as f:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 0x04]))


@settings(max_examples=40)
@given(st.data())
def test_a_flipped_bit_is_found_wherever_a_wanted_block_has_it_and_nowhere_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape, itemsize = data.draw(st.sampled_from(LARGE))
    block = data.draw(st.sampled_from([64, 1000, 4096, 1 << 16]))
    array = spread(shape, itemsize)
    source = write(tmp_path_factory.mktemp("flip"), [array], block)
    chunk = source.index.chunks[0]
    view = View(0, chunk.box)
    box = data.draw(parts_of(chunk.box))
    if len(shape) == 1 and data.draw(st.booleans()):
        view = data.draw(views_in(shape[0]))
        box = data.draw(parts_of(view.box))
    marks = wanted(array, [(view, box)])
    blocks = np.zeros(-(-len(marks) // block), bool)
    blocks[np.flatnonzero(marks) // block] = True
    far = [(low, high) for low, high in gaps(marks) if high - low >= 2 * block]
    at = data.draw(st.integers(0, len(marks) - 1))
    if data.draw(st.booleans()):
        hit = np.flatnonzero(blocks)
        at = int(hit[data.draw(st.integers(0, len(hit) - 1))]) * block + data.draw(st.integers(0, block - 1))
        at = min(at, len(marks) - 1)
    flipped(source, chunk.start + at)
    memory = Memory(box, dtype(str(array.dtype)))
    transfer = Transfer(0, box, memory, view if view.box != chunk.box else None)
    if blocks[at // block]:
        with pytest.raises(IntegrityError) as caught:
            execute([(source, [transfer])], pool_for(block))
        where = caught.value.where
        assert (caught.value.rule, where.tensor, where.rank, where.file) == ("B-DIGEST", "t0", 0, source.file)
        first = chunk.start + at // block * block
        assert where.range == (first, min(first + block, chunk.start + chunk.nbytes))
    elif any(low <= at // block * block and (at // block + 1) * block <= high for low, high in far):
        execute([(source, [transfer])], pool_for(block))
        assert memory.array.tobytes() == expected(array, view, box).tobytes()


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_range_of_rows_is_read_straight_into_its_memory(ndim: int, tmp_path: Path) -> None:
    array = spread((1000, 256), 4)
    chunk = array.reshape(-1) if ndim == 1 else array
    source = write(tmp_path, [chunk], 4096)
    box, view = Box((101, 0), (700, 256)), View(0, Box.whole((1000, 256))) if ndim == 1 else None
    memory = Memory(box, dtype("float32"))
    with recorded() as read:
        execute([(source, [Transfer(0, box, memory, view)])], pool_for(4096))
    assert same(memory.array, array[101:801])
    assert memory.asked == 1
    assert memory.scattered < 2 * 1024  # no more than the two blocks that are cut went by way of a buffer
    assert sum(high - low for low, high in read) <= 700 * 1024 + 2 * 4096


@pytest.mark.parametrize(("rows", "ndim"), [((0, 1000), 2), ((101, 700), 2), ((101, 700), 1), ((600, 400), 2)])
def test_what_is_read_straight_into_memory_is_verified_to_the_last_block(
    rows: tuple[int, int], ndim: int, tmp_path: Path
) -> None:
    array = spread((1000, 256), 4)
    source = write(tmp_path, [array.reshape(-1) if ndim == 1 else array], 4096)
    chunk = source.index.chunks[0]
    box, view = Box((rows[0], 0), (rows[1], 256)), View(0, Box.whole((1000, 256))) if ndim == 1 else None
    low, high = rows[0] * 1024, sum(rows) * 1024
    for at in (low, low + 4096, (low + high) // 2, high - 4097, high - 1):
        flipped(source, chunk.start + at)
        with pytest.raises(IntegrityError) as caught:
            execute([(source, [Transfer(0, box, Memory(box, dtype("float32")), view)])], pool_for(4096))
        first = chunk.start + at // 4096 * 4096
        assert caught.value.where.range == (first, min(first + 4096, chunk.start + chunk.nbytes))
        flipped(source, chunk.start + at)
    for at in (low // 4096 * 4096 - 1, -(-high // 4096) * 4096):
        if 0 <= at < chunk.nbytes:
            flipped(source, chunk.start + at)
    execute([(source, [Transfer(0, box, Memory(box, dtype("float32")), view)])], pool_for(4096))


def test_a_whole_chunk_is_read_straight_into_its_memory_and_into_two_by_way_of_a_buffer(tmp_path: Path) -> None:
    array = spread((1000, 256), 4)
    source = write(tmp_path, [array], 4096)
    whole = Box.whole(array.shape)
    one = Memory(whole, dtype("float32"))
    execute([(source, [Transfer(0, whole, one)])], pool_for(4096))
    assert (one.asked, one.scattered) == (1, 0)
    both = [Memory(whole, dtype("float32")) for _ in range(2)]
    with recorded() as read:
        execute([(source, [Transfer(0, whole, m) for m in both])], pool_for(4096))
    assert sum(high - low for low, high in read) == array.nbytes
    assert all(same(m.array, array) for m in (one, *both))


def test_parts_of_small_chunks_are_read_with_their_neighbours_and_verified_once(tmp_path: Path) -> None:
    arrays = [spread((n % 7 + 1, 5), (1, 2, 4, 8, 16)[n % 5]) for n in range(500)]
    source = write(tmp_path, arrays, 64)
    transfers, checks = [], []
    for i, array in enumerate(arrays):
        rows = array.shape[0]
        for box in (Box((0, 0), (rows, 2)), Box((0, 2), (rows, 3)), Box((rows - 1, 1), (1, 4))):
            memory = Memory(box, dtype(str(array.dtype)))
            transfers.append(Transfer(i, box, memory))
            checks.append((array, box, memory))
    with recorded() as read:
        execute([(source, transfers)], pool_for(64))
    assert len(read) == 1
    assert all(m.array.tobytes() == part(a, b, (0, 0)).tobytes() for a, b, m in checks)
    victim = source.index.chunks[250]
    flipped(source, victim.start + victim.nbytes - 1)
    with pytest.raises(IntegrityError) as caught:
        execute([(source, transfers)], pool_for(64))
    assert caught.value.where.tensor == "t250"


def test_small_chunks_far_from_each_other_are_not_read_together(tmp_path: Path) -> None:
    arrays = [spread((10,), 4), spread((300_000,), 4), spread((9,), 4), *(spread((50_000,), 4) for _ in range(4))]
    source = write(tmp_path, arrays, 4096)
    ends = [0, 2, 6]
    holdings = {i: Memory(Box.whole(arrays[i].shape), dtype("float32")) for i in ends}
    transfers = [Transfer(i, Box.whole(arrays[i].shape), holdings[i]) for i in ends]
    with recorded() as read:
        execute([(source, transfers)], pool_for(4096))
    assert sorted(read) == [(source.index.chunks[i].start, source.index.extents[i].stop) for i in ends]
    assert all(same(holdings[i].array, arrays[i]) for i in ends)


@given(st.data())
def test_runs_of_small_chunks_seen_as_boxes_of_larger_tensors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    array = spread((data.draw(st.integers(1, 60)),), data.draw(st.sampled_from(sorted(KINDS))))
    source = write(tmp_path_factory.mktemp("runs"), [spread((3,), 1), array], 64)
    several = [v for v in data.draw(st.lists(views_in(len(array)), min_size=1, max_size=4)) if not v.box.empty]
    boxes = [data.draw(parts_of(v.box)) for v in several]
    holdings = [Memory(box, dtype(str(array.dtype))) for box in boxes]
    transfers = [Transfer(1, b, m, v) for v, b, m in zip(several, boxes, holdings, strict=True)]
    execute([(source, transfers)], pool_for(64))
    for v, b, m in zip(several, boxes, holdings, strict=True):
        assert m.array.tobytes() == expected(array, v, b).tobytes()
