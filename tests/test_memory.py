"""A save and a load stay within their byte budget: no tensor-sized copy, whatever the tensors look like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import resource, sys, torch, ckptspec
run, form = sys.argv[1:]
n = 96 << 20  # bytes of one tensor
plain = torch.arange(n // 4, dtype=torch.int32).reshape(4096, -1)
source = plain.t() if form == "strided" else plain
into = torch.zeros_like(plain)
target = into.t() if form == "strided" else into
ckptspec.save(run, {"t": torch.ones(1)}, step=0)  # whatever is imported and allocated once is there now
ckptspec.load(run, into={"t": torch.zeros(1)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ckptspec.save(run, {"t": source}, step=1, memory=16 << 20)
ckptspec.load(run, into={"t": target}, memory=16 << 20)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert torch.equal(into, plain)
print((after - before) * 1024)
"""


def extra(tmp_path: Path, form: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), form], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_contiguous_tensors_move_without_a_copy(tmp_path: Path) -> None:
    assert extra(tmp_path, "contiguous") < 40 << 20


def test_strided_tensors_are_copied_a_buffer_at_a_time(tmp_path: Path) -> None:
    assert extra(tmp_path, "strided") < 40 << 20
