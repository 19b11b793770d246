"""A folder and a bucket are the same store to who writes there, and one that cannot commit is found out."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_server
from s3_server import Faults, Server

from ckptspec.cli.main import main
from ckptspec.errors import SaveError
from ckptspec.storage import bucket
from ckptspec.storage.base import Store, is_url, join, plain
from ckptspec.storage.folder import Folder
from ckptspec.storage.local import ShortReadError
from ckptspec.storage.stores import open_store, prove, split

MIB = 1 << 20
PART = 5 * MIB


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server.serve() as running:
        yield running


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Faults]]:
    with s3_server.serve_with_faults() as (running, faults):
        lead(monkeypatch, running)
        yield running, faults


def lead(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "place")
    lead(monkeypatch, server)
    return open_store(f"s3://{server.bucket}/{tmp_path.name}")


def put(store: Store, key: str, data: bytes) -> None:
    store.put(key, [memoryview(data)], len(data), PART)


def get(store: Store, key: str, offset: int, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    store.read_into(key, memoryview(found), offset)
    return bytes(found)


# ---- what every store does -------------------------------------------------------------------------------------------


def test_a_file_is_put_listed_read_in_ranges_and_deleted(store: Store) -> None:
    assert not store.list("")
    put(store, "a/b/c", bytes(range(100)))
    put(store, "a/d", b"d")
    put(store, "top", b"")
    assert {n: s.nbytes for n, s in store.list("a").files.items()} == {"d": 1}
    assert store.list("a").folders == {"b"}
    assert (set(store.list("").files), store.list("").folders) == ({"top"}, {"a"})
    assert store.stat("a/b/c").nbytes == 100
    assert get(store, "a/b/c", 10, 5) == bytes(range(10, 15))
    put(store, "a/d", b"another")
    assert get(store, "a/d", 0, 7) == b"another"
    store.delete("a/d")
    store.delete("a/d")
    assert set(store.list("a").files) == set()
    with pytest.raises(FileNotFoundError) as missing:
        store.stat("a/d")
    assert missing.value.errno == errno.ENOENT
    assert str(missing.value.filename).endswith("a/d")


def test_bytes_beyond_the_end_are_a_short_read(store: Store) -> None:
    put(store, "x", b"12345")
    with pytest.raises(ShortReadError) as short:
        get(store, "x", 3, 10)
    assert (short.value.expected, short.value.found) == (10, 2)
    with pytest.raises(ShortReadError):
        get(store, "x", 50, 1)


def test_a_conditional_put_has_one_winner(store: Store) -> None:
    store.put_if_absent("m", b"first")
    with pytest.raises(FileExistsError):
        store.put_if_absent("m", b"second")
    assert get(store, "m", 0, 5) == b"first"


def test_a_file_in_parts_is_whole_and_one_that_fails_leaves_nothing(store: Store, server: Server) -> None:
    parts = [bytes([i]) * PART for i in range(2)] + [b"end"]
    whole = b"".join(parts)
    assert store.put("big", map(memoryview, parts), len(whole), PART).nbytes == len(whole)
    assert store.stat("big").nbytes == len(whole)
    assert get(store, "big", PART - 1, 2) == b"\0\1"
    assert get(store, "big", len(whole) - 3, 3) == b"end"

    def broken() -> Iterator[memoryview]:
        yield memoryview(parts[0])
        yield memoryview(parts[1])
        raise RuntimeError("the bytes are damaged")

    with pytest.raises(RuntimeError, match="damaged"):
        store.put("broken", broken(), len(whole), PART)
    assert set(store.list("").files) == {"big"}
    assert server.uploads() == []


def test_a_store_that_commits_is_proved_and_keeps_no_trace_of_it(store: Store) -> None:
    prove(store)
    assert not store.list("")


# ---- object stores ---------------------------------------------------------------------------------------------------


def test_a_store_that_ignores_conditions_is_refused(faulty: tuple[Server, Faults]) -> None:
    _, faults = faulty
    store = open_store("s3://bucket/run")
    prove(store)
    faults.deaf = True
    with pytest.raises(SaveError, match="does not keep the condition of a put") as refused:
        prove(store)
    assert refused.value.rule == "P-PROBE"
    assert refused.value.where.file == "s3://bucket/run"
    assert faults.objects == {}
    faults.deaf, faults.unable = False, True
    with pytest.raises(SaveError, match="does not keep the condition of a put"):
        prove(store)


def test_what_was_sent_is_compared_with_the_stores_own_sum(faulty: tuple[Server, Faults]) -> None:
    _, faults = faulty
    store = open_store("s3://bucket/run")
    prove(store)
    faults.etags = False  # from now on the tags are of other bytes
    for nbytes in (10, 2 * PART):
        with pytest.raises(OSError, match="other bytes than were sent"):
            put(store, "x", bytes(nbytes))
    prove(store)  # found out: this store's tags are no sums
    put(store, "x", bytes(10))


def test_a_busy_store_and_a_cut_answer_are_met_with_another_try(faulty: tuple[Server, Faults]) -> None:
    _, faults = faulty
    store = open_store("s3://bucket")
    faults.busy = 2
    put(store, "x", b"0123456789" * 1000)
    faults.busy, faults.cut = 1, 1
    assert get(store, "x", 10, 5000) == b"0123456789" * 500
    assert (faults.busy, faults.cut) == (0, 0)


def test_errors_of_the_library_have_a_number_the_address_and_one_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead(monkeypatch, server)
    with pytest.raises(FileNotFoundError, match="no such bucket") as missing:
        put(open_store("s3://no-such-bucket-here"), "x", b"")
    assert "\n" not in str(missing.value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    with pytest.raises(OSError, match="AWS_ALLOW_HTTP=true") as refused:
        put(open_store("s3://bucket"), "x", b"")
    assert refused.value.errno == errno.EINVAL
    assert refused.value.filename == "s3://bucket/x"


def test_an_address_of_no_known_kind_is_refused() -> None:
    for url in ("http://host/run", "s3:/bucket", "s3://", "s3://bucket/run?x=1"):
        if is_url(url):
            with pytest.raises(OSError, match="s3://bucket/prefix") as refused:
                open_store(url)
            assert refused.value.errno == errno.EPROTONOSUPPORT
    assert split("s3://bucket/a/b") == ("s3", "bucket", "a/b")
    assert plain("file:///tmp/x") == "/tmp/x"
    assert isinstance(open_store("file:///tmp"), Folder)
    assert not is_url("file:///tmp/x")
    assert not is_url("run/a:b")
    assert join("s3://bucket/run/", "a", "b") == "s3://bucket/run/a/b"


def test_without_the_extra_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(bucket, "_connections", {})
    assert main(["latest", "s3://bucket/run"]) == 3
    assert "pip install 'ckptspec[store]'" in capsys.readouterr().err


def test_the_core_imports_no_store_library() -> None:
    script = "import sys, ckptspec.engine.verify; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_forked_child_is_told_instead_of_hanging(faulty: tuple[Server, Faults]) -> None:
    store = open_store("s3://bucket")
    put(store, "x", b"x")
    child = os.fork()
    if child == 0:
        try:
            store.stat("x")
        except OSError as e:
            os._exit(7 if "forked" in str(e) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert store.stat("x").nbytes == 1
