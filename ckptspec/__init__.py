"""ckptspec: sharded training checkpoints by an open standard; the names here are the public ones, loaded when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptspec.check.life.cadence import suggest_interval as suggest_interval
    from ckptspec.engine.comparing.diff import diff as diff
    from ckptspec.engine.life.rollback import rollback as rollback
    from ckptspec.engine.locate import latest as latest
    from ckptspec.engine.mirroring.recall import fetch_back as fetch_back
    from ckptspec.engine.mirroring.uploads import Uploader as Uploader
    from ckptspec.engine.planning import plan as plan
    from ckptspec.engine.read import read as read
    from ckptspec.engine.resharding.reshard import reshard as reshard
    from ckptspec.engine.verify import validate as validate
    from ckptspec.errors import CkptspecError as CkptspecError
    from ckptspec.errors import CommitUncertainError as CommitUncertainError
    from ckptspec.errors import FormatError as FormatError
    from ckptspec.errors import IntegrityError as IntegrityError
    from ckptspec.errors import LoadError as LoadError
    from ckptspec.errors import ManifestError as ManifestError
    from ckptspec.errors import NotCommittedError as NotCommittedError
    from ckptspec.errors import PlanError as PlanError
    from ckptspec.errors import SaveError as SaveError
    from ckptspec.errors import ShardError as ShardError
    from ckptspec.errors import StateError as StateError
    from ckptspec.errors import UnsupportedVersionError as UnsupportedVersionError
    from ckptspec.errors import ValidationFailed as ValidationFailed
    from ckptspec.format.manifest import SPEC_VERSION as SPEC_VERSION
    from ckptspec.format.manifest import Manifest as Manifest
    from ckptspec.format.report import Finding as Finding
    from ckptspec.format.report import Report as Report
    from ckptspec.format.report import Verdict as Verdict
    from ckptspec.format.signature import Signature as Signature
    from ckptspec.format.target import Target as Target
    from ckptspec.planner.planned import Plan as Plan
    from ckptspec.pytorch.api import load as load
    from ckptspec.pytorch.api import save as save
    from ckptspec.pytorch.background import SaveResult as SaveResult
    from ckptspec.pytorch.checkpointer import Checkpointer as Checkpointer
    from ckptspec.pytorch.lazy import before_mutation as before_mutation
    from ckptspec.pytorch.load import LoadResult as LoadResult
    from ckptspec.pytorch.pieces import register_pieces as register_pieces
    from ckptspec.pytorch.restoring import RestoreResult as RestoreResult
    from ckptspec.pytorch.saving import target as target
    from ckptspec.pytorch.signature import signature as signature
    from ckptspec.pytorch.wrappers import RNG as RNG
    from ckptspec.pytorch.wrappers import FlatShard as FlatShard
    from ckptspec.pytorch.wrappers import Local as Local
    from ckptspec.pytorch.wrappers import Replicated as Replicated
    from ckptspec.pytorch.wrappers import Shard as Shard

_ERRORS = (
    "CkptspecError CommitUncertainError FormatError IntegrityError LoadError ManifestError NotCommittedError PlanError "
    "SaveError ShardError StateError UnsupportedVersionError ValidationFailed"
)
_HOMES = {
    "check.life.cadence": "suggest_interval",
    "engine.comparing.diff": "diff",
    "engine.locate": "latest",
    "engine.planning": "plan",
    "engine.read": "read",
    "engine.resharding.reshard": "reshard",
    "engine.mirroring.recall": "fetch_back",
    "engine.life.rollback": "rollback",
    "engine.mirroring.uploads": "Uploader",
    "engine.verify": "validate",
    "errors": _ERRORS,
    "format.manifest": "SPEC_VERSION Manifest",
    "format.report": "Finding Report Verdict",
    "format.signature": "Signature",
    "format.target": "Target",
    "planner.planned": "Plan",
    "pytorch.api": "load save",
    "pytorch.background": "SaveResult",
    "pytorch.checkpointer": "Checkpointer",
    "pytorch.lazy": "before_mutation",
    "pytorch.load": "LoadResult",
    "pytorch.pieces": "register_pieces",
    "pytorch.restoring": "RestoreResult",
    "pytorch.saving": "target",
    "pytorch.signature": "signature",
    "pytorch.wrappers": "FlatShard Local RNG Replicated Shard",
}
_HOME = {name: f"ckptspec.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ckptspec' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as e:
        if e.name == "torch":
            raise ImportError(f"ckptspec.{name} needs torch: pip install 'ckptspec[torch]'") from e
        raise


def __dir__() -> list[str]:
    return __all__
