"""Owns the demo's story: train, kill one rank in the middle of a save, resume, and prove that nothing is different."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ckptspec
from ckptspec.demo.compare import Part, compare
from ckptspec.demo.launch import Ended, torchrun
from ckptspec.format.shard import TRAILER_MAGIC

# The victim watches for its own shard; a save may rarely be over before it looks.
ATTEMPTS = 3


class DemoError(Exception):
    """The demo cannot go on, or has shown what it should not; the message says what."""


@dataclass(frozen=True)
class Setting:
    """How much is trained, and when which rank dies: in the middle of saving step `dies_at`."""

    ranks: int = 4
    steps: int = 12
    every: int = 3
    victim: int = 2
    dies_at: int = 9


@dataclass(frozen=True)
class Demo:
    """The folders of one demo: both run folders, the final memory of both, and what the jobs printed."""

    root: Path
    setting: Setting

    def train(self, name: str, log: str, *more: str) -> Ended:
        """Train the run `name` to its end, or to its accident."""
        s = self.setting
        arguments = [str(self.root / name), str(self.root / "final" / name), "--steps", str(s.steps)]
        return torchrun([*arguments, "--every", str(s.every), *more], s.ranks, self.root / f"{log}.log")

    def finish(self, name: str, log: str) -> Ended:
        """Train the run `name` to its end; raises DemoError saying why when it does not get there."""
        ended = self.train(name, log)
        if ended.code != 0:
            raise DemoError("\n".join([f"the job ended with code {ended.code}; see {ended.log}", *ended.why()]))
        return ended


def run(directory: Path | None = None, setting: Setting | None = None) -> int:
    """Run the demo in `directory` (new or empty; default: a new temporary folder) and return its exit code.

    0: the resumed run ended byte-equal; 1: it did not, or the accident could not be shown; 2: the folder is in use;
    3: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        print("the demo trains with torch, which is not installed: pip install 'ckptspec[torch]'", file=sys.stderr)
        return 3
    if directory is not None and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        print(f"{directory} is not an empty folder; give a new one", file=sys.stderr)
        return 2
    root = Path(tempfile.mkdtemp(prefix="ckptspec-demo-")) if directory is None else directory
    root.mkdir(parents=True, exist_ok=True)
    try:
        return _tell(Demo(root, setting or Setting()))
    except DemoError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1


def _tell(demo: Demo) -> int:
    s = demo.setting
    _say(
        f"A transformer learns the source text of the Python standard library on {s.ranks} ranks (gloo):",
        "bf16 parameters on every rank; fp32 master weights and both Adam moments cut flat over the ranks (ZeRO-1);",
        f"{s.steps} steps, a checkpoint every {s.every}. Everything is in {demo.root}",
    )
    _undisturbed(demo)
    _accident(demo)
    _resumed(demo)
    parts = compare(demo.root / "final" / "uninterrupted", demo.root / "final" / "interrupted", s.ranks)
    return _verdict(demo, parts)


def _undisturbed(demo: Demo) -> None:
    _say("", "1. A run that nobody disturbs")
    ended = demo.finish("uninterrupted", "1-uninterrupted")
    steps = ended.lines("step ")
    _say(f"   {ended.seconds:.1f} s; first {steps[0]}, last {steps[-1]}", "   written:")
    folders = sorted((demo.root / "uninterrupted").glob("step-*"))
    _say(*(f"      {line}" for folder in folders for line in _listing(folder, brief=folder != folders[-1])))


def _accident(demo: Demo) -> None:
    s, run_folder = demo.setting, demo.root / "interrupted"
    _say("", f"2. The same run, but rank {s.victim} gets SIGKILL in the middle of saving step {s.dies_at}")
    before = f"step-{s.dies_at - s.every:08d}"
    for attempt in range(1, ATTEMPTS + 1):
        ended = demo.train("interrupted", f"2-killed-{attempt}", "--victim", str(s.victim), "--dies-at", str(s.dies_at))
        newest = ckptspec.latest(run_folder)
        if ended.code != 0 and ended.lines("victim:") and newest is not None and Path(newest).name == before:
            break
        if ended.code != 0 and not ended.lines("victim:"):
            raise DemoError("\n".join([f"the job ended before the accident; see {ended.log}", *ended.why()]))
        _say(f"   attempt {attempt}: the save was over before the signal; once more")
        shutil.rmtree(run_folder)
        shutil.rmtree(demo.root / "final" / "interrupted", ignore_errors=True)
    else:
        raise DemoError(f"in {ATTEMPTS} attempts the victim never died before its save was committed")
    _say(f"   {ended.seconds:.1f} s; {ended.lines('step ')[-1]}", *(f"   {line}" for line in ended.lines("victim:")))
    _say(f"   the job ended with code {ended.code}; left behind:")
    _say(*(f"      {line}" for folder in sorted(run_folder.glob(".tmp-*")) for line in _listing(folder)))
    if any((folder / "manifest.json").exists() for folder in run_folder.glob(".tmp-*")):
        raise DemoError("the victim died after the manifest was written")
    _show("latest", str(run_folder))


def _resumed(demo: Demo) -> None:
    _say("", "3. The job starts again")
    ended = demo.finish("interrupted", "3-resumed")
    expected = f"resumed from step-{demo.setting.dies_at - demo.setting.every:08d}"
    if ended.lines("resumed") != [expected]:
        raise DemoError(f"expected '{expected}', the job printed {ended.lines('resumed')}")
    _say(f"   {ended.seconds:.1f} s; {expected}; last {ended.lines('step ')[-1]}")
    _show("validate", str(demo.root / "interrupted"), "--level", "bytes")


def _verdict(demo: Demo, parts: Iterable[Part]) -> int:
    _say("", f"4. The memory of all {demo.setting.ranks} ranks at the end of both runs, byte by byte")
    _say(f"   {'part':12}{'bytes':>10}  sha256 uninterrupted, then resumed")
    different = False
    for part in parts:
        verdict = f"DIFFERS on rank(s) {', '.join(map(str, part.differs))}" if part.differs else "equal"
        _say(f"   {part.name:12}{part.nbytes:>10,}  {part.digests[0]}  {verdict}", f"   {'':24}{part.digests[1]}")
        different |= bool(part.differs)
    _say("   The runs differ." if different else "   The resumed run is the uninterrupted run, bit for bit.", "")
    run_folder = shlex.quote(str(demo.root / "interrupted"))
    _say(
        "Look further:",
        f"   ckptspec inspect {run_folder}                   what is inside",
        f"   ckptspec validate {run_folder} --level bytes    is every byte what was saved?",
        f"   ckptspec validate {run_folder} --world-size 8   could it resume on 8 ranks, and if not, what then?",
        f"   ckptspec latest {run_folder} --format json      where a job would resume",
        f"   rm -r {shlex.quote(str(demo.root))}",
    )
    return int(different)


def _listing(folder: Path, *, brief: bool = False) -> list[str]:
    """Return one line for a folder and, unless `brief`, one for each file in it."""
    files = sorted(folder.iterdir())
    total = f"{folder.name + '/':<26} {len(files)} files, {sum(file.stat().st_size for file in files):,} bytes"
    return [total] if brief else [total, *map(_entry, files)]


def _entry(file: Path) -> str:
    torn = file.suffix == ".shard" and not file.read_bytes().endswith(TRAILER_MAGIC)
    return f"   {file.name:<23} {file.stat().st_size:>9,}" + ("   torn: it has no end mark" if torn else "")


def _show(*arguments: str) -> None:
    """Run the command line as a user would and print what it said."""
    done = subprocess.run([sys.executable, "-m", "ckptspec", *arguments], capture_output=True, text=True, timeout=60)
    said = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    _say(f"   $ ckptspec {shlex.join(arguments)}", *(f"     {line}" for line in said))
    if done.returncode != 0:
        raise DemoError(f"ckptspec {arguments[0]} ended with code {done.returncode}")


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)
