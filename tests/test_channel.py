"""Ranks agree whatever dies: real processes over a real store, killed and stopped at every point that matters."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from channel_ranks import SAVE_ID, SILENCE, Scenario, as_threads, load, rank_main, save, serve_main

from ckptspec.engine.agree.channel import Attempt, Channel, LocalStore
from ckptspec.engine.agree.line import Line, StoreLostError
from ckptspec.engine.agree.pulse import Beat
from ckptspec.engine.agree.store import BATCH
from ckptspec.engine.saves import commit
from ckptspec.errors import CkptspecError, CommitUncertainError, SaveError, StateError

# ---- real processes --------------------------------------------------------------------------------------------------

SCENARIOS = [
    Scenario("all is well"),
    Scenario("all is well at rank 0's store", served_by_rank_0=True),
    Scenario("a rank raises", {(2, "opened"): "raises"}),
    Scenario("a rank dies before its hand-in", {(2, "written"): "dies"}),
    Scenario("a rank dies after its hand-in", {(2, "posted"): "dies"}),
    Scenario("a rank is stopped", {(1, "opened"): "stops"}),
    Scenario("a rank is slow", {(1, "opened"): "sleeps"}),
    Scenario("the coordinator dies before the decision", {(0, "ready"): "dies"}),
    Scenario("the coordinator dies after the decision", {(0, "decided"): "dies"}),
    Scenario("the coordinator dies after the rename", {(0, "durable"): "dies"}),
    Scenario("the coordinator is stopped after the decision", {(0, "decided"): "stops"}),
    Scenario("the store dies early", {(0, "opened"): "dies"}, served_by_rank_0=True),
    Scenario("the store dies late", {(0, "durable"): "dies"}, served_by_rank_0=True),
    Scenario("the store is stopped", {(0, "decided"): "stops"}, served_by_rank_0=True),
]
# Started on the same keys once those of the first are over, as a launcher does.
RESTARTS = [Scenario("after a restart", store="a rank dies before its hand-in")]
LIMIT = 60.0


class Ranks:
    """The processes of all scenarios, running at the same time, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[tuple[str, int], Any] = {}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "channel_ranks"])
        self.context = context
        self.over = context.Event()
        stores = [scenario.name for scenario in SCENARIOS if not scenario.served_by_rank_0]
        self.server = context.Process(target=serve_main, args=(str(folder / "ports"), stores, self.over), daemon=True)
        self.server.start()
        self.wait(lambda: (folder / "ports").exists())
        self.ports = json.loads((folder / "ports").read_text())

    def start(self, scenario: Scenario) -> None:
        area = self.folder / scenario.name
        area.mkdir()
        port = self.ports.get(scenario.store or scenario.name, 0)
        for rank in range(scenario.world):
            process = self.context.Process(target=rank_main, args=(scenario, rank, str(area), port), daemon=True)
            process.start()
            self.processes[scenario.name, rank] = process

    def wait(self, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT
        while not ready():
            assert time.monotonic() < until, "the ranks take too long"
            time.sleep(0.02)

    def results(self, name: str) -> dict[int, dict[str, Any]]:
        """Return what the ranks of a scenario wrote, once all of them ended but those that are stopped."""
        mine = {rank: process for (scenario, rank), process in self.processes.items() if scenario == name}
        scenario = next(s for s in SCENARIOS + RESTARTS if s.name == name)
        stopped = {rank for (rank, _), what in scenario.trouble.items() if what == "stops"}
        self.wait(lambda: not any(process.is_alive() for rank, process in mine.items() if rank not in stopped))
        return self.written(name)

    def written(self, name: str) -> dict[int, dict[str, Any]]:
        return {int(path.stem): json.loads(path.read_text()) for path in (self.folder / name).glob("?.json")}

    def visible(self, name: str) -> bool:
        return commit.saved(str(self.folder / name / "run" / "step-00000002")) == SAVE_ID

    def end(self) -> None:
        self.over.set()
        for process in [*self.processes.values(), self.server]:
            if process.is_alive():
                process.kill()
            process.join()
        forkserver._forkserver._stop()  # as CPython's own tests do; it would last until this process ends


@pytest.fixture(scope="module", autouse=True)  # they run while the tests before theirs do
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    tests = Path(__file__).resolve().parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent)]))
        patch.setenv("OMP_NUM_THREADS", "1")
        started = Ranks(tmp_path_factory.mktemp("ranks"))
    try:
        for scenario in SCENARIOS:
            started.start(scenario)
        yield started
    finally:
        started.end()


def raised(call: Callable[..., Any], *args: Any, **how: Any) -> SaveError:
    with pytest.raises(SaveError) as caught:
        call(*args, **how)
    return caught.value


# ---- ranks that are threads ------------------------------------------------------------------------------------------


class Counting:
    """A store that records what is asked of it that changes it, heartbeats apart, and counts batch reads and bytes."""

    def __init__(self) -> None:
        self.inner = LocalStore()
        self.changes: Counter[str] = Counter()
        self.batches = 0
        self.sent = 0
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        call = getattr(self.inner, name)

        def counted(*args: Any) -> Any:
            beat = isinstance(args[0], str) and "/hb/" in args[0]
            with self.lock:
                self.batches += name == "multi_get"
                self.sent += sum(len(arg) for arg in args if isinstance(arg, (str, bytes)))
                if name in ("set", "compare_set") or (name == "add" and args[1]):
                    self.changes[name] += not beat
            return call(*args)

        return counted


def test_rank_order_bodies_and_announcements_arrive_as_sent() -> None:
    def act(channel: Channel) -> list[bytes]:
        attempt = channel.attempt()
        if channel.rank == 0:
            attempt.announce("open", b"")
        seen = [attempt.await_("open")]
        digest = f"d{channel.rank % 2}"
        attempt.body(digest, digest.encode() * 3)
        attempt.post("declare", bytes([channel.rank]))
        if channel.rank == 0:
            seen += attempt.collect("declare")
            seen += [v for _, v in sorted(attempt.bodies(["d1", "d0", "d1"]).items())]
        attempt.post("hand-in", b"")
        if channel.rank == 0:
            attempt.collect("hand-in")
            attempt.decide_commit()
            assert attempt.committing
            attempt.done(b"end")
        return [*seen, attempt.outcome()]

    results = as_threads(4, LocalStore(), act, silence=5)
    assert results[0] == [b"", b"\0", b"\1", b"\2", b"\3", b"d0d0d0", b"d1d1d1", b"end"]
    assert results[1:] == [[b"", b"end"]] * 3


@pytest.mark.parametrize("world", [1, 2, 5])
def test_the_keys_of_past_attempts_are_removed(world: int, tmp_path: Path) -> None:
    store = LocalStore()

    def act(channel: Channel) -> int:
        for step in range(6):
            save(channel, str(tmp_path), step, lambda point: None)
        return sum("/hb/" not in key for key in store._values)

    kept = as_threads(world, store, act, silence=5)
    assert max(kept) <= 2 * (5 + 4 * world)  # the last attempt, and the one before it at most
    assert len(os.listdir(tmp_path)) == 6


@pytest.mark.parametrize("world", [2, 5, 17])
def test_a_save_costs_each_rank_the_same_few_messages_and_rank_0_reads_in_batches(world: int, tmp_path: Path) -> None:
    store = Counting()
    as_threads(world, store, lambda c: save(c, str(tmp_path), 1, lambda point: None), silence=60)
    # Each rank says hello, gets a receipt (rank 0 needs none), claims the body, hands in and acknowledges.
    # Once for all: the incarnation, the opening, the body, the decision and the outcome.
    assert store.changes == {"set": 3 * world - 1 + 4, "add": 2 * world, "compare_set": 1}
    assert store.batches == 3  # hellos, hand-ins, bodies


def test_a_body_is_sent_once_for_each_digest() -> None:
    store = Counting()
    body = b"x" * 100_000

    def act(channel: Channel) -> None:
        attempt = channel.attempt("load")
        attempt.body("d", body)
        attempt.post("loaded", b"")
        if channel.rank == 0:
            attempt.collect("loaded")
            assert attempt.bodies(["d"]) == {"d": body}
            attempt.done()
        attempt.outcome()

    assert as_threads(8, store, act, silence=30) == [None] * 8
    assert len(body) < store.sent < 2 * len(body)


def test_more_ranks_than_one_batch_are_collected_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptspec.engine.agree.store.BATCH", 3)
    assert BATCH > 3

    def act(channel: Channel) -> list[bytes]:
        attempt = channel.attempt("load")
        attempt.post("loaded", str(channel.rank).encode())
        found = attempt.collect("loaded") if channel.rank == 0 else []
        if channel.rank == 0:
            attempt.done()
        attempt.outcome()
        return found

    assert as_threads(10, LocalStore(), act, silence=30)[0] == [str(rank).encode() for rank in range(10)]


def test_one_rank_needs_no_thread_and_keeps_its_own_error() -> None:
    before = threading.active_count()
    channel = Channel(LocalStore(), 0, 1)
    assert threading.active_count() == before
    error = StateError("a set cannot be saved")
    assert channel.attempt().fail(error) is error
    attempt = channel.attempt()
    failed = attempt.fail(OSError(28, "No space left on device", "/x"))
    assert str(failed) == "/x: No space left on device"
    assert attempt.fail(failed) is failed
    attempt = channel.attempt()
    attempt.post("hand-in", b"1")
    assert attempt.collect("hand-in") == [b"1"]
    attempt.done(b"payload")
    assert attempt.outcome() == b"payload"
    assert isinstance(attempt.fail(KeyboardInterrupt()), CommitUncertainError)
    channel.close()
    channel.close()


def failing(channel: Channel, rank: int, phase: str) -> SaveError | None:
    """Run one attempt in which `rank` fails at `phase`; return the error this rank ends with."""
    attempt = channel.attempt()
    try:
        if channel.rank == 0:
            attempt.announce("open", b"")
        attempt.await_("open")
        if channel.rank == rank and phase == "early":
            raise OSError(5, "Input/output error")
        attempt.post("hand-in", b"")
        if channel.rank == rank and phase == "late":
            raise OSError(5, "Input/output error")
        if channel.rank == 0:
            attempt.collect("hand-in")
            attempt.decide_commit()
            if phase == "commit":
                raise OSError(5, "Input/output error")
            attempt.done()
        attempt.outcome()
    except (OSError, SaveError) as e:
        error = attempt.fail(e)
    else:
        return None
    assert attempt.fail(error) is error
    assert raised(attempt.outcome) is error
    return error


@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_failure_is_what_every_rank_raises_and_the_next_attempt_works(rank: int, tmp_path: Path) -> None:
    def act(channel: Channel) -> SaveError | None:
        error = failing(channel, rank, "early")
        assert save(channel, str(tmp_path), 5, lambda point: None) == b"committed 5"
        return error

    results = as_threads(3, LocalStore(), act, silence=5)
    assert [type(error) for error in results] == [SaveError] * 3
    assert {(error.rank, error.message) for error in results} == {(rank, f"rank {rank}: Input/output error")}


def test_an_error_of_the_coordinator_after_the_decision_is_uncertain_on_every_rank() -> None:
    results = as_threads(3, LocalStore(), lambda channel: failing(channel, 0, "commit"), silence=5)
    assert [type(error) for error in results] == [CommitUncertainError] * 3


def test_a_rank_that_fails_after_its_hand_in_never_says_failed_of_a_commit() -> None:
    for _ in range(5):
        results = as_threads(3, LocalStore(), lambda channel: failing(channel, 2, "late"), silence=5)
        if results[0] is None:  # the coordinator won the race for the decision
            assert results[1] is None
            assert type(results[2]) is CommitUncertainError
        else:
            assert [type(error) for error in results] == [SaveError] * 3


def write(attempt: Attempt) -> None:
    """Move bytes for far longer than a heartbeat."""
    for _ in range(1000):
        attempt.progress(1)
        time.sleep(0.01)


def test_long_writing_ends_early_once_another_rank_failed() -> None:
    def act(channel: Channel) -> Any:
        attempt = channel.attempt()
        if channel.rank == 1:
            return attempt.fail(OSError(28, "No space left on device"))
        if channel.rank == 0:
            return attempt.fail(raised(attempt.collect, "hand-in"))
        return attempt.fail(raised(write, attempt))

    results = as_threads(3, LocalStore(), act, silence=2)
    assert {(error.rank, error.message) for error in results} == {(1, "rank 1: No space left on device")}


def test_a_rank_that_skips_a_save_is_named_by_all_others(tmp_path: Path) -> None:
    def act(channel: Channel) -> Any:
        save(channel, str(tmp_path), 1, lambda point: None)
        if channel.rank == 2:
            time.sleep(2.5)
            return None
        return raised(save, channel, str(tmp_path), 2, lambda point: None)

    results = as_threads(4, LocalStore(), act, silence=1)
    for rank in (0, 1, 3):
        assert results[rank].rank == 2
        assert "did not join number 2, last seen in save 1" in results[rank].message


def test_a_rank_that_loads_while_the_others_save_is_told_at_once(tmp_path: Path) -> None:
    def act(channel: Channel) -> SaveError:
        if channel.rank == 1:
            return raised(load, channel)
        return raised(save, channel, str(tmp_path), 1, lambda point: None)

    results = as_threads(3, LocalStore(), act, silence=6)
    assert {error.rank for error in results} <= {0, 1}
    assert all("same order" in error.message for error in results), "silence has other words"


def test_a_rank_that_never_comes_is_named_on_those_that_did() -> None:
    store = LocalStore()
    errors: dict[int, SaveError] = {}

    def come(rank: int) -> None:
        errors[rank] = raised(Channel, store, rank, 4, opening=0.5)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {error.rank for error in errors.values()} == {2}
    assert len(errors) == 3
    assert all("rank(s) 2 never came" in str(error) for error in errors.values())


def test_ranks_that_count_differently_are_told_so() -> None:
    store = LocalStore()
    errors: list[SaveError] = []

    def come(rank: int, world: int) -> None:
        errors.append(raised(Channel, store, rank, world, opening=5))

    threads = [threading.Thread(target=come, args=args) for args in ((0, 2), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    assert all("rank 1 counts 3 ranks, rank 0 2" in str(error) for error in errors)


@pytest.mark.parametrize("receipt", [b"stale nonce 2", b'stale nonce 2 refused ["old news", 1]', None])
def test_the_keys_of_an_older_start_are_not_believed(receipt: bytes | None) -> None:
    store = LocalStore()
    old = "0" * 32
    store.set("ckptspec/open", old)
    for rank in range(2):
        store.set(f"ckptspec/{old}/hb/{rank}", Beat(9, "save", 9).encode())
        store.set(f"ckptspec/{old}/hello/{rank}", b"stale nonce 2")
        if receipt is not None:
            store.set(f"ckptspec/{old}/ok/{rank}", receipt)
    store.set(f"ckptspec/{old}/1/done", b"committed\nold")
    store.set(f"ckptspec/{old}/1/decision", b"commit")

    def act(rank: int) -> None:
        if rank == 0:
            time.sleep(0.3)  # rank 1 reads the old incarnation first
        channel = Channel(store, rank, 2, silence=5)
        found[rank] = load(channel)
        channel.close()

    found: dict[int, bytes] = {}
    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {0: b"all", 1: b"all"}


def test_a_second_process_of_one_rank_is_not_let_in(tmp_path: Path) -> None:
    store = LocalStore()

    def act(channel: Channel) -> Any:
        if channel.rank == 1:
            intruder = raised(Channel, store, 1, 2, opening=0.2)
            assert "runs twice" in str(intruder)
        return save(channel, str(tmp_path), 1, lambda point: None)

    assert as_threads(2, store, act, silence=5) == [b"committed 1"] * 2


def test_rank_0_stays_until_the_others_have_read_the_outcome(tmp_path: Path) -> None:
    store = LocalStore()
    events: list[str] = []

    def rank_thread(rank: int) -> None:
        channel = Channel(store, rank, 2, silence=5)
        attempt = channel.attempt("load")
        attempt.post("loaded", b"")
        if rank == 0:
            attempt.collect("loaded")
            attempt.done()
        else:
            time.sleep(0.5)
            events.append("rank 1 reads")
        attempt.outcome()
        channel.close()
        if rank == 0:
            events.append("rank 0 leaves")

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert events == ["rank 1 reads", "rank 0 leaves"]


def test_only_rank_0_speaks_for_all() -> None:
    def act(channel: Channel) -> None:
        attempt = channel.attempt("load")
        if channel.rank == 1:
            for call in (lambda: attempt.announce("x", b""), lambda: attempt.collect("x"), attempt.decide_commit):
                with pytest.raises(CkptspecError, match="only rank 0"):
                    call()
        attempt.post("loaded", b"")
        if channel.rank == 0:
            with pytest.raises(CkptspecError, match="every hand-in"):
                attempt.done()
            attempt.collect("loaded")
            attempt.done()
        attempt.outcome()

    assert as_threads(2, LocalStore(), act, silence=5) == [None, None]


# ---- the line --------------------------------------------------------------------------------------------------------


class Stuck(LocalStore):
    """A store that stops answering when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.given = 0

    def check(self, keys: Any) -> bool:
        self.answers.wait(30)
        self.given += 1
        return super().check(keys)


def test_a_store_that_does_not_answer_is_given_up_after_the_deadline() -> None:
    store = Stuck()
    line = Line(store)
    assert not line.call(lambda s: s.check(["a"]), 5)
    store.answers.clear()
    with pytest.raises(StoreLostError, match=r"no answer for 0\.4 s"):
        line.call(lambda s: s.check(["a"]), 0.4)
    late: list[bool] = []
    with pytest.raises(StoreLostError):
        line.call(lambda s: late.append(True), 0.2)
    assert store.given == 1, "who asks does not wait for the store"
    store.answers.set()
    assert not line.call(lambda s: s.check(["a"]), 5)
    assert late == [], "what nobody waits for any more is not sent later"
    line.stop()


def test_a_store_that_raises_is_lost_with_its_reason() -> None:
    class Broken(LocalStore):
        def clone(self) -> LocalStore:
            raise RuntimeError("Connection refused\nstack trace")

    line = Line(Broken())
    with pytest.raises(StoreLostError, match=r"Connection refused\Z"):
        line.call(lambda s: s.check(["a"]), 5)
    line.stop()
    with pytest.raises(SaveError, match="Connection refused"):
        Channel(Broken(), 0, 2, silence=1)


def test_a_channel_that_is_dropped_leaves_no_thread() -> None:
    before = threading.active_count()
    store = LocalStore()
    channels = []
    threads = [threading.Thread(target=lambda r=r: channels.append(Channel(store, r, 2))) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert threading.active_count() == before + 2
    channels.clear()
    assert threading.active_count() == before


# ---- how the processes ended -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all is well", "all is well at rank 0's store", "a rank is slow"])
def test_every_rank_is_told_the_same_however_slow_one_is(ranks: Ranks, name: str) -> None:
    results = ranks.results(name)
    assert len(results) == 3
    for result in results.values():
        assert result["save 2"] == "committed 2"
        assert result["load"] == "all"
    assert ranks.visible(name)


def test_a_rank_that_raises_ends_the_save_on_every_rank_with_its_error(ranks: Ranks) -> None:
    results = ranks.results("a rank raises")
    assert len(results) == 3
    for result in results.values():
        assert result["save 1"] == "committed 1"
        assert (result["error"], result["rank"]) == ("SaveError", 2)
        assert "/run/rank-2.shard" in result["text"]
        assert "No space left on device" in result["text"]
        assert "OSError(28" in result["cause"]
    assert not ranks.visible("a rank raises")


@pytest.mark.parametrize(
    ("name", "dead"),
    [
        ("a rank dies before its hand-in", 2),
        ("a rank is stopped", 1),
        ("the coordinator dies before the decision", 0),
    ],
)
def test_a_rank_that_falls_silent_is_named_by_all_others_with_the_deadline(ranks: Ranks, name: str, dead: int) -> None:
    results = ranks.results(name)
    assert set(results) == {0, 1, 2} - {dead}, results
    for result in results.values():
        assert (result["error"], result["rank"]) == ("SaveError", dead)
        assert f"rank {dead} gave no sign of life for {SILENCE:g} s" in result["text"]
        assert "P-SILENCE" in result["text"]
    assert not ranks.visible(name)


def test_a_rank_that_dies_after_its_hand_in_does_not_undo_the_save(ranks: Ranks) -> None:
    results = ranks.results("a rank dies after its hand-in")
    assert set(results) == {0, 1}
    assert all(result["save 2"] == "committed 2" for result in results.values())
    assert all(result["rank"] == 2 for result in results.values()), "the load that follows misses it"
    assert ranks.visible("a rank dies after its hand-in")


@pytest.mark.parametrize(
    ("name", "committed"),
    [
        ("the coordinator dies after the decision", False),
        ("the coordinator dies after the rename", True),
        ("the coordinator is stopped after the decision", False),
        ("the store dies late", True),
        ("the store is stopped", False),
    ],
)
def test_an_outcome_nobody_saw_is_uncertain_and_settled_by_reading(ranks: Ranks, name: str, committed: bool) -> None:
    results = ranks.results(name)
    assert set(results) == {1, 2}
    for result in results.values():
        assert (result["error"], result["rank"]) == ("CommitUncertainError", 0)
        assert "nobody saw" in result["text"]
        assert result["settled"] is committed
    assert ranks.visible(name) is committed


def test_a_store_that_dies_before_a_rank_handed_in_is_a_failure(ranks: Ranks) -> None:
    results = ranks.results("the store dies early")
    assert set(results) == {1, 2}
    for result in results.values():
        # A rank may have handed in by the time the store is gone, and then it cannot know.
        assert result["error"] in ("SaveError", "CommitUncertainError")
        assert result["rank"] == 0
        assert "store" in result["text"]
        assert not result.get("settled", False)
    assert not ranks.visible("the store dies early")


@pytest.mark.parametrize(
    ("name", "sleeper", "error"),
    [
        ("a rank is stopped", 1, "SaveError"),
        ("the coordinator is stopped after the decision", 0, "SaveError"),
        ("the store is stopped", 0, "SaveError"),
    ],
)
def test_who_wakes_up_after_the_others_gave_up_changes_nothing(
    ranks: Ranks, name: str, sleeper: int, error: str
) -> None:
    others = ranks.results(name)
    assert sleeper not in others
    process = ranks.processes[name, sleeper]
    os.kill(process.pid, signal.SIGCONT)
    ranks.wait(lambda: not process.is_alive())
    result = ranks.written(name)[sleeper]
    assert result["error"] == error
    assert not ranks.visible(name)


def test_a_restart_on_the_same_keys_believes_none_of_them(ranks: Ranks) -> None:
    ranks.results("a rank dies before its hand-in")
    for scenario in RESTARTS:
        ranks.start(scenario)
        results = ranks.results(scenario.name)
        assert len(results) == 3
        assert all(result.get("load") == "all" for result in results.values()), results
