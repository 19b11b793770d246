"""Owns the copy of a state that a save goes on from while training changes the state; its memory is kept and reused."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from ckptspec.errors import SaveError
from ckptspec.pytorch.record import Capture, Leaf

PAGE = 4096
PART = 16 << 20  # bytes that one thread copies at once
THREADS = 4
SMALL = 64  # bytes: where small tensors begin, so that a view of any dtype is aligned


@dataclass(frozen=True)
class _Place:
    """Where one tensor is copied to: its name, its leaf, and its bytes in the staging memory."""

    name: str
    leaf: Leaf
    start: int
    nbytes: int


@dataclass(frozen=True)
class Copied:
    """A captured state of copies; `rest` makes those that were to be made later."""

    captured: Capture
    rest: Callable[[], None]


class Staging:
    """Pre-faulted memory for one copy of this rank's state, on the host; `limit` bounds it in bytes.

    Fresh pages fault at a tenth of the speed at which touched ones are copied to, so the memory stays for the next
    save. Tensors of a device are copied on a stream of their own into pinned memory; that has not run on a device here.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._memory: Tensor | None = None
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """The bytes held for staging."""
        return 0 if self._memory is None else self._memory.numel()

    def take(self, captured: Capture, later: Collection[str] = ()) -> Copied:
        """Return the captured state with a copy of every tensor in place of the live one; `later` are copied by `rest`.

        Raises SaveError [P-STAGING] where that takes more than the limit. The copy is overwritten by the next one.
        """
        places = [*_places(captured)]
        total = places[-1].start + places[-1].nbytes if places else 0
        memory = self._room(total, any(p.leaf.tensor.device.type != "cpu" for p in places))
        leaves = dict(captured.leaves)
        now: list[tuple[Tensor, Tensor]] = []
        rest: list[tuple[Tensor, Tensor]] = []
        for p in places:
            t = p.leaf.tensor
            copy = memory[p.start : p.start + p.nbytes].view(t.dtype).view(t.shape)
            (rest if p.name in later else now).append((copy, t))
            leaves[p.name] = replace(p.leaf, tensor=copy)
        _copy_pairs(now)
        return Copied(replace(captured, leaves=leaves), partial(_copy_pairs, rest))

    def _room(self, nbytes: int, pinned: bool) -> Tensor:
        """Return staging memory of at least so many bytes, the same as before where it is enough."""
        if self.limit is not None and nbytes > self.limit:
            raise SaveError(
                "a copy of the state does not fit into the memory that staging may use",
                rule="P-STAGING",
                expected=f"<= {self.limit:,} bytes",
                found=f"{nbytes:,} bytes",
                advice="give a larger staging_memory, or save with ckptspec.save, which writes from the state itself",
            )
        if self._memory is None or self._memory.numel() < nbytes or (pinned and not self._pinned):
            self._memory = None  # the old memory goes before the new comes
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if pinned else _faulted(nbytes)
            self._pinned = pinned
        return self._memory

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None


def _faulted(nbytes: int) -> Tensor:
    """Return memory whose pages are there already."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)


def _places(captured: Capture) -> Iterator[_Place]:
    """Yield where each tensor goes: large ones at pages, small ones one after another."""
    at = 0
    for name, leaf in captured.leaves.items():
        nbytes = leaf.tensor.numel() * leaf.tensor.element_size()
        unit = PAGE if nbytes >= PAGE else SMALL
        at = -(-at // unit) * unit
        yield _Place(name, leaf, at, nbytes)
        at += nbytes


def _copy(to: Tensor, live: Tensor, streams: dict[torch.device, torch.Stream]) -> None:
    """Copy one tensor that is not plain memory of the host."""
    if live.device.type == "cpu":
        to.copy_(live)
        return
    if live.device not in streams:
        streams[live.device] = torch.Stream(live.device)
        streams[live.device].wait_stream(torch.accelerator.current_stream(live.device))
    with streams[live.device]:
        to.copy_(live, non_blocking=True)


def _plain(t: Tensor) -> bool:
    return t.device.type == "cpu" and t.is_contiguous() and not t.is_conj() and not t.is_neg()


def _slices(to: Tensor, live: Tensor) -> Iterator[tuple[Any, Any]]:
    """Yield a contiguous tensor's bytes and those of its copy, in parts that threads share out."""
    out, source = (t.detach().reshape(-1).view(torch.uint8).numpy() for t in (to, live))
    for at in range(0, len(source), PART):
        yield out[at : at + PART], source[at : at + PART]


def _copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each live tensor into its copy, and wait until that is done."""
    streams: dict[torch.device, torch.Stream] = {}
    parts: list[tuple[Any, Any]] = []
    for copy, live in pairs:
        if _plain(live):
            parts += _slices(copy, live)
        else:
            _copy(copy, live, streams)
    _copy_all(parts)
    for stream in streams.values():
        stream.synchronize()


def _copy_all(parts: Sequence[tuple[Any, Any]]) -> None:
    """Copy with threads of our own: torch's wait for each other after every tensor, long where cores are busy."""

    faults: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for out, source in parts[first::threads]:
                numpy.copyto(out, source)
        except BaseException as e:  # carried to the thread that asked
            faults.append(e)

    threads = max(1, min(THREADS, len(os.sched_getaffinity(0)), len(parts)))
    # Plain threads: a pool of concurrent.futures takes no work once the interpreter is about to go.
    others = [threading.Thread(target=work, args=(first,), name="ckptspec-copy") for first in range(1, threads)]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()
    if faults:
        raise faults[0]
