"""Owns the signature: names, dtypes and shapes of a state without its bytes; refuses a document its schema refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptspec.errors import PlanError, Where
from ckptspec.format import asked, schemas
from ckptspec.format.manifest import SPEC_VERSION

FORMAT = "ckptspec-signature"
SIZE_LIMIT = 256 << 20  # bytes of a signature document, as for a manifest


@dataclass(frozen=True)
class Described:
    """A tensor's dtype (torch's name) and global shape; None: each rank has one of its own shape."""

    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Signature:
    """Tensors by name, and objects by name (`same` on all ranks, or one a `rank`); objects None: not asked for."""

    tensors: Mapping[str, Described]
    objects: Mapping[str, str] | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON form, which obeys signature.schema.json."""
        shaped = {n: None if t.shape is None else list(t.shape) for n, t in self.tensors.items()}
        tensors = {n: {"dtype": t.dtype, "shape": shaped[n]} for n, t in self.tensors.items()}
        document: dict[str, Any] = {"format": FORMAT, "schema_version": SPEC_VERSION, "tensors": tensors}
        return document if self.objects is None else {**document, "objects": dict(self.objects)}


def from_document(document: Any, *, file: str | None = None) -> Signature:
    """Return the Signature of a JSON document; raises PlanError with the first thing its schema refuses [X-SIGNATURE].

    Raises it with N-NAME, T-DTYPE or another rule where that is what is broken.
    """
    for finding in schemas.check("signature", document):
        if finding.severity == "error":
            where = Where(file, finding.where.pointer)
            message = f"not a signature: {finding.message}"
            raise PlanError(message, rule=finding.code, where=where, expected=finding.expected, found=finding.found)
    shapes = {n: t["shape"] for n, t in document["tensors"].items()}
    described = {
        n: Described(t["dtype"], None if shapes[n] is None else tuple(shapes[n]))
        for n, t in document["tensors"].items()
    }
    objects = document.get("objects")
    return Signature(described, None if objects is None else dict(objects))


def parse(data: bytes, *, file: str | None = None) -> Signature:
    """Return the Signature in a JSON file's bytes; raises PlanError [X-SIGNATURE]."""
    document = asked.document(data, "signature", rule="X-SIGNATURE", limit=SIZE_LIMIT, file=file)
    return from_document(document, file=file)
