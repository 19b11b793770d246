"""Owns who we are among the ranks of the job, and the channel they agree over; uses no collectives."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from ckptspec.engine.agree.channel import Channel, LocalStore
from ckptspec.errors import SaveError

DEFAULT_SILENCE = 120.0


@dataclass(frozen=True)
class World:
    """This process's rank and the number of ranks."""

    rank: int
    size: int


def world() -> World:
    """Return rank and world size: of the default process group, else of the launcher's environment, else one rank."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return World(int(os.environ.get("RANK", "0")) if size > 1 else 0, size)


def _store() -> Any:
    """Return the process group's store, or the launcher's agent store; the channel talks over a clone of it.

    Holding the original keeps rank 0's server alive until the others have read how a save ended.
    """
    if dist.is_available() and dist.is_initialized():
        return distributed_c10d._get_default_store()
    if _served_by_agent():
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    raise SaveError(
        "WORLD_SIZE is above 1 but the ranks have no store to agree over",
        rule="P-AGREE",
        advice="call torch.distributed.init_process_group() first, or start the job with torchrun",
    )


def _served_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# The process group is kept beside its channel: a new group must never be taken for a dead one at the same address.
_channels: dict[tuple[int, int, int, int], tuple[Any, Channel]] = {}
_opening = threading.Lock()  # two threads that come at once open one channel


def _forked() -> None:
    """In a forked child: the thread that may have held the lock is not here, nor are the channels' own threads."""
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def channel(silence: float = DEFAULT_SILENCE) -> Channel:
    """Return this process's channel, opened at the first call and again when the process group is another one.

    Raises ValueError for a `silence` that is no positive number of seconds; it counts from the next save or load on.
    """
    if isinstance(silence, bool) or not isinstance(silence, (int, float)) or not 0 < silence < math.inf:
        raise ValueError(f"silence must be a positive number of seconds, not {silence!r}")
    here = world()
    group = distributed_c10d._get_default_group() if dist.is_available() and dist.is_initialized() else None
    key = (os.getpid(), here.rank, here.size, id(group))
    with _opening:
        if key not in _channels:
            store = LocalStore() if here.size == 1 else _store()
            _channels.clear()
            host = None if _served_by_agent() else 0
            _channels[key] = group, Channel(store, here.rank, here.size, silence=silence, host=host)
        found = _channels[key][1]
    found.silence = silence
    return found
