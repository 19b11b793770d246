"""Owns reading what a checkpoint says of itself, verified: manifest, and each shard's trailer, index, header, state."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace

import msgpack

from ckptspec.check.manifests import check_manifest
from ckptspec.check.shards import Subject, same_digests, same_save, same_tensors
from ckptspec.engine.files import File, NotRegularError, opened
from ckptspec.engine.locate import read_manifest, resolve
from ckptspec.errors import CkptspecError, FormatError, IntegrityError, ShardError, Where
from ckptspec.format import digest as digests
from ckptspec.format import manifest as manifests
from ckptspec.format import shard
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.manifest import Manifest, ShardEntry
from ckptspec.format.objects import Decode, unpack
from ckptspec.format.report import Finding

TRAILER_NBYTES = shard.TRAILER.size


def load_manifest(path: str | os.PathLike[str]) -> tuple[str, Manifest]:
    """Return (folder, manifest) of the checkpoint a path means; the manifest keeps every rule up to its own level.

    Raises NotCommittedError, ManifestError, UnsupportedVersionError or OSError.
    """
    located = resolve(path)
    folder = located.folder
    if located.manifest is not None:
        return folder, located.manifest
    manifest = manifests.parse(read_manifest(folder))
    for finding in check_manifest(manifest):
        if finding.severity == "error":
            manifests.raise_finding(finding)
    return folder, manifest


def open_shard(
    folder: str, entry: ShardEntry, manifest: Manifest, *, decode: Decode | None = None, numpy: bool = True
) -> ShardDocument:
    """Return a shard's header, index and state, each verified and in agreement with the manifest.

    `decode` and `numpy` say how values of the state come, as in `objects.unpack`. Raises ShardError, IntegrityError
    or OSError; `where.file` and `where.rank` name the shard.
    """
    document = read_shard(folder, entry, manifest, decode=decode, numpy=numpy)
    for finding in _disagreements(Subject(manifest, entry, document)):
        raise ShardError(
            finding.message, rule=finding.code, where=finding.where, expected=finding.expected, found=finding.found
        )
    return document


def _disagreements(subject: Subject) -> Iterator[Finding]:
    yield from same_save(subject)
    yield from same_digests(subject)
    yield from same_tensors(subject)


def read_shard(
    folder: str, entry: ShardEntry, manifest: Manifest, *, decode: Decode | None = None, numpy: bool = True
) -> ShardDocument:
    """Return what open_shard returns, verified byte by byte but not yet compared with the manifest's tensors.

    Raises ShardError or IntegrityError with the rule that says most: a whole shard of another save is S-SAVE, whatever
    its size.
    """
    try:
        with opened(os.path.join(folder, entry.path)) as file:
            return _Reading(file, entry, manifest).document(decode, numpy)
    except FileNotFoundError:
        message, size = "the shard is missing", f"{entry.nbytes} bytes"
        where = Where(entry.path, rank=entry.rank)
        raise IntegrityError(message, rule="S-MISSING", where=where, expected=size, found="no file") from None
    except NotRegularError as e:
        where = Where(entry.path, rank=entry.rank)
        raise ShardError(e.message, rule="S-FILE", where=where, expected=e.expected, found=e.found) from None
    except (FormatError, IntegrityError) as e:
        raise _placed(e, entry) from None


def _placed(error: CkptspecError, entry: ShardEntry) -> CkptspecError:
    """Return the error with the shard's file and rank in its place."""
    details = dict(error.details())
    details["where"] = replace(error.where, file=entry.path, rank=entry.rank)
    kind = IntegrityError if isinstance(error, IntegrityError) else ShardError
    return kind(error.message, **details)


def index_of(file: File, trailer: shard.Trailer) -> bytes:
    """Return the index bytes where the trailer says they are."""
    return file.read(trailer.index_offset, trailer.index_nbytes)


def _lead_in(index_bytes: bytes) -> tuple[int, bytes]:
    """Return the header's length and digest out of an index, without building the rest of it.

    The header must be known before the index can be decoded, and its length is in the index.
    """
    try:
        walker = msgpack.Unpacker(max_buffer_size=max(1, len(index_bytes)), raw=False)
        walker.feed(index_bytes)
        for _ in range(min(walker.read_map_header(), len(shard.INDEX_KEYS))):
            if walker.unpack() == "header":
                nbytes, value = walker.unpack()
                if type(nbytes) is int and type(value) is bytes and 0 < nbytes <= shard.HEADER_LIMIT:
                    return nbytes, value
                break
            walker.skip()
    except (ValueError, TypeError, msgpack.UnpackException):
        pass  # said below, as for an index that has no such field
    raise ShardError("index: no header length and digest in it", rule="S-CODEC")


def _authentic(data: bytes, digest: bytes, block: str) -> bool:
    return block in digests.ALGORITHMS and digests.algorithm(block).of(data) == digest


def header_of(file: File, index_bytes: bytes, block: str) -> tuple[shard.Header, bytes]:
    """Return the header and its bytes; raises ShardError [S-HEADER] unless they have the digest in the index.

    The digest is of the algorithm that the header names, or of `block` where the header itself is damaged.
    """
    nbytes, digest = _lead_in(index_bytes)
    if nbytes > file.nbytes:
        raise ShardError("the header is longer than the file", rule="S-HEADER", found=f"{nbytes} bytes")
    data = file.read(0, nbytes)
    header, problem = None, None
    try:
        header = shard.decode_header(data)
    except ShardError as e:
        problem = e
    if not _authentic(data, digest, header.block if header else block) and not _authentic(data, digest, block):
        raise ShardError("the header differs from its digest", rule="S-HEADER", where=Where(range=(0, nbytes)))
    if header is None:
        raise problem or ShardError("no header", rule="S-HEADER")
    return header, data


class _Reading:
    """One open shard, read from its end to its beginning: trailer, index, header, state."""

    def __init__(self, file: File, entry: ShardEntry, manifest: Manifest) -> None:
        self.file = file
        self.entry = entry
        self.manifest = manifest

    def document(self, decode: Decode | None, numpy: bool) -> ShardDocument:
        if self.file.nbytes != self.entry.nbytes:
            raise self._foreign() or self._partial()
        index_bytes = self._index_bytes()
        header, _ = header_of(self.file, index_bytes, self.manifest.block)
        shard.block_algorithm(header)
        index = shard.decode_index(index_bytes, header)
        shard.check_tiles(index, shard.Trailer(self.entry.index_offset, self.entry.index_nbytes, b""))
        return self._with_state(header, index, decode, numpy)

    def _trailer(self) -> shard.Trailer:
        """Return the trailer; raises ShardError [S-TRAILER] unless it is where and what the manifest says."""
        nbytes = self.file.nbytes
        try:
            data = self.file.read(max(0, nbytes - TRAILER_NBYTES), min(nbytes, TRAILER_NBYTES))
            return shard.decode_trailer(data, nbytes)
        except ShardError as e:
            where = Where(range=(max(0, nbytes - TRAILER_NBYTES), nbytes))
            raise ShardError(e.message, rule="S-TRAILER", where=where, expected=e.expected, found=e.found) from None

    def _index_bytes(self) -> bytes:
        """Return the index bytes, which have the digest in the manifest and in the trailer."""
        entry = self.entry
        trailer = self._trailer()
        place = (entry.index_offset, entry.index_nbytes)
        if (trailer.index_offset, trailer.index_nbytes) != place:
            expected, found = f"index at {place[0]} of {place[1]} bytes", f"at {trailer.index_offset}"
            message = "the trailer says another place of the index than the manifest"
            raise self._foreign() or ShardError(message, rule="S-TRAILER", expected=expected, found=found)
        data = index_of(self.file, trailer)
        sha = hashlib.sha256(data)
        if "sha256:" + sha.hexdigest() != entry.index_digest:
            where = Where(range=(place[0], place[0] + place[1]))
            message, found = "the index differs from its digest", "sha256:" + sha.hexdigest()
            raise self._foreign() or ShardError(
                message, rule="S-INDEX", where=where, expected=entry.index_digest, found=found
            )
        if sha.digest() != trailer.index_sha256:
            message = "the trailer has another digest than the index"
            raise ShardError(message, rule="S-TRAILER", expected=sha.hexdigest(), found=trailer.index_sha256.hex())
        return data

    def _with_state(
        self, header: shard.Header, index: shard.Index, decode: Decode | None, numpy: bool
    ) -> ShardDocument:
        extent = index.state
        data = self.file.read(extent.start, extent.nbytes)
        shard.check_blocks(index, header, len(index.chunks), memoryview(data), self.entry.path)
        return ShardDocument(header, index, unpack(data, decode=decode, numpy=numpy), data)

    def _foreign(self) -> ShardError | None:
        """Return the error [S-SAVE] when the file is a whole shard by its own trailer, but of another save or rank."""
        try:
            trailer = self._trailer()
            data = index_of(self.file, trailer)
            shard.check_index_bytes(data, trailer)
            header, _ = header_of(self.file, data, self.manifest.block)
        except (FormatError, IntegrityError):
            return None
        index = shard.Index((), (), (), (), shard.Extent(0, 0), 0, b"", b"")
        for finding in same_save(Subject(self.manifest, self.entry, ShardDocument(header, index))):
            return ShardError(finding.message, rule="S-SAVE", expected=finding.expected, found=finding.found)
        return None

    def _partial(self) -> IntegrityError:
        """Return the error [S-NBYTES] for a file of another size, with what can be said of the bytes that are there."""
        entry, found = self.entry, self.file.nbytes
        index_end = entry.index_offset + entry.index_nbytes
        whole = found >= index_end and self._index_is_there()
        if whole and found > entry.nbytes:
            message = "bytes were appended, the shard's own come first"
        elif whole:
            message = "partial write: only the trailer is cut, all payload bytes are there"
        elif found > entry.nbytes:
            message = "the file is too long, and no index is where it should be"
        else:
            message = "partial write or cut copy: the index is gone, what the bytes hold cannot be known"
        return IntegrityError(
            message,
            rule="S-NBYTES",
            where=Where(range=(min(found, entry.nbytes), max(found, entry.nbytes))),
            expected=f"{entry.nbytes} bytes",
            found=f"{found} bytes",
        )

    def _index_is_there(self) -> bool:
        data = self.file.read(self.entry.index_offset, self.entry.index_nbytes)
        return digests.sha256_text(data) == self.entry.index_digest
