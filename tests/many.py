"""Thousands of simulated ranks agree over one real TCPStore; run as a script by test_scale.

Usage: many.py WORLD PROCESSES. Every rank is a thread with a store connection of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from datetime import timedelta

import torch.distributed as dist
from ranks import free_port

from ckptspec.engine.agree.channel import Channel
from ckptspec.errors import SaveError

PATIENCE = 600.0


def rank_main(rank: int, world: int, port: int, outcomes: list[str]) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=PATIENCE), wait_for_workers=False)
    channel = Channel(store, rank, world, silence=PATIENCE, threaded=False)
    for number in range(3):
        attempt = channel.attempt("save", number)
        if number == 1 and rank == world // 2:
            assert attempt.fail(OSError(28, "No space left on device")).rank == rank
            continue
        try:
            if rank == 0:
                attempt.announce("open", b"step %d" % number)
            assert attempt.await_("open") == b"step %d" % number
            attempt.post("hand-in", str(rank).encode())
            if rank == 0:
                assert [int(h) for h in attempt.collect("hand-in")] == list(range(world))
                attempt.decide_commit()
                attempt.done(b"committed %d" % number)
            assert attempt.outcome() == b"committed %d" % number
            failed = None
        except SaveError as e:
            failed = e.rank
        assert failed == (world // 2 if number == 1 else None)
    outcomes.append("as expected")
    channel.close()


def work(ranks: range, world: int, port: int) -> int:
    outcomes: list[str] = []

    def run(rank: int) -> None:
        try:
            rank_main(rank, world, port, outcomes)
        except BaseException:
            traceback.print_exc()

    threading.stack_size(256 << 10)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0 if len(outcomes) == len(ranks) else 1


def main() -> int:
    world, processes = int(sys.argv[1]), int(sys.argv[2])
    port = free_port()
    children = []
    for i in range(processes):
        pid = os.fork()
        if pid == 0:
            os._exit(work(range(i, world, processes), world, port))
        children.append(pid)
    store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    del store
    print(f"{world} ranks in {processes} processes: {codes}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
