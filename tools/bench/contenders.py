"""Owns what is compared: each contender saves a state durably in a new folder and loads it back into the same tensors.

Durable: when `save` returns, every file and every folder entry it made has been through fsync. A contender whose
library leaves that out has it added here, inside the measured time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import State, locals_of, nbytes

import ckptspec


class Contender(Protocol):
    """A way to save and load; `verifies` says whether its load checks the bytes against a digest."""

    name: str
    verifies: bool

    def save(self, path: Path, state: State) -> None:
        """Write `state` below the folder `path`, which does not exist yet; durable on return. Every rank calls it."""

    def load(self, path: Path, state: State) -> None:
        """Fill the tensors of `state` in place from what `save` wrote. Every rank calls it."""


class Ckptspec:
    """This library, through its public names."""

    name, verifies = "ckptspec", True

    def save(self, path: Path, state: State) -> None:
        """Save step 1 of a run folder."""
        ckptspec.save(path, state, step=1)

    def load(self, path: Path, state: State) -> None:
        """Load it in place, every byte verified."""
        ckptspec.load(path / "step-00000001", into=state)


class TorchSave:
    """torch.save of a dict per rank; loaded memory-mapped, which is its faster way."""

    name, verifies = "torch.save", False

    def save(self, path: Path, state: State) -> None:
        """Write one file per rank, then fsync it and its folders."""
        make(path)
        with file_of(path, "pt").open("wb") as out:
            torch.save(locals_of(state), out)
            out.flush()
            os.fsync(out.fileno())
        sync_folders(path)

    def load(self, path: Path, state: State) -> None:
        """Map the file and copy each tensor into place."""
        found = torch.load(file_of(path, "pt"), mmap=True, weights_only=True)
        for name, tensor in locals_of(state).items():
            tensor.copy_(found[name])


class Safetensors:
    """safetensors.torch.save_file per rank; loaded through safe_open."""

    name, verifies = "safetensors", False

    def save(self, path: Path, state: State) -> None:
        """Write one file per rank, then fsync it and its folders."""
        make(path)
        safetensors.torch.save_file(locals_of(state), file_of(path, "safetensors"))
        sync_file(file_of(path, "safetensors"))
        sync_folders(path)

    def load(self, path: Path, state: State) -> None:
        """Open the file and copy each tensor into place."""
        with safetensors.safe_open(file_of(path, "safetensors"), "pt") as found:
            for name, tensor in locals_of(state).items():
                tensor.copy_(found.get_tensor(name))


class DistributedCheckpoint:
    """torch.distributed.checkpoint with its own fsync of files on; its folders are added."""

    name, verifies = "torch.distributed.checkpoint", False

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def save(self, path: Path, state: State) -> None:
        """Save with `threads` writers per rank."""
        writer = dcp.FileSystemWriter(path, sync_files=True, thread_count=self._threads)
        dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())
        sync_folders(path)

    def load(self, path: Path, state: State) -> None:
        """Load in place."""
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=not dist.is_initialized())


class RawDisk:
    """The same bytes from one buffer to one file and back: what the disk gives a program that does nothing else."""

    name, verifies = "raw disk", False

    def __init__(self, state: State) -> None:
        self._buffer = memoryview(torch.ones(nbytes(state), dtype=torch.uint8).numpy())

    def save(self, path: Path, state: State) -> None:
        """Write the buffer with plain writes, then fsync the file and its folders."""
        make(path)
        fd = os.open(file_of(path, "raw"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            done = 0
            while done < len(self._buffer):
                done += os.write(fd, self._buffer[done:])
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folders(path)

    def load(self, path: Path, state: State) -> None:
        """Read the file into the buffer, whose pages are touched."""
        fd = os.open(file_of(path, "raw"), os.O_RDONLY)
        try:
            done = 0
            while done < len(self._buffer):
                done += os.preadv(fd, [self._buffer[done:]], done)
        finally:
            os.close(fd)


def rank() -> int:
    """Return this process's rank, 0 when it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def file_of(path: Path, suffix: str) -> Path:
    """Return this rank's file in a folder."""
    return path / f"rank-{rank()}.{suffix}"


def make(path: Path) -> None:
    """Create the folder; every rank may come first."""
    path.mkdir(exist_ok=True)


def sync_file(path: Path) -> None:
    """fsync a file, or a folder's entries."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folders(path: Path) -> None:
    """fsync a folder and the one it is in."""
    sync_file(path)
    sync_file(path.parent)
