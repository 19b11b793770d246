"""Owns what to do next: from findings and what else the run holds, ranked advice and one decision; runs nothing.

No text from inside a checkpoint enters a command: argv holds paths the caller gave, integers and fixed words only.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptspec.check.paths import beside, listed
from ckptspec.check.paths import word as word
from ckptspec.check.verdicts import Loss
from ckptspec.format import schemas
from ckptspec.format.names import shard_path
from ckptspec.format.report import Advice, Cost, Finding

PUT_BACK = {"S-MISSING", "S-NBYTES", "S-FILE", "S-SAVE", "S-TRAILER", "S-INDEX", "S-HEADER", "S-STATE", "S-FRAME"}
PUT_BACK |= {"B-DIGEST", "B-READ", "L-SIZE", "L-UTF8", "L-JSON", "L-TAIL", "L-DIGEST", "C-MANIFEST"}
MENDED = {"S-MISSING", "S-NBYTES", "S-FILE", "S-SAVE", "S-TRAILER", "S-INDEX", "S-HEADER", "S-STATE", "S-CODEC"}
MENDED |= {"S-FRAME", "B-DIGEST", "B-READ"}  # what a shard can have that another copy makes good
PASSED_OVER = "newer"  # the advice of a finding about another, newer checkpoint of the run
ON_TARGET = ("R-WORLD", "R-LAYOUT", "R-NAME", "R-DTYPE", "R-SHAPE", "R-TARGET", "X-MAP", "Q-ALIAS")
MOVES = ("R-WORLD", "R-LAYOUT")
MAP = "map.json"
MEMORY = 1 << 30  # bytes that reshard works in, unless told otherwise


@dataclass(frozen=True)
class OtherStep:
    """Another checkpoint of the run: its step, its path as the caller would write it, and how much work is in it."""

    step: int
    path: str
    nbytes: int = 0
    wall_clock_seconds: int | None = None


@dataclass(frozen=True)
class Situation:
    """What advice needs beside the findings: paths as the caller wrote them, and what is known of the checkpoint.

    `good` are the run's other good checkpoints, newest first; `newer` is one that was passed over as bad. `loss`
    tells what cannot be read, `private` what each rank stores of its own. `prepared` is advice by the code of the
    finding it is for, `words` are the options that name target or signature again, `target` those of the target alone,
    and `proposed` counts the pairs of names that a map could have.
    """

    path: str
    run: str | None = None
    world_size: int | None = None
    step: int | None = None
    wall_clock_seconds: int | None = None
    good: tuple[OtherStep, ...] = ()
    newer: str | None = None
    loss: Loss | None = None
    private: tuple[str, ...] = ()
    prepared: Mapping[str, tuple[Advice, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    proposed: int = 0


def restore(s: Situation, code: str) -> Advice:
    """Return the advice to put the named files back from a copy, which loses nothing."""
    argv = ("ckptspec", "validate", word(s.path), "--level", "bytes")
    text = "put the files named above back from a copy or a mirror, then check every byte"
    return Advice("restore", code, text, argv=argv)


def cut_tail(s: Situation, finding: Finding) -> Advice:
    """Return the advice to cut what was appended to a shard whose own bytes are all there."""
    size, rank = int((finding.expected or "0").split()[0]), finding.where.rank or 0
    text = f"the shard is whole, something was appended to it: cut {finding.where.file} back to {size} bytes"
    argv: tuple[str, ...] = ()
    if finding.where.file == shard_path(rank):  # our own name for a rank, so the command holds no name of the file's
        argv = ("truncate", "-s", str(size), f"{word(s.path)}/{shard_path(rank)}")
    return Advice("cut", finding.code, text, {"nbytes": size, "rank": rank}, argv)


def same_world(s: Situation) -> Advice:
    """Return the advice to resume on the world size that was saved."""
    n = s.world_size or 1
    text = f"resume on {n} ranks, as saved: torchrun --nproc-per-node {n} (or --nnodes times --nproc-per-node = {n})"
    return Advice("same-world", "R-WORLD", text, {"world_size": n})


def fall_back(s: Situation, code: str) -> Advice | None:
    """Return the advice to resume from the newest good checkpoint before this one, with what that costs."""
    older = [o for o in s.good if s.step is None or o.step < s.step]
    if not older:
        return None
    best = max(older, key=lambda o: o.step)
    steps = 0 if s.step is None else s.step - best.step
    seconds = None
    if s.wall_clock_seconds is not None and best.wall_clock_seconds is not None:
        seconds = max(0, s.wall_clock_seconds - best.wall_clock_seconds)
    time = "" if seconds is None else f", {_time(seconds)} of work"
    loses = f"{steps:,} steps{time}" if steps else "what was trained since step " + str(best.step)
    cost = Cost(bytes_read=best.nbytes, steps_lost=steps, seconds_lost=seconds)
    argv = ("ckptspec", "validate", word(best.path), "--level", "bytes")
    text = f"fall back to step {best.step}, the newest older good checkpoint of this run: {shlex.quote(best.path)}"
    return Advice("fallback", code, text, {"step": best.step}, argv, loses, cost)


def _time(seconds: int) -> str:
    return f"{seconds} seconds" if seconds < 300 else f"{round(seconds / 60):,} minutes"


def look_at_newer(s: Situation, code: str) -> Advice:
    """Return the advice to look at the newer checkpoint that was passed over."""
    path = word(s.newer or s.path)
    return Advice(PASSED_OVER, code, "see what is wrong with the newer checkpoint", argv=("ckptspec", "validate", path))


def mend(s: Situation, loss: Loss, code: str) -> Iterator[Advice]:
    """Yield the advice for damage of which another copy is stored: write the checkpoint whole again, or load it as is.

    A run passes over a folder with a bad shard [Q-COMMITTED], so the whole one comes first.
    """
    lost = f"what was private to rank {', '.join(map(str, loss.ranks[:8]))}: {listed(s.private)}"
    loses = lost if loss.private else "nothing"
    words = s.target or ("--world-size", str(s.world_size or 1))
    out = beside(s.run or s.path, "repaired")
    argv = ("ckptspec", "reshard", word(s.path), word(out), *words)
    nbytes = sum(loss.sizes.values())
    text = "every byte that ranks share has another copy: write the checkpoint whole again, every byte verified"
    yield Advice("repair", code, text, {"bytes": sum(loss.recoverable.values())}, argv, loses, Cost(nbytes, MEMORY))
    call = "ckptspec.load(path, into)" if not loss.private else 'ckptspec.load(path, into, private="keep")'
    text = f"load this folder by its path as it is: {call} reads the other copies, and says so"
    yield Advice("recover", code, text, {"private": "keep"} if loss.private else {}, (), loses, Cost(nbytes))


def by_map(s: Situation, code: str) -> Advice:
    """Return the advice to let the names that seem to be the same be written as a map, and to load with that."""
    argv = ("ckptspec", "validate", word(s.path), *s.words, "--write-map", MAP)
    names = "1 name" if s.proposed == 1 else f"{s.proposed:,} names"
    text = (
        f"let {names} of one dtype and shape be written to {MAP}, read it, and load with names= or reshard with --map"
    )
    return Advice("map", code, text, {"names": s.proposed}, argv if s.words else ())


def by_rule(s: Situation, code: str) -> Advice:
    """Return what rules.json advises for a rule, the caller's paths filled in."""
    template = schemas.rules()[code].advice if code in schemas.rules() else "report this: no rule has this code"
    path = shlex.quote(s.path)
    text = template.replace("{path}", path).replace("{run}", shlex.quote(s.run) if s.run else "RUN")
    return Advice("rule-" + code.lower(), code, text)


def _appended(finding: Finding) -> bool:
    return finding.code == "S-NBYTES" and "appended" in finding.message


def _for(finding: Finding, s: Situation) -> Iterator[Advice]:
    """Yield the advice for one finding."""
    if PASSED_OVER in finding.advice:
        yield look_at_newer(s, finding.code)
    elif finding.code in MOVES:
        yield from _move(finding, s)
    elif finding.code == "R-TARGET" and finding.code in s.prepared:
        yield from s.prepared[finding.code]
    elif finding.code == "R-NAME" and finding.severity == "error" and s.proposed:
        yield by_map(s, finding.code)
        yield by_rule(s, finding.code)
    elif _appended(finding):
        yield cut_tail(s, finding)
    elif finding.code in PUT_BACK:
        yield restore(s, finding.code)
    else:
        yield by_rule(s, finding.code)
    if finding.severity == "error" and finding.code in MENDED and s.loss is not None and s.loss.mended:
        yield from mend(s, s.loss, finding.code)
    if finding.severity == "error" and finding.code not in ON_TARGET:
        fallback = fall_back(s, finding.code)
        if fallback is not None:
            yield fallback


def _move(finding: Finding, s: Situation) -> Iterator[Advice]:
    """Yield the advice for another world size or layout: where it may reshard that comes first, else what was saved."""
    saved = [same_world(s)] if finding.code == "R-WORLD" else []
    if finding.severity == "error":
        yield from saved or [by_rule(s, finding.code)]
    yield from s.prepared.get(finding.code, ())
    if finding.severity != "error":
        yield from saved


def _rank(advice: Advice) -> tuple[int, int]:
    """Return the order of advice: what loses least first, of those a repair first and general words last."""
    first = advice.id.startswith("cut") or advice.id == "repair"
    return advice.cost.steps_lost, 0 if first else 2 if advice.id.startswith("rule-") else 1


def decide(findings: Sequence[Finding], advice: Sequence[Advice], loss: Loss | None = None) -> str:
    """Return load, reshard, repair, fallback or stop: what a launcher should do without asking anybody."""
    errors = [f for f in findings if f.severity == "error"]
    if not errors:
        return "reshard" if any(f.code in MOVES for f in findings) else "load"
    if all(f.code in ON_TARGET for f in errors):
        return "stop"
    if all(_appended(f) for f in errors) and all(a.argv for a in advice if a.id.startswith("cut")):
        return "repair"
    if loss is not None and loss.mended and all(f.code in MENDED for f in errors):
        return "repair"
    return "fallback" if any(a.id == "fallback" for a in advice) else "stop"


@dataclass(frozen=True)
class Counsel:
    """Findings that name their advice, the advice itself, least loss first, and the decision."""

    findings: tuple[Finding, ...]
    advice: tuple[Advice, ...]
    decision: str


def advise(findings: Sequence[Finding], situation: Situation) -> Counsel:
    """Return the advice for all findings of one report; each advice is there once, however many findings name it."""
    known: dict[str, Advice] = {}
    named: list[Finding] = []
    for finding in findings:
        ids = []
        if finding.severity != "info":
            for advice in _for(finding, situation):
                if advice.id == "cut" and advice.id in known and known[advice.id] != advice:
                    advice = replace(advice, id=f"cut-{finding.where.rank}")
                known.setdefault(advice.id, advice)
                ids.append(advice.id)
        named.append(finding.advised(*ids))
    ranked = tuple(sorted(known.values(), key=_rank))
    return Counsel(tuple(named), ranked, decide(findings, ranked, situation.loss))
