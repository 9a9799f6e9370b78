"""Messages between processes of one host: they lie in memory that both share, and the transport carries their place.

A region is an anonymous file in memory that the client makes and keeps. The server opens it by the client's /proc
entry, which only the same user can. So no file is left behind when a process dies. Where the two do not share a kernel,
a user or a process namespace, messages travel whole.

    region     key (16 bytes), number of the request it holds (uint64), zeros to 64; then the request; then the answer
    request    magic, host, process, descriptor, key, number, bytes of the region, bytes of the request, where the
               answer goes
    answer     magic, bytes of the answer; or only the magic of a refusal; or, where the region has no room for it,
               the answer itself

Both may be read where they lie. A server has what it needs of a request, or a copy, before it answers. A client uses a
region again once nobody has its answer any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtf.pserver.net.codec import ALIGNMENT, Buffer, Parts
from dtf.pserver.net.transport import MOST_BYTES, Pending, Refused, Transport

LEAST_BYTES = 1 << 15
"""Messages of fewer bytes travel whole: shared memory would be slower."""

_HERE, _THERE, _NO = b"DTFM", b"DTFA", b"DTFN"
_REQUEST, _ANSWER, _NUMBER = struct.Struct("<4s16sII16sQQQQ"), struct.Struct("<4sQ"), struct.Struct("<Q")
_BODY = 64
_NAME = "dtf-messages"

Handler = Callable[[bytes], bytes]

Put = Callable[[bytes | Parts], bytes]
"""Writes an answer where it goes; returns what the transport carries."""


class InPlace:
    """A handler that reads a request where it lies, and writes the answer where it goes. Once it has returned the
    request is gone.
    """

    def __init__(self, handle: Callable[[Buffer, Put], bytes]) -> None:
        self.handle = handle

    def __call__(self, data: bytes) -> bytes:
        return self.handle(data, bytes)


class _Region:
    """Memory of this process that others may open. `room`: bytes for a request, and as many for its answer."""

    def __init__(self, room: int) -> None:
        self.answer = _BODY + -(-room // ALIGNMENT) * ALIGNMENT
        self.size = self.answer + room
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK
        )  # else a process that has opened it could be made to fault
        self.memory, self.key, self.number = mmap.mmap(self.fd, self.size), secrets.token_bytes(16), 0
        self.memory[:16] = self.key
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def has_room(self, size: int, answer: int) -> bool:
        return self.answer - _BODY >= size and self.size - self.answer >= answer

    def put(self, data: bytes | Parts, host: bytes) -> bytes:
        """Write a request; returns the message that tells the server where it lies."""
        self.number += 1
        self.memory[16:24] = _NUMBER.pack(self.number)
        _write(self.bytes[_BODY : self.answer], data)
        place = self.number, self.size, len(data), self.answer
        return _REQUEST.pack(_HERE, host, os.getpid(), self.fd, self.key, *place)

    def __del__(self) -> None:
        with suppress(AttributeError):
            os.close(self.fd)


def _write(memory: np.ndarray, data: bytes | Parts) -> None:
    if isinstance(data, Parts):
        data.write(memory)
    else:
        memory[: len(data)] = np.frombuffer(data, np.uint8)


class SharedMemoryTransport:
    """A transport whose large messages, both ways, lie in shared memory where the server can open it.

    Many threads may call. The answer to a request in `Parts` lies in that memory; to others it is a copy.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._host = transport, host_id()
        self._free: list[_Region] = []
        self._read: deque[_Region] = deque()  # whose answers nobody has any more, not in `_free` yet
        self._largest: dict[str, int] = {}  # bytes of an answer, by method
        self._lock = threading.Lock()

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> Buffer:
        """See `Transport`."""
        region = self._region(method, len(data))
        if region is None:
            return self._seen(method, self._transport.call(method, bytes(data), deadline_s))
        return self._answer(
            region, method, data, deadline_s, self._transport.call(method, region.put(data, self._host), deadline_s)
        )

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Pending:
        """See `Transport`."""
        region = self._region(method, len(data))
        pending = self._transport.start(
            method, bytes(data) if region is None else region.put(data, self._host), deadline_s
        )
        return _PendingAnswer(
            lambda: (
                self._seen(method, pending.result())
                if region is None
                else self._answer(region, method, data, deadline_s, pending.result())
            )
        )

    def _region(self, method: str, size: int) -> _Region | None:
        """An unused region with room for the request and for the largest answer of this method so far; None where the
        message should travel whole.
        """
        answer = self._largest.get(method, 0)
        room = max(size, answer)
        if not self._host or not LEAST_BYTES <= room <= MOST_BYTES:
            return None
        with self._lock:
            while self._read:
                self._free.append(self._read.popleft())
            if self._free and self._free[-1].has_room(size, answer):
                return self._free.pop()
            self._free.clear()  # too small for what there is now
        try:
            return _Region(room + room // 4)
        except OSError:  # no descriptors or no memory left, or forbidden: then without
            self._host = b""
            return None

    def _seen(self, method: str, answer: Buffer) -> Buffer:
        self._largest[method] = max(self._largest.get(method, 0), len(answer))
        return answer

    def _answer(self, region: _Region, method: str, data: bytes | Parts, deadline_s: float, reply: Buffer) -> Buffer:
        """The answer that `reply` carries or points to. The region is free again when nobody has it any more.

        Not called after an error: the server may still read or write the region, which is then dropped.
        """
        if reply == _NO:
            self._host = b""
            return self._transport.call(method, bytes(data), deadline_s)
        if reply[:4] != _THERE:
            self._read.append(region)
            return self._seen(method, reply)
        _, size = _ANSWER.unpack(reply)
        # not a slice of `region.bytes`: what numpy makes of one keeps the whole alive, and not the slice
        answer = np.frombuffer(region.memory, np.uint8, size, region.answer)
        if isinstance(data, Parts):
            weakref.finalize(answer, self._read.append, region).atexit = False
            return self._seen(method, answer.data)
        copied = answer.tobytes()
        self._read.append(region)
        return self._seen(method, copied)


class _PendingAnswer:
    def __init__(self, wait: Callable[[], Buffer]) -> None:
        self._wait: Callable[[], Buffer] | None = wait
        self._answer: Buffer = b""

    def result(self) -> Buffer:
        if self._wait is not None:
            self._answer, self._wait = self._wait(), None  # the region is others' by then
        return self._answer


class _Opened(NamedTuple):
    """Another process's region."""

    memory: mmap.mmap
    inode: int


class Regions:
    """Regions of clients that a server has opened, at most `most` at once.

    A region that its client has closed is closed here when the next one is opened.
    """

    def __init__(self, most: int) -> None:
        self._most, self._host, self._lock = most, host_id(), threading.Lock()
        # by process and descriptor, those used last at the end
        self._open: OrderedDict[tuple[int, int], _Opened] = OrderedDict()

    def around(self, handler: Handler) -> Handler:
        """Wrap a handler, so that its requests may lie in regions."""

        def handle(data: bytes) -> bytes:
            if data[:4] != _HERE:
                return handler(data)
            region = self._find(data)
            if region is None:
                return _NO
            memory, length, place = region
            room = memory[place:]

            def put(answer: bytes | Parts) -> bytes:
                if len(answer) > len(room):
                    return bytes(answer)
                _write(room, answer)
                return _ANSWER.pack(_THERE, len(answer))

            request = memory.data[_BODY : _BODY + length]
            return handler.handle(request, put) if isinstance(handler, InPlace) else put(handler(bytes(request)))

        return handle

    def _find(self, data: bytes) -> tuple[np.ndarray, int, int] | None:
        """The memory (bytes,) of a request's region, the bytes of the request and where its answer goes; None where
        the region cannot be opened.

        Refused for a message that no client sends, or for a request that is not in the region any more.
        """
        if len(data) != _REQUEST.size:
            raise Refused("no place of a request")
        _, where, process, descriptor, key, number, size, length, answer = _REQUEST.unpack(data)
        fits = length <= MOST_BYTES and _BODY + length <= answer <= size <= _BODY + 3 * MOST_BYTES
        if not fits or answer % ALIGNMENT or not number:
            raise Refused("no place of a request")
        if where != self._host:
            return None
        place = process, descriptor
        with self._lock:
            known = self._open.get(place)
            if known is None or known.memory[:16] != key:
                self._open = OrderedDict(
                    (other, region) for other, region in self._open.items() if _inode(*other) == region.inode
                )
                known = _opened(process, descriptor, key, size)
                if known is None:
                    return None
                self._open[place] = known
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            self._open.move_to_end(place)
            memory = known.memory
            if len(memory) != size or memory[16:24] != _NUMBER.pack(number):
                raise Refused("the request is not there any more")
            memory[16:24] = _NUMBER.pack(0)  # it is taken: the same one again finds nothing
        return np.frombuffer(memory, np.uint8), length, answer


def _inode(process: int, descriptor: int) -> int | None:
    """Inode of the file that a process has open at a descriptor; None where this user cannot see one."""
    try:
        return os.stat(f"/proc/{process}/fd/{descriptor}").st_ino
    except OSError:
        return None


def _opened(process: int, descriptor: int, key: bytes, size: int) -> _Opened | None:
    """Another process's region; None where it cannot be opened or is no region."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        # to open a device or a pipe may do something, or take for ever
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            return None
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or (status := os.fstat(fd)).st_size != size:
            return None
        memory = mmap.mmap(fd, size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return _Opened(memory, status.st_ino) if memory[:16] == key else None


def host_id() -> bytes:
    """An id, 16 bytes, that is the same for processes that see each other in /proc; empty where shared memory cannot be
    used.
    """
    if not hasattr(os, "memfd_create"):
        return b""
    try:
        seen = Path("/proc/sys/kernel/random/boot_id").read_bytes() + os.readlink("/proc/self/ns/pid").encode()
    except OSError:
        return b""
    return hashlib.sha256(seen).digest()[:16]
