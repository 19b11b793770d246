"""The writer and the executor without torch: any boxes, any memory form, small buffers, damage found, budget kept."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.engine.execute import Source, Transfer, execute
from ckptspec.engine.holding import ArrayHolding
from ckptspec.engine.pool import Pool
from ckptspec.engine.saves.writer import Stored, plan_shard, write_shard
from ckptspec.errors import IntegrityError
from ckptspec.format import shard
from ckptspec.format.box import Box
from ckptspec.format.dtypes import dtype

SMALL = Pool(budget=1 << 20, buffer_nbytes=1 << 19, threads=2)
numbers = itertools.count()


def stored(name: str, array: np.ndarray, *boxes: Box) -> Stored:
    holding = ArrayHolding(array, (0,) * array.ndim, dtype(str(array.dtype)))
    return Stored(name, str(array.dtype), array.shape, boxes or (Box.whole(array.shape),), holding)


def write(folder: Path, tensors: list[Stored], *, pool: Pool = SMALL, block_size: int = 4096) -> Source:
    header = shard.Header("ab" * 16, 7, 0, 1, "xxh3-128", block_size)
    plan = plan_shard(header, tensors, msgpack.packb("state"))
    path = folder / f"{next(numbers)}.shard"
    written = write_shard(str(path), plan, pool)
    assert path.stat().st_size == written.nbytes
    data = path.read_bytes()
    trailer = shard.decode_trailer(data[-64:], len(data))
    index_bytes = data[trailer.index_offset : trailer.index_offset + trailer.index_nbytes]
    assert written.index_digest == "sha256:" + hashlib.sha256(index_bytes).hexdigest()
    index = shard.decode_index(index_bytes, header)
    for at, frame in shard.frame(index):
        assert data[at : at + len(frame)] == frame
    return Source(str(path), path.name, 0, header, index)


def spread(shape: tuple[int, ...], kind: str = "float32") -> Any:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)


def test_any_msgpack_library_walks_a_shard_as_a_plain_stream(tmp_path: Path) -> None:
    a, b = spread((300, 400)), spread((5,), "int64")
    source = write(tmp_path, [stored("a", a), stored("b", b)])
    with open(source.path, "rb") as f:
        values = [v for v in msgpack.Unpacker(f, max_buffer_size=1 << 20) if v is not None]
    assert values[0]["format"] == "ckptspec-shard"
    assert values[1:4] == [a.tobytes(), b.tobytes(), msgpack.packb("state")]
    assert list(values[4]) == list(shard.INDEX_KEYS)


@given(st.data())
def test_any_box_of_any_chunk_arrives(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    if data.draw(st.booleans()):
        shape = (*shape, 997)  # above 262,144 bytes now and then: parts and slabs
    array = spread(shape)
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    sizes = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, start, strict=True)]
    box = Box(tuple(start), tuple(sizes))
    source = write(tmp_path_factory.mktemp("s"), [stored("x", spread((3,))), stored("a", array)])
    out = np.zeros(sizes, "float32")
    execute([(source, [Transfer(1, box, ArrayHolding(out, start, dtype("float32")))])], SMALL)
    assert np.array_equal(out, array[tuple(slice(o, o + n) for o, n in zip(start, sizes, strict=True))])


@pytest.mark.parametrize("block_size", [64, 4096, 1 << 16, 1 << 20])
def test_strided_sources_and_destinations_of_any_size(block_size: int, tmp_path: Path) -> None:
    pool = Pool(budget=1 << 23, buffer_nbytes=max(1 << 19, 2 * block_size), threads=2)
    base = spread((700, 900))
    tall, thin = base.T, base[3:650:3, 5:9]
    source = write(
        tmp_path, [stored("tall", tall), stored("thin", thin), stored("all", base)], pool=pool, block_size=block_size
    )
    outs = [np.zeros((700, 900), "float32").T, np.zeros(thin.shape, "float32"), np.zeros((900, 700), "float32").T]
    transfers = [
        Transfer(i, Box.whole(out.shape), ArrayHolding(out, (0, 0), dtype("float32"))) for i, out in enumerate(outs)
    ]
    execute([(source, transfers)], pool)
    for out, expected in zip(outs, (tall, thin, base), strict=True):
        assert np.array_equal(out, expected)


def test_many_small_chunks_are_read_in_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptspec.storage import local

    tensors = [spread((n % 50 + 1,)) for n in range(3000)]
    source = write(tmp_path, [stored(f"t{i}", t) for i, t in enumerate(tensors)])
    outs = [np.zeros_like(t) for t in tensors]
    reads: list[int] = []
    read_at = local.read_at
    monkeypatch.setattr(local, "read_at", lambda fd, view, at: (reads.append(len(view)), read_at(fd, view, at))[1])
    execute(
        [
            (
                source,
                [
                    Transfer(i, Box.whole(t.shape), ArrayHolding(o, (0,), dtype("float32")))
                    for i, (t, o) in enumerate(zip(tensors, outs, strict=True))
                ],
            )
        ],
        SMALL,
    )
    assert all(np.array_equal(o, t) for o, t in zip(outs, tensors, strict=True))
    assert len(reads) <= sum(reads) // (SMALL.buffer_nbytes // 2) + 1


def test_large_boxes_are_cut_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ckptspec.engine.saves.writer as writer

    monkeypatch.setattr(writer, "CHUNK_LIMIT", 1000)
    array = spread((40, 30))
    source = write(tmp_path, [stored("a", array)])
    assert all(c.nbytes <= 1000 for c in source.index.chunks)
    assert sum(c.nbytes for c in source.index.chunks) == array.nbytes
    out = np.zeros_like(array)
    holding = ArrayHolding(out, (0, 0), dtype("float32"))
    execute([(source, [Transfer(i, c.box, holding) for i, c in enumerate(source.index.chunks)])], SMALL)
    assert np.array_equal(out, array)


@pytest.mark.parametrize("shape", [(10,), (200, 500)])
def test_a_flipped_bit_is_an_error_that_names_it(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = spread(shape)
    source = write(tmp_path, [stored("a", array)])
    chunk = source.index.chunks[0]
    path = Path(source.path)
    good = path.read_bytes()
    for at in (0, chunk.nbytes // 2, chunk.nbytes - 1):
        bad = bytearray(good)
        bad[chunk.start + at] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(IntegrityError) as e:
            execute(
                [(source, [Transfer(0, chunk.box, ArrayHolding(np.zeros_like(array), [0] * 2, dtype("float32")))])]
                if len(shape) == 2
                else [(source, [Transfer(0, chunk.box, ArrayHolding(np.zeros_like(array), [0], dtype("float32")))])],
                SMALL,
            )
        assert e.value.rule == "B-DIGEST"
        assert e.value.where.tensor == "a"
        assert e.value.where.range is not None
        assert e.value.where.range[0] <= chunk.start + at < e.value.where.range[1]


def test_a_cut_file_is_an_integrity_error(tmp_path: Path) -> None:
    array = spread((200, 500))
    source = write(tmp_path, [stored("a", array)])
    with open(source.path, "r+b") as f:
        f.truncate(1000)
    with pytest.raises(IntegrityError, match="ends before"):
        execute([(source, [Transfer(0, Box.whole(array.shape), ArrayHolding(array, (0, 0), dtype("float32")))])], SMALL)


def test_a_failing_write_leaves_the_descriptor_closed_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptspec.storage import local

    def full(fd: int, data: object, offset: int) -> None:
        raise OSError(28, "No space left on device")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(local, "write_at", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, [stored("a", spread((400, 400)))])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_pool_stops_at_the_first_error_and_reuses_its_buffers() -> None:
    pool = Pool(budget=1 << 21, buffer_nbytes=1 << 19, threads=8)
    assert pool.threads == 4
    ran: list[int] = []

    def task(i: int, buffer: memoryview) -> None:
        assert len(buffer) == 1 << 19
        if i == 5:
            raise ValueError("five")
        ran.append(i)

    from functools import partial

    with pytest.raises(ValueError, match="five"):
        pool.run(partial(task, i) for i in range(10_000))
    assert len(ran) < 10_000
    with pytest.raises(ValueError, match="budget"):
        Pool(budget=10)
    with pytest.raises(ValueError, match="below"):
        Pool(buffer_nbytes=100)
