"""Owns what is asked of a checkpoint beside soundness, a target or a signature, and the answer; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckptspec.check import targets
from ckptspec.check.advice import MOVES
from ckptspec.check.migration import batches, moving, parts
from ckptspec.check.migration.naming import Asked, Compared, compare
from ckptspec.errors import PlanError
from ckptspec.format.manifest import Manifest
from ckptspec.format.report import Advice, Finding, Names, Verdict
from ckptspec.format.signature import Signature
from ckptspec.format.target import Target
from ckptspec.planner import fates
from ckptspec.planner.fates import Found
from ckptspec.planner.renames import Renames
from ckptspec.planner.routes import Routes

Aim = Target | Callable[[Manifest], "Target | None"] | None


@dataclass(frozen=True)
class Asking:
    """A target (or what makes one of the manifest), a signature, a map of names, and the batch of the job.

    `words` are the options that say target, signature and map again, for commands in advice; `target_words` those
    that reshard knows as well.
    """

    target: Aim = None
    signature: Signature | None = None
    exact: bool = False
    names: Renames = field(default_factory=Renames)
    micro: int | None = None
    accumulation: int | None = None
    words: tuple[str, ...] = ()

    @property
    def target_words(self) -> tuple[str, ...]:
        """The options without those of a signature."""
        if "--signature" not in self.words:
            return self.words
        i = self.words.index("--signature")
        return self.words[:i] + self.words[i + 2 :]

    def __bool__(self) -> bool:
        return self.target is not None or self.signature is not None


@dataclass(frozen=True)
class Answer:
    """What the manifest alone says to what was asked; `found` None: there is no target, or it cannot be met."""

    asking: Asking
    findings: tuple[Finding, ...] = ()
    found: Found | None = None
    verdicts: tuple[Verdict, ...] = ()
    names: Names | None = None
    sizes: tuple[int, ...] = ()

    def samples(self, state: object) -> int | None:
        """Return the samples that a rank's state says were consumed, None where it does not, or nobody moves."""
        if self.found is None:
            return None
        objects = self.found.destination.manifest.objects
        return moving.counted(state, frozenset(n for n, kind in objects.items() if kind == "rank"))

    def advice(self, path: str, run: str | None, samples: int | None = None) -> dict[str, tuple[Advice, ...]]:
        """Return the advice on the target by the code of the finding it is for; `samples` is what a state tells."""
        if self.found is None:
            return {"R-TARGET": tuple(moving.other_sizes(path, self.sizes))} if self.sizes else {}
        if any(f.severity == "error" and f.code not in MOVES for f in self.findings):
            return {}  # it cannot be loaded so, whatever the ranks
        notes = self.found.destination.manifest.annotations
        batch = batches.chosen(self.asking.micro, self.asking.accumulation, notes)
        made = moving.move(self.found, self.verdicts, self.asking.target_words, batch, samples)
        return {code: tuple(moving.advice(path, run, made, code)) for code in MOVES}


def answer(asking: Asking, manifest: Manifest) -> Answer:
    """Return what a sound manifest says to what is asked."""
    compared: list[Compared] = []
    findings: list[Finding] = []
    if asking.signature is not None:
        s = asking.signature
        asked = Asked(s.tensors, None, s.objects, "the model", partial=s.objects is None)
        compared.append(compare(asked, Routes(manifest, {}, asking.names), exact=asking.exact))
        findings += compared[0].findings
    target: Target | None = None
    try:
        target = asking.target(manifest) if callable(asking.target) else asking.target
    except PlanError as e:
        findings.append(Finding.of_error(e, file="target"))
    if target is None:
        return Answer(asking, tuple(findings), names=_names(compared))
    judged = targets.judge(manifest, target, exact=asking.exact, names=asking.names)
    findings += judged.findings
    if judged.fit is None:
        bare = vars(target) == vars(Target(target.world_size))
        sizes = tuple(moving.sizes_near(manifest, target.world_size)) if bare else ()
        return Answer(asking, tuple(findings), names=_names(compared), sizes=sizes)
    if target.tensors is not None or asking.names:
        compared.append(judged.fit.compared)
    found = fates.found(judged.fit.destination)
    return Answer(asking, tuple(findings), found, parts.verdicts(found), _names(compared))


def _names(compared: list[Compared]) -> Names | None:
    """Return what the map of names did, and what one could have beside; None where no names were compared."""
    if not compared:
        return None
    renamed = {n: s for c in compared for n, s in c.renamed.items()}
    proposed = {n: s for c in compared for n, s in c.proposed.items()}
    return Names(renamed, proposed)
