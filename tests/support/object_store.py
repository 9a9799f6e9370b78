"""An S3 server on loopback for tests, over a line as slow as one likes.

`python -m tests.support.object_store PORT BYTES_A_SECOND` is the line: it prints its own port.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

PIECE = 1 << 16


@contextmanager
def object_store(bytes_a_second: float = 0.0) -> Iterator[dict[str, str]]:
    """The environment in which `s3://bucket/...` is a bucket of a new server. 0: the line has no limit."""
    with _started(["moto.server", "-H", "127.0.0.1", "-p", "0"], r"http://127\.0\.0\.1:(\d+)") as port:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
        with urllib.request.urlopen(request):
            pass
        if not bytes_a_second:
            yield _environment(port)
            return
        with _started([__name__, port, str(bytes_a_second)], r"port (\d+)") as slow:
            yield _environment(slow)


def _environment(port: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def _started(command: list[str], pattern: str) -> Iterator[str]:
    """A module that runs as a process, and the port that it prints."""
    with subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines: list[str] = []
            while not (found := re.search(pattern, lines[-1] if lines else "")):
                lines.append(process.stderr.readline())
                assert lines[-1], f"{command[0]} has ended: {''.join(lines)}"
            # what it logs later must not fill the pipe
            drain = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=process.stderr)
            yield found[1]
        finally:
            process.kill()
    drain.wait()


async def _line(port: int, bytes_a_second: float) -> None:
    free_at = time.monotonic()

    async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter, limited: bool) -> None:
        nonlocal free_at
        try:
            while data := await source.read(PIECE):
                if limited:  # all connections share the line
                    free_at = max(free_at, time.monotonic()) + len(data) / bytes_a_second
                    await asyncio.sleep(free_at - time.monotonic())
                to.write(data)
                await to.drain()
        except ConnectionError:
            pass
        finally:
            to.close()

    async def serve(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        server, request = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(client, request, True), copy(server, answer, False))

    line = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(f"port {line.sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    await line.serve_forever()


if __name__ == "__main__":
    asyncio.run(_line(int(sys.argv[1]), float(sys.argv[2])))
