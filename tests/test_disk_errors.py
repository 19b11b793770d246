"""A disk that takes no more: the error of the save names the file, the number the kernel gave, and leaves nothing."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ckptspec
from ckptspec.storage import local


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow above so many bytes: writing more is EFBIG, as a full disk is ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_shard_that_does_not_fit_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"w": torch.ones(3)}, step=1)
    with file_limit(1 << 20), pytest.raises(ckptspec.SaveError) as caught:
        ckptspec.save(tmp_path, {"w": torch.ones(1 << 20)}, step=2)
    error = caught.value
    assert error.where.file is not None
    assert Path(error.where.file).name == "rank-00000.shard"
    assert Path(error.where.file).parent.name.startswith(".tmp-00000002-")
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.EFBIG
    assert str(error).startswith(f"{error.where.file}: {os.strerror(errno.EFBIG)}")
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".ckptspec")] == ["step-00000001"]
    ckptspec.save(tmp_path, {"w": torch.ones(1 << 20)}, step=2)


def fails(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "close"])
@pytest.mark.parametrize("written", ["shard", "manifest"])
def test_whatever_call_fails_the_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, written: str
) -> None:
    real = getattr(os, call)
    suffix = ".shard" if written == "shard" else "manifest.json"

    def failing(fd: int, *args: object) -> object:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(suffix):
            if call == "close":
                real(fd)
            raise fails(errno.ENOSPC)
        return real(fd, *args)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(ckptspec.SaveError) as caught:
        ckptspec.save(tmp_path, {"w": torch.ones(1000)}, step=2)
    monkeypatch.undo()
    assert caught.value.where.file is not None
    assert caught.value.where.file.endswith(suffix)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert ckptspec.latest(tmp_path) is None


def test_a_name_that_the_kernel_gave_is_kept(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, local.naming("other"):
        os.open(tmp_path / "none", os.O_RDONLY)
    assert caught.value.filename == str(tmp_path / "none")
