"""Owns the plan as values and its JSON form: what moves to bring a checkpoint to a target, counted; makes none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ckptspec.errors import PlanError, Where
from ckptspec.format import schemas
from ckptspec.format import target as targets
from ckptspec.format.manifest import SPEC_VERSION, Manifest
from ckptspec.format.report import Verdict
from ckptspec.format.target import Target
from ckptspec.planner.fates import IMPOSSIBLE
from ckptspec.planner.renames import Renames, renames

FORMAT = "ckptspec-plan"


@dataclass(frozen=True)
class Source:
    """The checkpoint that a plan is for."""

    save_id: str
    step: int
    manifest_digest: str
    world_size: int

    @classmethod
    def of(cls, manifest: Manifest) -> Source:
        """Return what a manifest says of itself."""
        return cls(manifest.save_id, manifest.step, manifest.digest, manifest.world_size)


@dataclass(frozen=True)
class Ranks:
    """What each destination rank gets and reads (whole blocks), in bytes, the shards it opens, and its transfers."""

    bytes_delivered: tuple[int, ...]
    bytes_read: tuple[int, ...]
    shards_opened: tuple[int, ...]
    transfers: tuple[int, ...]


@dataclass(frozen=True)
class Totals:
    """What all destination ranks get, read and do together, in bytes; what is private to a rank is left out.

    `payload_bytes` is what the checkpoint stores, each element once. `bytes_read_once` is what is read where each block
    is read once and its pieces are exchanged. `peak_memory` is an estimate for the fullest rank: what it gets, and
    buffers. `private_bytes` is what goes to the ranks it came from; None where no indexes were there to tell.
    """

    payload_bytes: int
    bytes_delivered: int
    bytes_read: int
    bytes_read_once: int
    transfers: int
    peak_memory: int
    private_bytes: int | None = None

    @property
    def read_amplification(self) -> float:
        """Bytes read over bytes stored, without exchange."""
        return self.bytes_read / max(1, self.payload_bytes)

    @property
    def read_amplification_with_exchange(self) -> float:
        """Bytes read over bytes stored, each block read once."""
        return self.bytes_read_once / max(1, self.payload_bytes)


@dataclass(frozen=True)
class Plan:
    """What it takes to bring one checkpoint to one target, by names that a map may change; the target is open nowhere.

    The transfers themselves are not in it, but their digest is.
    """

    source: Source
    target: Target
    names: Renames
    verdicts: tuple[Verdict, ...]
    totals: Totals
    ranks: Ranks
    transfers_digest: str

    @property
    def possible(self) -> bool:
        """Whether all that the target asks for can be had."""
        return all(v.verdict != IMPOSSIBLE for v in self.verdicts)

    def document(self) -> dict[str, Any]:
        """Return the JSON form, which obeys plan.schema.json."""
        return {
            "format": FORMAT,
            "schema_version": SPEC_VERSION,
            "source": dict(vars(self.source)),
            "target": self.target.document(),
            "names": self.names.document(),
            "verdicts": [v.document() for v in self.verdicts],
            "totals": {key: n for key, n in vars(self.totals).items() if n is not None},
            "ranks": {key: list(column) for key, column in vars(self.ranks).items()},
            "transfers_digest": self.transfers_digest,
        }


def from_document(document: Any, *, file: str | None = None) -> Plan:
    """Return the Plan of a JSON document; raises PlanError with the first thing its schema refuses [X-PLAN]."""
    for finding in schemas.check("plan", document):
        if finding.severity == "error":
            where = Where(file, finding.where.pointer)
            expected, found = finding.expected, finding.found
            raise PlanError(
                f"not a plan: {finding.message}", rule=finding.code, where=where, expected=expected, found=found
            )
    target = targets.from_document(document["target"])
    columns: Mapping[str, list[int]] = document["ranks"]
    if any(len(column) != target.world_size for column in columns.values()):
        expected = f"{target.world_size} numbers in each column"
        where = Where(file, "/ranks")
        raise PlanError("not as many ranks as the target has", rule="X-PLAN", where=where, expected=expected)
    return Plan(
        Source(**document["source"]),
        target,
        renames(document["names"]),
        tuple(map(Verdict.from_document, document["verdicts"])),
        Totals(**document["totals"]),
        Ranks(*(tuple(columns[f.name]) for f in fields(Ranks))),
        document["transfers_digest"],
    )


@dataclass(frozen=True)
class Columns:
    """Transfers from one stored tensor to one wanted tensor, a row each; offsets and sizes are the stored tensor's.

    They are in canonical order, and each column has as many entries.
    """

    tensor: str
    source: str
    rank: tuple[int, ...]
    source_rank: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    elements: tuple[int, ...]
