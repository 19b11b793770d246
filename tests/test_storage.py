"""Bytes reach the disk whole or an error says so: short writes, failed flushes, taken names, files that end early."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptspec.storage import kernel, local


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_file_is_created_new_with_its_size_reserved(tmp_path: Path) -> None:
    path = tmp_path / "a.shard"
    fd = local.create(str(path), 10_000)
    try:
        assert os.fstat(fd).st_size == 10_000
        assert os.fstat(fd).st_blocks * 512 >= 10_000
        assert not os.get_inheritable(fd)
    finally:
        local.finish(fd)
    with pytest.raises(FileExistsError):
        local.create(str(path))


def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        local.create(str(tmp_path / "a"), 10)
    assert not (tmp_path / "elsewhere").exists()


def test_what_cannot_be_reserved_is_an_error_before_the_first_byte(tmp_path: Path) -> None:
    before = descriptors()
    with pytest.raises(OSError) as caught:
        local.create(str(tmp_path / "huge"), 1 << 61)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert descriptors() == before


def test_where_nothing_can_be_reserved_the_file_still_has_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_fallocate", None)
    fd = local.create(str(tmp_path / "a"), 5000)
    assert os.fstat(fd).st_size == 5000
    local.finish(fd)


def test_short_writes_go_on_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    calls = []

    def few(fd: int, data: memoryview, offset: int) -> int:
        calls.append(len(data))
        return real(fd, data[:7], offset)

    monkeypatch.setattr(os, "pwrite", few)
    data = bytes(range(100))
    fd = local.create(str(tmp_path / "a"), 103)
    local.write_at(fd, memoryview(data).cast("i"), 3)
    local.finish(fd)
    assert (tmp_path / "a").read_bytes() == b"\0\0\0" + data
    assert len(calls) == 15


def test_a_write_that_takes_nothing_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    fd = local.create(str(tmp_path / "a"))
    with pytest.raises(OSError) as caught:
        local.write_at(fd, b"x", 0)
    os.close(fd)
    assert caught.value.errno == errno.EIO


def test_reads_fill_the_buffer_or_say_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(50)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:9]], offset))
    fd = local.open_read(str(tmp_path / "a"))
    try:
        buffer = bytearray(30)
        local.read_at(fd, buffer, 20)
        assert bytes(buffer) == bytes(range(20, 50))
        with pytest.raises(local.ShortReadError) as caught:
            local.read_at(fd, buffer, 40)
    finally:
        os.close(fd)
    assert (caught.value.offset, caught.value.expected, caught.value.found) == (40, 30, 10)
    assert isinstance(caught.value, EOFError)


@pytest.mark.parametrize("name", ["fsync", "close"])
def test_a_failed_flush_or_close_is_raised_tried_once_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real: Callable[[int], None] = getattr(os, name)
    calls = []

    def fail(fd: int) -> None:
        calls.append(fd)
        if name == "close":
            real(fd)
        raise OSError(errno.EIO, "broken disk")

    before = descriptors()
    fd = local.create(str(tmp_path / "a"))
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="broken disk"):
        local.finish(fd)
    monkeypatch.undo()
    assert calls == [fd]
    assert descriptors() == before


def test_a_whole_file_is_written_once_and_read_within_a_limit(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    local.write_file(path, b"hello")
    assert local.read_file(path, 5) == b"hello"
    with pytest.raises(FileExistsError):
        local.write_file(path, b"again")
    with pytest.raises(OSError) as caught:
        local.read_file(path, 4)
    assert caught.value.errno == errno.EFBIG


def test_a_pipe_or_folder_in_the_place_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="not a regular file"):
            local.read_file(str(tmp_path / name), 100)
        assert local.regular_size(str(tmp_path / name)) is None


def test_the_size_of_a_link_is_not_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").symlink_to("a")
    assert local.regular_size(str(tmp_path / "a")) == 3
    assert local.regular_size(str(tmp_path / "b")) is None
    with pytest.raises(FileNotFoundError):
        local.regular_size(str(tmp_path / "c"))


def test_writeback_is_only_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = local.create(str(tmp_path / "a"), 1 << 20)
    local.write_at(fd, bytes(1 << 20), 0)
    local.start_writeback(fd, 0, 1 << 20)
    local.start_writeback(fd, 0, 0)
    monkeypatch.setattr(kernel, "_sync_file_range", None)
    local.start_writeback(fd, 0, 1 << 20)
    monkeypatch.undo()
    local.finish(fd)
    reader, writer = os.pipe()
    local.start_writeback(writer, 0, 10)  # ESPIPE: nothing to hint at
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError) as caught:
        local.start_writeback(writer, 0, 10)
    assert caught.value.errno == errno.EBADF


def test_a_rename_never_replaces_and_an_exchange_swaps(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    a, b, c = (str(tmp_path / name) for name in "abc")
    with pytest.raises(FileExistsError) as caught:
        local.rename_noreplace(a, b)
    assert (caught.value.filename, caught.value.filename2) == (a, b)
    assert local.names(b) == ("b",)
    local.exchange(a, b)
    assert local.names(a) == ("b",)
    local.rename_noreplace(a, c)
    assert local.names(str(tmp_path)) == ("b", "c")
    with pytest.raises(FileNotFoundError):
        local.exchange(a, b)


def test_a_system_without_the_call_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_renameat2", None)
    for call in (local.rename_noreplace, local.exchange):
        with pytest.raises(OSError) as caught:
            call(str(tmp_path / "a"), str(tmp_path / "b"))
        assert caught.value.errno in local.UNSUPPORTED


def test_folders_are_made_with_their_ancestors_each_flushed_into_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(local, "fsync_folder", flushed.append)
    path = tmp_path / "a" / "b"
    local.make_folders(str(path))
    assert path.is_dir()
    assert {str(tmp_path), str(tmp_path / "a"), str(path)} == set(flushed)
    flushed.clear()
    local.make_folders(str(path))
    assert flushed == []
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        local.make_folders(str(tmp_path / "file"))


def test_a_tree_is_removed_without_following_its_links(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "x").touch()
    gone = tmp_path / "gone"
    (gone / "deep").mkdir(parents=True)
    (gone / "link").symlink_to(keep)
    local.remove_tree(str(gone))
    local.remove_tree(str(gone))
    assert not gone.exists()
    assert (keep / "x").exists()


def test_the_type_of_a_file_system_is_named() -> None:
    assert local.filesystem("/proc") not in ("", "unknown")
    assert local.filesystem("/dev/shm") == "tmpfs"
    with pytest.raises(FileNotFoundError):
        local.filesystem("/no/such/place")


def test_fuse_programs_are_named_by_the_mount_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "table"
    line = "30 1 {}:{} / /mnt rw - {} {} rw\n"
    real = open
    monkeypatch.setattr("builtins.open", lambda path, **how: real(table, **how))
    for kind, program, expected in (
        ("fuse", "mountpoint-s3", "fuse.mountpoint-s3"),
        ("fuse.gcsfuse", "b", "fuse.gcsfuse"),
    ):
        table.write_text(
            line.format(0, 1, "proc", "proc") + line.format(os.major(device), os.minor(device), kind, program)
        )
        assert kernel._mounted_type(str(tmp_path)) == expected
    table.write_text("")
    assert kernel._mounted_type(str(tmp_path)) is None
