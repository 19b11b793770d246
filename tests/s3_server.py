"""S3 servers that tests start on the loopback: moto's, which keeps conditions of puts, and a small one with faults."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
# It ends with its standard input, so it cannot outlive the tests.
_MOTO = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Server:
    """A server that runs: its address, its one bucket, and what a client's environment needs."""

    url: str
    bucket: str = BUCKET

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead clients here."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url}

    def request(self, method: str, key: str, data: bytes | None = None) -> bytes:
        """Send one plain request about a key of the bucket and return what came back."""
        headers = {"Content-Type": "application/octet-stream"}  # a form would be parsed, not stored
        request = urllib.request.Request(f"{self.url}/{self.bucket}/{key}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            body: bytes = answer.read()
        return body

    def get(self, key: str) -> bytes:
        """Return an object's bytes."""
        return self.request("GET", key)

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whatever was there."""
        self.request("PUT", key, data)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.request("DELETE", key)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin so."""
        text = self.request("GET", f"?list-type=2&prefix={prefix}").decode()
        return re.findall("<Key>(.*?)</Key>", text)

    def uploads(self) -> list[str]:
        """Return the keys of uploads in parts that were neither completed nor given up."""
        return re.findall("<Key>(.*?)</Key>", self.request("GET", "?uploads").decode())


@contextmanager
def serve() -> Iterator[Server]:
    """Run moto's S3 server, with an empty bucket, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **CREDENTIALS}
    )
    try:
        assert process.stdout is not None
        server = Server(f"http://127.0.0.1:{int(process.stdout.readline())}")
        server.request("PUT", "")
        yield server
    finally:
        process.kill()
        process.wait(20)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


# ---- a server with faults --------------------------------------------------------------------------------------------


@dataclass
class Faults:
    """What the small server does wrong.

    `deaf` to conditions, or `unable` (501) to keep them; so many answers of 503 (`busy`) and cut ones (`cut`) to come.
    """

    deaf: bool = False
    unable: bool = False
    busy: int = 0
    cut: int = 0
    etags: bool = True
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self) -> tuple[str, dict[str, list[str]], bytes] | None:
        """Return key, query and body, or None where the request was already answered as busy."""
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.faults.lock:
            self.faults.requests.append((self.command, self.path))
            busy = self.faults.busy > 0
            self.faults.busy -= busy
        if busy:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            return None
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").lstrip("/")
        return key, parse_qs(parts.query, keep_blank_values=True), body

    def _tag(self, data: bytes) -> str:
        digest = hashlib.md5(data).hexdigest() if self.faults.etags else hashlib.sha1(data).hexdigest()
        return f'"{digest}"'

    def do_PUT(self) -> None:
        if (begun := self._begin()) is None:
            return
        key, query, body = begun
        with self.faults.lock:
            if self.faults.unable and "If-None-Match" in self.headers:
                self._answer(501, b"<Error><Code>NotImplemented</Code></Error>")
                return
            if "partNumber" in query:
                self.faults.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            elif self.headers.get("If-None-Match") == "*" and not self.faults.deaf and key in self.faults.objects:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            else:
                self.faults.objects[key] = body
        self._answer(200, ETag=self._tag(body))

    def do_POST(self) -> None:
        if (begun := self._begin()) is None:
            return
        key, query, _ = begun
        if "uploads" in query:
            name = f"upload{len(self.faults.requests)}"
            self.faults.parts[name] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        else:
            several = self.faults.parts.pop(query["uploadId"][0])
            data = b"".join(several[i] for i in sorted(several))
            self.faults.objects[key] = data
            digests = b"".join(hashlib.md5(several[i]).digest() for i in sorted(several))
            tag = f'"{hashlib.md5(digests).hexdigest()}-{len(several)}"' if self.faults.etags else self._tag(data)
            text = (
                f"<CompleteMultipartUploadResult><Key>{escape(key)}</Key><ETag>{escape(tag)}</ETag>"
                "</CompleteMultipartUploadResult>"
            )
        self._answer(200, text.encode())

    def do_DELETE(self) -> None:
        if (begun := self._begin()) is None:
            return
        key, query, _ = begun
        self.faults.parts.pop(query.get("uploadId", [""])[0], None)
        if "uploadId" not in query:
            self.faults.objects.pop(key, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if (begun := self._begin()) is None:
            return
        key, query, _ = begun
        if not key:
            self._list(query)
            return
        data = self.faults.objects.get(key)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = {"ETag": self._tag(data), "Last_Modified": "Sun, 29 Nov 2026 12:00:00 GMT"}
        status, body = 200, data
        span = re.match(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if span is not None:
            start, stop = (int(span[1]), int(span[2]) + 1) if span[1] else (len(data) - int(span[2]), len(data))
            start, stop = max(0, start), min(stop, len(data))
            if start >= stop:
                self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
                return
            status, body = 206, data[start:stop]
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        with self.faults.lock:
            cut = self.faults.cut > 0 and self.command == "GET"
            self.faults.cut -= cut
        if cut:  # the connection ends in the middle of the answer
            self.send_response(status)
            for name, value in {**headers, "Content_Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        self._answer(status, body, Content_Length=str(len(body)), **headers)

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        contents, folders = [], set()
        for key, data in sorted(self.faults.objects.items()):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{escape(self._tag(data))}</ETag>"
                "<LastModified>2026-11-29T12:00:00.000Z</LastModified></Contents>"
            )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        self._answer(
            200,
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(contents)}{common}</ListBucketResult>".encode(),
        )


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, address: object) -> None:
        """Say nothing of clients that hang up."""


@contextmanager
def serve_with_faults(**faults: object) -> Iterator[tuple[Server, Faults]]:
    """Run the small server in threads of this process."""
    told = Faults(**faults)  # type: ignore[arg-type]
    server = _Quiet(("127.0.0.1", 0), type("Handler", (_Handler,), {"faults": told}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_address[1]}"), told
    finally:
        with suppress(OSError):
            server.shutdown()
        server.server_close()
        thread.join(10)
