"""Runs the public save and load on any number of ranks that are threads of this process, and counts what they cost.

Ranks talk over one store in memory and write real files. What takes time alone is left out: fsync, worker threads,
hearts. Looks for keys that are not there yet are not counted: how many there are depends on the clock.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from ckptspec.engine import documents
from ckptspec.engine.agree import attempt
from ckptspec.engine.agree.attempt import Attempt
from ckptspec.engine.agree.line import Line
from ckptspec.engine.agree.seat import Seat
from ckptspec.engine.agree.store import LocalStore
from ckptspec.engine.pool import Pool, Task
from ckptspec.format import manifest
from ckptspec.pytorch import group, saving

SILENCE = 36_000.0  # nobody falls silent here


class Counts:
    """How often what happened; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.found: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self.found.update(amounts)


class CountingStore(LocalStore):
    """A store that counts messages and the bytes of values, heartbeats left out."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def _count(self, key: str, *values: str | bytes) -> None:
        if "/hb/" not in key:
            self._counts.add(messages=1, message_bytes=sum(map(len, values)))

    def set(self, key: str, value: str | bytes) -> None:
        self._count(key, value)
        super().set(key, value)

    def get(self, key: str, timeout: float = 300.0) -> bytes:
        value = super().get(key, timeout)
        self._count(key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        return super().add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        value = super().compare_set(key, expected, desired)
        self._count(key, value)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = [LocalStore.get(self, key) for key in keys]
        self._count(keys[0], *values)
        return values


class Ranks:
    """The simulated ranks of one job."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.counts = Counts()
        self._here = threading.local()
        self._store = CountingStore(self.counts)
        self._number = 0
        self._buffer = bytearray(8 << 20)
        self._turn = threading.Lock()
        monkeypatch.setattr(group, "world", lambda: group.World(self._here.rank, world))
        monkeypatch.setattr(group, "channel", lambda silence: self._here.channel)
        monkeypatch.setattr(Pool, "run", lambda pool, tasks: self._run_tasks(tasks))
        monkeypatch.setattr(attempt, "pauses", lambda *_: repeat(world / 4000))  # all together look often enough
        monkeypatch.setattr(os, "fsync", lambda fd: None)
        monkeypatch.setattr(os, "open", self._counted(os.open))
        monkeypatch.setattr(documents, "read_shard", self._read(documents.read_shard))
        # Every rank reads the manifest; what that gives is worked out once.
        monkeypatch.setattr(manifest, "parse", lru_cache(maxsize=1)(manifest.parse))
        monkeypatch.setattr(documents, "check_manifest", lambda m: ())

    def _run_tasks(self, tasks: Iterable[Task]) -> None:
        with self._turn:
            for task in tasks:
                task(memoryview(self._buffer))

    def _counted(self, real: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
            name = os.path.basename(path)
            if name.endswith((".json", ".shard")):
                kind = "shards" if name.endswith(".shard") else "manifests"
                made = bool(flags & os.O_CREAT)
                read = os.stat(path).st_size if kind == "manifests" and not made else 0
                self.counts.add(**{f"{kind}_{'made' if made else 'opened'}": 1}, manifest_bytes=read)
            return real(path, flags, *args, **options)

        return opened

    def _read(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(folder: str, entry: Any, *args: Any, **options: Any) -> Any:
            self.counts.add(index_reads=1, **{f"rank{self._here.rank}": 1})
            return real(folder, entry, *args, **options)

        return read

    def run(self, work: Callable[[int], None]) -> dict[str, int]:
        """Run `work` on every rank, each making one save or load, and return what all of them together cost."""
        self._number += 1
        before = Counter(self.counts.found)
        errors: list[BaseException] = []

        def rank_thread(rank: int) -> None:
            seat = Seat(Line(self._store, threaded=False), rank, self.world, SILENCE, None, "0" * 32)
            self._here.rank, self._here.channel = rank, _Channel(seat, self._number)
            try:
                work(rank)
            except BaseException as e:
                errors.append(e)

        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        saving._known.clear()
        found = {key: n - before[key] for key, n in self.counts.found.items()}
        most = max((n for key, n in found.items() if key.startswith("rank")), default=0)
        return {**{key: n for key, n in found.items() if not key.startswith("rank")}, "index_reads_of_a_rank": most}


class _Channel:
    """What a save or load needs of a channel, for one attempt."""

    def __init__(self, seat: Seat, number: int) -> None:
        self.rank, self.world_size = seat.rank, seat.world_size
        self._seat, self._number = seat, number

    def attempt(self, kind: str = "save", step: int | None = None) -> Attempt:
        return Attempt(self._seat, self._number, kind, step)

    def turn(self, place: object | None = None) -> AbstractContextManager[None]:
        return nullcontext()


def folder_of(path: Path) -> Path:
    """The one checkpoint in a run folder."""
    (found,) = (p for p in path.iterdir() if p.name.startswith("step-"))
    return found
