"""Owns the shard's bytes: header, geometry, frame, index and trailer; refuses any byte out of place."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgpack

from ckptspec.errors import FormatError, IntegrityError, ShardError, Where
from ckptspec.format import digest as digests
from ckptspec.format.box import CHUNK_LIMIT, Box
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.names import name_fault

FORMAT = "ckptspec-shard"
SPEC = "1.0"
HEADER_KEYS = ("format", "spec", "save_id", "step", "rank", "world_size", "block", "block_size")
INDEX_KEYS = ("names", "dtypes", "shapes", "tensor", "offsets", "sizes", "start", "nbytes", "header", "digests")
HEADER_LIMIT = 4096
INDEX_LIMIT = 1 << 30
NDIM_LIMIT = 64
MAGIC = b"\x88\xa6format\xaeckptspec-shard"
TRAILER = struct.Struct("<2sQQ32s6s8s")
TRAILER_LEAD, TRAILER_MAGIC = b"\xc4\x3e", b"CKPTSHD1"
BIN_LEAD = 5  # c6 and a u32 big-endian length before every payload
LARGE, COARSE, FINE = 262_144, 4096, 64


@dataclass(frozen=True)
class Header:
    """What a shard says of itself: the save it belongs to, who wrote it, and its block digest."""

    save_id: str
    step: int
    rank: int
    world_size: int
    block: str = digests.DEFAULT_BLOCK
    block_size: int = digests.DEFAULT_BLOCK_SIZE


@dataclass(frozen=True)
class Extent:
    """A byte range in a shard: `start` and `nbytes`."""

    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """The first byte after the extent."""
        return self.start + self.nbytes


@dataclass(frozen=True)
class ChunkRow:
    """One chunk: the row of its tensor in the index, its box of the global shape, and its extent in bytes."""

    tensor: int
    box: Box
    start: int
    nbytes: int


@dataclass(frozen=True)
class Index:
    """A shard's table of contents: a row per tensor, a row per chunk, the state's extent, and every block digest."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    chunks: tuple[ChunkRow, ...]
    state: Extent
    header_nbytes: int
    header_digest: bytes
    digests: bytes

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """Every payload in file order: the chunks, then the state."""
        return (*(Extent(c.start, c.nbytes) for c in self.chunks), self.state)

    @property
    def end(self) -> int:
        """The byte offset where the index itself begins."""
        return self.state.stop

    def first_blocks(self, block_size: int) -> list[int]:
        """Return for each payload the number of its first block digest, and one more entry: the count of all."""
        counts = (digests.blocks(c.nbytes, block_size) for c in self.chunks)
        state = digests.blocks(self.state.nbytes, block_size)
        return list(accumulate((*counts, state), initial=0))

    def block_offsets(self, block_size: int) -> list[int]:
        """Return `first_blocks`, worked out once for an index."""
        known = self._block_offsets
        if block_size not in known:
            known[block_size] = self.first_blocks(block_size)
        return known[block_size]

    @cached_property
    def _block_offsets(self) -> dict[int, list[int]]:
        return {}


@dataclass(frozen=True)
class Trailer:
    """The last 64 bytes: where the index is and its sha256."""

    index_offset: int
    index_nbytes: int
    index_sha256: bytes


def encode_header(h: Header) -> bytes:
    """Return the header's msgpack bytes, exactly 8 keys in fixed order [S-HEADER]."""
    values = (FORMAT, SPEC, h.save_id, h.step, h.rank, h.world_size, h.block, h.block_size)
    return bytes(msgpack.packb(dict(zip(HEADER_KEYS, values, strict=True))))


def _unpack(data: bytes, rule: str, what: str) -> Any:
    try:
        value = msgpack.unpackb(data, raw=False, use_list=False, strict_map_key=True, ext_hook=_no_ext)
    except (ValueError, msgpack.UnpackException, RecursionError, OverflowError) as e:
        message = f"{what} is not one canonical msgpack value ({type(e).__name__})"
        raise ShardError(message, rule=rule) from None
    if not isinstance(value, dict) or msgpack.packb(value) != data:
        raise ShardError(f"{what} is not one canonical msgpack map", rule=rule)
    return value


def _no_ext(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def decode_header(data: bytes) -> Header:
    """Return the header in exactly `data`; raises ShardError [S-HEADER] for any byte out of place."""
    if len(data) > HEADER_LIMIT:
        raise ShardError("header too long", rule="S-HEADER", expected=f"<= {HEADER_LIMIT} bytes", found=str(len(data)))
    d = _unpack(data, "S-HEADER", "header")
    if tuple(d) != HEADER_KEYS or d["format"] != FORMAT:
        raise ShardError("header keys differ", rule="S-HEADER", expected=", ".join(HEADER_KEYS), found=repr(tuple(d)))
    if not isinstance(d["spec"], str) or d["spec"].split(".")[0] != SPEC.split(".")[0]:
        raise ShardError("unknown major version of the shard", rule="S-HEADER", expected=SPEC, found=repr(d["spec"]))
    types = {"save_id": str, "step": int, "rank": int, "world_size": int, "block": str, "block_size": int}
    for key, kind in types.items():
        if type(d[key]) is not kind:
            raise ShardError(f"header field {key} has the wrong type", rule="S-HEADER", expected=kind.__name__)
    return Header(*(d[k] for k in HEADER_KEYS[2:]))


def starts(header_nbytes: int, sizes: Sequence[int]) -> list[int]:
    """Return where each payload starts when payloads of `sizes` bytes follow a header [S-ALIGN]."""
    out, end = [], header_nbytes
    for nbytes in sizes:
        a = COARSE if nbytes >= LARGE else FINE
        start = -(-(end + BIN_LEAD) // a) * a
        out.append(start)
        end = start + nbytes
    return out


def lead(previous_end: int, extent: Extent) -> bytes:
    """Return the frame bytes before a payload: nil padding and the bin lead [S-FRAME]."""
    padding = extent.start - previous_end - BIN_LEAD
    return b"\xc0" * padding + b"\xc6" + extent.nbytes.to_bytes(4, "big")


def frame(index: Index) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of every frame byte, a function of the index alone [S-FRAME]."""
    end = index.header_nbytes
    for extent in index.extents:
        yield end, lead(end, extent)
        end = extent.stop


def encode_index(index: Index) -> bytes:
    """Return the index's msgpack bytes, keys in fixed order [S-CODEC]."""
    chunks = index.chunks
    values = (
        index.names,
        index.dtypes,
        index.shapes,
        [c.tensor for c in chunks],
        [c.box.offsets for c in chunks],
        [c.box.sizes for c in chunks],
        [*(c.start for c in chunks), index.state.start],
        [*(c.nbytes for c in chunks), index.state.nbytes],
        (index.header_nbytes, index.header_digest),
        index.digests,
    )
    return bytes(msgpack.packb(dict(zip(INDEX_KEYS, values, strict=True))))


def _codec(message: str, **details: Any) -> ShardError:
    return ShardError(f"index: {message}", rule="S-CODEC", **details)


def _column(d: dict[str, Any], key: str, kind: type) -> tuple[Any, ...]:
    value = d[key]
    if type(value) is not tuple or any(type(x) is not kind for x in value):
        raise _codec(f"column {key} is not an array of {kind.__name__}")
    return value


def _sizes_column(d: dict[str, Any], key: str) -> tuple[tuple[int, ...], ...]:
    rows = _column(d, key, tuple)
    for row in rows:
        if len(row) > NDIM_LIMIT or any(type(x) is not int or not 0 <= x < 1 << 53 for x in row):
            raise _codec(f"column {key} has a row that is not at most {NDIM_LIMIT} non-negative integers")
    return rows


def _check_columns(names: tuple[str, ...], dtypes: tuple[str, ...], shapes: tuple[Any, ...], rows: list[int]) -> None:
    if not len(names) == len(dtypes) == len(shapes):
        raise _codec("names, dtypes and shapes differ in length")
    if len(set(rows)) != 1:
        raise _codec("tensor, offsets, sizes, start and nbytes differ in length", found=str(rows))
    if len(set(names)) != len(names):
        raise _codec("a name occurs twice")
    for name in names:
        if fault := name_fault(name):
            raise ShardError(f"index: {fault}", rule="N-NAME")
    for name in set(dtypes) - DTYPES.keys():
        raise ShardError("index: unknown dtype", rule="T-DTYPE", found=repr(name))


def decode_index(data: bytes, header: Header) -> Index:
    """Return the index in exactly `data`; raises ShardError for what is not canonical, aligned, in bounds and complete.

    `header` gives the block digest and size (rules S-CODEC, S-CHUNK, S-ALIGN, N-NAME, T-DTYPE).
    """
    d = _unpack(data, "S-CODEC", "index")
    if tuple(d) != INDEX_KEYS:
        raise _codec("keys differ", expected=", ".join(INDEX_KEYS), found=repr(tuple(d)))
    names, dtypes = _column(d, "names", str), _column(d, "dtypes", str)
    shapes, offsets, sizes = (_sizes_column(d, k) for k in ("shapes", "offsets", "sizes"))
    tensor, start, nbytes = (_column(d, k, int) for k in ("tensor", "start", "nbytes"))
    _check_columns(names, dtypes, shapes, [len(tensor), len(offsets), len(sizes), len(start) - 1, len(nbytes) - 1])
    lead_in = d["header"]
    if type(lead_in) is not tuple or [type(x) for x in lead_in] != [int, bytes] or type(d["digests"]) is not bytes:
        raise _codec("header is not [length, digest] or digests is not a bin")
    chunks = tuple(map(ChunkRow, tensor, map(Box, offsets, sizes), start, nbytes))
    index = Index(names, dtypes, shapes, chunks, Extent(start[-1], nbytes[-1]), lead_in[0], lead_in[1], d["digests"])
    _check_chunks(index)
    _check_extents(index, header)
    return index


def _check_chunks(index: Index) -> None:
    itemsize = [DTYPES[name].itemsize for name in index.dtypes]
    for c in index.chunks:
        if not 0 <= c.tensor < len(index.names):
            raise _codec("a chunk names a tensor row that is not there", found=str(c.tensor))
        shape, box = index.shapes[c.tensor], c.box
        fits = len(box.offsets) == len(box.sizes) == len(shape) and all(
            o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
        )
        expected = box.numel * itemsize[c.tensor]
        if not fits or c.nbytes != expected or not 0 < c.nbytes <= CHUNK_LIMIT:
            raise ShardError(
                f"index: chunk of {index.names[c.tensor]!r} does not fit its box",
                rule="S-CHUNK",
                expected=f"{expected} bytes of shape {list(shape)}, 1..{CHUNK_LIMIT}",
                found=f"{c.nbytes} bytes, box {list(box.offsets)} + {list(box.sizes)}",
            )


def _check_extents(index: Index, header: Header) -> None:
    if not 0 < index.state.nbytes <= CHUNK_LIMIT or not 0 < index.header_nbytes <= HEADER_LIMIT:
        raise _codec("header or state has an impossible length", found=f"{index.header_nbytes}, {index.state.nbytes}")
    sizes = [c.nbytes for c in index.chunks] + [index.state.nbytes]
    found = [c.start for c in index.chunks] + [index.state.start]
    if starts(index.header_nbytes, sizes) != found:
        raise ShardError("index: a payload does not start where it must", rule="S-ALIGN")
    size = digests.digest_size(header.block)
    if header.block_size < 1 or len(index.header_digest) != size:
        raise _codec("the header's digest has the wrong length")
    count = index.first_blocks(header.block_size)[-1]
    if len(index.digests) != count * size:
        raise _codec("wrong number of block digests", expected=str(count * size), found=str(len(index.digests)))


def encode_trailer(t: Trailer) -> bytes:
    """Return the 64 bytes that end a shard [S-TRAILER]."""
    return TRAILER.pack(TRAILER_LEAD, t.index_offset, t.index_nbytes, t.index_sha256, bytes(6), TRAILER_MAGIC)


def decode_trailer(data: bytes, nbytes: int) -> Trailer:
    """Return the trailer of a shard of `nbytes` bytes; raises ShardError [S-TRAILER] or [S-TILE]."""
    if len(data) != TRAILER.size:
        raise ShardError("too short to hold a trailer", rule="S-TRAILER", expected="64 bytes", found=str(len(data)))
    start, offset, length, sha, zero, magic = TRAILER.unpack(data)
    if start != TRAILER_LEAD or zero != bytes(6) or magic != TRAILER_MAGIC:
        raise ShardError("the last 64 bytes are no trailer", rule="S-TRAILER", found=data[-8:].hex())
    if length > INDEX_LIMIT or offset + length + TRAILER.size != nbytes:
        raise ShardError(
            "index and trailer do not end the file",
            rule="S-TILE",
            expected=f"{nbytes} bytes",
            found=f"index at {offset} + {length} + 64",
        )
    return Trailer(offset, length, sha)


def check_index_bytes(data: bytes, trailer: Trailer) -> None:
    """Raise ShardError [S-INDEX] unless `data` has the sha256 that the trailer holds."""
    found = hashlib.sha256(data).digest()
    if found != trailer.index_sha256:
        expected = trailer.index_sha256.hex()
        raise ShardError("index bytes differ from their digest", rule="S-INDEX", expected=expected, found=found.hex())


def check_tiles(index: Index, trailer: Trailer) -> None:
    """Raise ShardError [S-TILE] unless the last payload ends where the index begins."""
    if index.end != trailer.index_offset:
        raise ShardError(
            "the last payload does not end at the index",
            rule="S-TILE",
            expected=str(trailer.index_offset),
            found=str(index.end),
        )


def block_algorithm(header: Header) -> digests.Algorithm:
    """Return the header's digest algorithm; raises ShardError [D-ALG] for an unknown one."""
    try:
        return digests.algorithm(header.block)
    except FormatError as e:
        raise ShardError(e.message, **e.details()) from None


def check_blocks(index: Index, header: Header, row: int, data: memoryview, file: str, at: int = 0) -> None:
    """Compare the blocks of `data` with their digests; it begins at byte `at`, a block boundary, of payload `row`.

    Raises IntegrityError [B-DIGEST] naming file, tensor, rank and the byte range in the file.
    """
    algorithm, block_size = block_algorithm(header), header.block_size
    size, first = algorithm.size, index.block_offsets(block_size)[row]
    for i in range(0, len(data), block_size):
        slot = (first + (at + i) // block_size) * size
        block = data[i : i + block_size]
        if algorithm.of(block) != index.digests[slot : slot + size]:
            start = index.extents[row].start + at + i
            tensor = index.names[index.chunks[row].tensor] if row < len(index.chunks) else None
            where = Where(file, tensor=tensor, rank=header.rank, range=(start, start + len(block)))
            raise IntegrityError(
                "bytes differ from their digest",
                rule="B-DIGEST" if tensor is not None else "S-STATE",
                where=where,
                advice="load an older step, or restore this file from a copy",
            )
