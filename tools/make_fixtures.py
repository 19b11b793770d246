"""Writes tests/conformance/v1 again, byte for byte; with --check changes nothing and exits 1 where a file differs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from fixtures import suite

HOME = Path(__file__).resolve().parents[1] / "tests" / "conformance" / "v1"


def on_disk(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def differences(wanted: Mapping[str, bytes], found: Mapping[str, bytes]) -> list[str]:
    """Return the paths at which the two differ, and how, sorted."""
    lines = [(path, "missing") for path in wanted.keys() - found.keys()]
    lines += [(path, "not of the suite") for path in found.keys() - wanted.keys()]
    lines += [(path, "differs") for path in wanted.keys() & found.keys() if wanted[path] != found[path]]
    return [f"{path}: {what}" for path, what in sorted(lines)]


def write(folder: Path, wanted: Mapping[str, bytes]) -> None:
    """Make the folder hold just these files: what differs is written, what is not wanted removed."""
    found = on_disk(folder)
    for path in found.keys() - wanted.keys():
        (folder / path).unlink()
    for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        if not any(inner.iterdir()):
            inner.rmdir()
    for path, data in wanted.items():
        if found.get(path) != data:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)


def main() -> int:
    """Write or check; return 1 where --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    parser.add_argument("--dir", type=Path, default=HOME, help="where the suite is (default: %(default)s)")
    options = parser.parse_args()
    wanted = suite.files()
    changed = differences(wanted, on_disk(options.dir))
    if not options.check:
        write(options.dir, wanted)
    for line in changed:
        print(line)
    size = sum(map(len, wanted.values()))
    print(f"{len(wanted)} files, {size:,} bytes, {len(changed)} {'differ' if options.check else 'written or removed'}")
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
