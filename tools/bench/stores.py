"""Measures libraries for object stores beside each other, against moto's S3 server on the loopback: the choice of one.

    pip install obstore s3fs boto3 'moto[s3]' flask flask-cors
    python tools/bench/stores.py [--rounds 3]

The server is Python and slower than a real store, so besides the seconds of the clock each line has the processor
seconds of the client: what is left for training. Nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from s3_server import serve  # the server that the tests start

MIB = 1 << 20
BIG = 64 * MIB
OBJECTS = 4
PART = 8 * MIB
SMALL = 2000
THREADS = 8


class Contender(Protocol):
    """What each library has to do, on keys of one bucket."""

    def put(self, key: str, data: bytes) -> None: ...
    def put_parts(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> int: ...
    def get_range(self, key: str, start: int, nbytes: int) -> int: ...
    def put_if_absent(self, key: str, data: bytes) -> None: ...


class Obstore:
    """obstore: Rust's object_store with Python's buffers."""

    def __init__(self, bucket: str) -> None:
        import obstore

        self.of = obstore
        self.store = obstore.store.from_url(f"s3://{bucket}/", client_options={"allow_http": True})

    def put(self, key: str, data: bytes) -> None:
        self.of.put(self.store, key, data, use_multipart=False)

    def put_parts(self, key: str, data: bytes) -> None:
        parts = (memoryview(data)[i : i + PART] for i in range(0, len(data), PART))
        self.of.put(self.store, key, parts, use_multipart=True, chunk_size=PART, max_concurrency=4)

    def get(self, key: str) -> int:
        return len(memoryview(self.of.get(self.store, key).bytes()))

    def get_range(self, key: str, start: int, nbytes: int) -> int:
        return len(memoryview(self.of.get_range(self.store, key, start=start, length=nbytes)))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.of.put(self.store, key, data, mode="create", use_multipart=False)


class S3fs:
    """fsspec's s3fs: aiobotocore under a synchronous face."""

    def __init__(self, bucket: str) -> None:
        import s3fs

        self.bucket = bucket
        self.fs = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def _path(self, key: str) -> str:
        return f"{self.bucket}/{key}"

    def put(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(self._path(key), data)

    def put_parts(self, key: str, data: bytes) -> None:
        with self.fs.open(self._path(key), "wb", block_size=PART) as file:
            for i in range(0, len(data), PART):
                file.write(memoryview(data)[i : i + PART])

    def get(self, key: str) -> int:
        return len(self.fs.cat_file(self._path(key)))

    def get_range(self, key: str, start: int, nbytes: int) -> int:
        return len(self.fs.cat_file(self._path(key), start=start, end=start + nbytes))

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(self._path(key), data, mode="create")


class Boto3:
    """The vendor's own library, as a yardstick; no candidate, for it speaks to one kind of store only."""

    def __init__(self, bucket: str) -> None:
        import boto3

        self.bucket = bucket
        self.client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def put_parts(self, key: str, data: bytes) -> None:
        import io

        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(multipart_chunksize=PART, multipart_threshold=PART, max_concurrency=4)
        self.client.upload_fileobj(io.BytesIO(data), self.bucket, key, Config=config)

    def get(self, key: str) -> int:
        return len(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def get_range(self, key: str, start: int, nbytes: int) -> int:
        body = self.client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{start + nbytes - 1}")["Body"]
        return len(body.read())

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data, IfNoneMatch="*")


CONTENDERS: dict[str, Callable[[str], Contender]] = {"obstore": Obstore, "s3fs": S3fs, "boto3": Boto3}


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of the clock and of this process's processors that `work` takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def cases(c: Contender, data: bytes) -> dict[str, Callable[[], Any]]:
    """Return what is measured, in order."""

    def many() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            total = sum(pool.map(lambda i: c.get_range("small", 0, 4096), range(SMALL)))
        assert total == SMALL * 4096  # of an object of that size: moto reads the whole object for each range of it

    def ranges() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            total = sum(pool.map(lambda i: c.get_range("big/0", i, PART), range(0, BIG, PART)))
        assert total == BIG

    return {
        f"put {BIG // MIB} MiB": lambda: [c.put(f"big/{i}", data) for i in range(OBJECTS)],
        f"put {BIG // MIB} MiB in parts": lambda: [c.put_parts(f"big/{i}", data) for i in range(OBJECTS)],
        f"get {BIG // MIB} MiB": lambda: [c.get(f"big/{i}") for i in range(OBJECTS)],
        "get one in ranges of 8 MiB": ranges,
        f"{SMALL} gets of 4 KiB": many,
    }


def refusal(c: Contender, bucket: str) -> str:
    """Return what a second conditional put of one key raises, or that it was let through."""
    import boto3

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    client.delete_object(Bucket=bucket, Key="once")
    c.put_if_absent("once", b"a")
    try:
        c.put_if_absent("once", b"b")
    except Exception as e:
        kept = client.get_object(Bucket=bucket, Key="once")["Body"].read() == b"a"
        return f"{type(e).__module__}.{type(e).__name__}" + ("" if kept else ", AND THE OBJECT CHANGED")
    return "LET THROUGH"


def missing(c: Contender) -> str:
    """Return what a get of no such key raises."""
    try:
        c.get("no such key")
    except Exception as e:
        return f"{type(e).__module__}.{type(e).__name__}" + (" (FileNotFoundError)" * isinstance(e, FileNotFoundError))
    return "nothing"


def import_seconds(module: str) -> float:
    """Return what a fresh interpreter takes to import a module, beyond starting."""
    runs = []
    for code in ("pass", f"import {module}"):
        several = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            several.append(time.perf_counter() - start)
        runs.append(min(several))
    return runs[1] - runs[0]


def main() -> None:
    """Measure and print; contenders take turns in each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    data = os.urandom(BIG)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with serve() as server:
        os.environ.update(server.environment)
        os.environ["AWS_ENDPOINT_URL"] = server.url
        contenders = {name: make(server.bucket) for name, make in CONTENDERS.items()}
        server.put("small", data[:4096])
        for i in range(rounds):
            order = list(contenders)[i % len(contenders) :] + list(contenders)[: i % len(contenders)]
            for name in order:
                for case, work in cases(contenders[name], data).items():
                    found.setdefault((case, name), []).append(timed(work))
                print(f"round {i + 1}: {name}", file=sys.stderr)
        for name, c in contenders.items():
            print(
                f"{name}: import {import_seconds(name):.2f} s; a second conditional put: {refusal(c, server.bucket)};"
            )
            print(f"    no such key: {missing(c)}")
    print("\n| what | " + " | ".join(f"{name} s (cpu s)" for name in contenders) + " |")
    print("| --- |" + " --- |" * len(contenders))
    for case in cases(contenders["obstore"], data):
        cells = []
        for name in contenders:
            wall, cpu = (statistics.median(column) for column in zip(*found[case, name], strict=True))
            cells.append(f"{wall:.2f} ({cpu:.2f})")
        print(f"| {case} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
