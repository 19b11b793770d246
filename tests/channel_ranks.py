"""The ranks of test_channel as real processes: a small save over a channel, with trouble at a named point."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from ckptspec.engine.agree.channel import Channel
from ckptspec.engine.saves import commit
from ckptspec.errors import CommitUncertainError, SaveError
from ckptspec.format import lexical

SILENCE = 2.5
SAVE_ID = "ab" * 16


@dataclass(frozen=True)
class Scenario:
    """What happens to which rank at which point, and whether rank 0 serves the store itself."""

    name: str
    trouble: dict[tuple[int, str], str] = field(default_factory=dict)
    world: int = 3
    served_by_rank_0: bool = False
    store: str = ""  # the name of the scenario whose store this one uses too

    def at(self, rank: int) -> Callable[[str], None]:
        """Return what a rank calls at every point it passes."""

        def call(point: str) -> None:
            what = self.trouble.get((rank, point))
            if what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == "sleeps":
                time.sleep(2 * SILENCE)
            elif what == "raises":
                raise OSError(28, "No space left on device", f"/run/rank-{rank}.shard")

        return call


def save(channel: Channel, run: str, step: int, at: Callable[[str], None]) -> bytes:
    """Save one file per rank as a real save does, and return what all ranks are told at the end."""
    attempt = channel.attempt("save", step)
    staging = None
    try:
        if channel.rank == 0:
            staging = commit.prepare(run, step, SAVE_ID, trace=at)
            attempt.announce("open", staging.path.encode())
        folder = attempt.await_("open").decode()
        at("opened")
        name = commit.shard_name("rename", channel.rank, SAVE_ID)
        Path(folder, name).write_bytes(b"x" * 100)
        attempt.progress(100)
        commit.sync_staging(folder)
        attempt.body("sha256:same", b"declaration")
        at("written")
        attempt.post("hand-in", name.encode())
        at("posted")
        if staging is None:
            return attempt.outcome()
        shards = [data.decode() for data in attempt.collect("hand-in")]
        assert attempt.bodies(["sha256:same"]) == {"sha256:same": b"declaration"}
        manifest = lexical.seal(f'{{"save_id": "{SAVE_ID}", "step": {step},\n'.encode())
        sizes = dict.fromkeys(shards, 100)
        commit.publish(staging, manifest, sizes, decide=attempt.decide_commit, trace=at)
        attempt.done(b"committed " + str(step).encode())
        at("told")
        return attempt.outcome()
    except (SaveError, OSError) as e:
        failed = attempt.fail(e)
        if staging is not None and not isinstance(failed, CommitUncertainError):
            commit.discard(staging)
        raise failed from e.__cause__ if isinstance(e, SaveError) else e


def load(channel: Channel) -> bytes:
    """Agree on the end of a load."""
    attempt = channel.attempt("load")
    attempt.post("loaded", b"")
    if channel.rank == 0:
        attempt.collect("loaded")
        attempt.done(b"all")
    return attempt.outcome()


def rank_main(scenario: Scenario, rank: int, folder: str, port: int) -> None:
    """One rank's process: two saves and a load, and a file that says how it went."""
    out: dict[str, Any] = {}
    channel = None
    try:
        store = connect(scenario, rank, folder, port)
        channel = Channel(
            store, rank, scenario.world, SILENCE, opening=20, host=0 if scenario.served_by_rank_0 else None
        )
        for step in (1, 2):
            told = save(
                channel, os.path.join(folder, "run"), step, scenario.at(rank) if step == 2 else lambda point: None
            )
            out[f"save {step}"] = told.decode()
        out["load"] = load(channel).decode()
    except SaveError as e:
        out |= {"error": type(e).__name__, "rank": e.rank, "text": str(e), "cause": repr(e.__cause__)}
        if isinstance(e, CommitUncertainError):
            out["settled"] = commit.settle(os.path.join(folder, "run"), 2, SAVE_ID)
    Path(folder, f"{rank}.part").write_text(json.dumps(out))
    Path(folder, f"{rank}.part").rename(Path(folder, f"{rank}.json"))
    if channel is not None:
        channel.close()
    os._exit(0)


def connect(scenario: Scenario, rank: int, folder: str, port: int) -> Any:
    """Return the store of a scenario: the launcher's, or one that rank 0 serves."""
    import torch.distributed as dist

    if scenario.served_by_rank_0:
        at = Path(folder, "port")
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            at.with_suffix(".part").write_text(str(store.port))
            at.with_suffix(".part").rename(at)
            return store
        while not at.exists():
            time.sleep(0.01)
        port = int(at.read_text())
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return client if scenario.served_by_rank_0 else dist.PrefixStore("default_pg", client)


def serve_main(path: str, stores: list[str], over: Event) -> None:
    """Serve a store for each name as a launcher does, until the tests are over; their ports are written to `path`.

    Not one for all: a server looks up the name of whoever connects, and where that is slow, all its clients wait.
    """
    import torch.distributed as dist

    served = {name: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for name in stores}
    Path(path + ".part").write_text(json.dumps({name: store.port for name, store in served.items()}))
    os.rename(path + ".part", path)
    over.wait(120)
    os._exit(0)


def as_threads(world: int, store: Any, act: Callable[[Channel], Any], **how: Any) -> list[Any]:
    """Run `act` on `world` ranks that are threads of this process; return what each returned or raised."""
    results: list[Any] = [None] * world

    def rank_thread(rank: int) -> None:
        channel = None
        try:
            channel = Channel(store, rank, world, **how)
            results[rank] = act(channel)
        except Exception as e:
            results[rank] = e
        if channel is not None:
            channel.close()

    threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results
