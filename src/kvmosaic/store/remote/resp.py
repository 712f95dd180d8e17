"""One connection to a Valkey or Redis server: the part of their protocol (RESP2) that values need.

The official Python client was measured first. It copies every value once or twice more. With values of 24 MB it has a
third of this speed; only its optional C parser reads them as fast. A pipeline of 2,048 lookups takes 15 to 50 ms with
it, and 4 to 10 ms with this.
"""

import os
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence

from kvmosaic.core.remote_url import PASSWORD_VARIABLE, RemoteUrl
from kvmosaic.store.memory import Bytes
from kvmosaic.store.remote.base import ABSENT, RefusedError, Value

REFUSALS = ("OOM", "WRONGTYPE")
"""Error replies that are about the one command. All others (LOADING, NOAUTH, READONLY …) are about the server."""
PIECE_BYTES = 2**20
COPIED_BYTES = 2**13
"""Maximum size of a part that is copied, in bytes. A small part sent by itself would cost a call and a packet."""
READ_BYTES = 2**16

Reply = int | bytes | RefusedError | list["Reply"] | None


class Connection:
    """Sends commands and reads their replies, in order. Not thread-safe, and unusable after any ``OSError``."""

    def __init__(self, url: RemoteUrl, patience_s: float) -> None:
        """``patience_s`` is the maximum silence of the server, in seconds."""
        self._socket = socket.create_connection((url.host, url.port), patience_s)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if url.tls:
                self._start_tls(url.host, patience_s)
            self._received = b""
            self._at = 0
            password = os.environ.get(PASSWORD_VARIABLE)
            if password is not None:
                self.send([("AUTH", *([url.user] if url.user else []), password)])
                self.reply()
            if url.database:
                self.send([("SELECT", str(url.database))])
                self.reply()
        except BaseException:
            self._socket.close()
            raise

    def _start_tls(self, host: str, patience_s: float) -> None:
        # A server without TLS may just wait for more data. Our caller would then give up first, without a reason.
        self._socket.settimeout(0.9 * patience_s)
        try:
            self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
        except (TimeoutError, ConnectionError, ssl.SSLError) as error:
            raise ConnectionError(
                f"no TLS ({error}); check that the server uses TLS on this port, and that its certificate is trusted"
            ) from error
        self._socket.settimeout(patience_s)

    def send(self, commands: Iterable[Sequence[str | Value]]) -> None:
        """Send commands back to back. Values are not copied, except for small parts."""
        small: list[bytes] = []
        for command in commands:
            small.append(b"*%d\r\n" % len(command))
            for argument in command:
                if isinstance(argument, str):
                    text = argument.encode()
                    small.append(b"$%d\r\n%b\r\n" % (len(text), text))
                    continue
                small.append(b"$%d\r\n" % sum(part.nbytes for part in argument))
                for part in argument:
                    if part.nbytes <= COPIED_BYTES:
                        small.append(bytes(part))
                        continue
                    self._send(memoryview(b"".join(small)))
                    self._send(part)
                    small = []
                small.append(b"\r\n")
        self._send(memoryview(b"".join(small)))

    def reply(self) -> Reply:
        """The next reply. A refusal is returned, not raised, because other replies may follow it."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            text = rest.decode(errors="replace")
            if text.split(" ")[0] in REFUSALS:
                return RefusedError(text)
            login = f"; {PASSWORD_VARIABLE} sets the password, the URL the user" if "AUTH" in text[:9] else ""
            raise ConnectionError(text + login)
        number = _number(rest)
        if kind == b":":
            return number
        if kind == b"*":
            return [self.reply() for _ in range(number)]
        if kind != b"$":
            raise ConnectionError(f"not the reply of a Valkey server: {line[:40]!r}")
        if number < 0:
            return None
        value = bytearray(number)
        self._read_into(memoryview(value))
        self._end_of_value()
        return bytes(value)

    def value_into(self, buffers_for: Callable[[int], Sequence[Bytes] | None]) -> int | RefusedError:
        """Read the next reply, a value, into the ``buffers_for`` its length, one after the other; with ``None`` it is
        dropped. Returns its length."""
        line = self._line()
        if line[:1] == b"-" and line[1:].split(b" ")[0].decode(errors="replace") in REFUSALS:
            return RefusedError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ConnectionError(f"not a value: {line[:200].decode(errors='replace')}")
        length = _number(line[1:])
        if length < 0:
            return ABSENT
        buffers = buffers_for(length)
        for buffer in buffers or ():
            self._read_into(buffer.data)
        if buffers is None:
            dropped = memoryview(bytearray(min(length, READ_BYTES)))
            for start in range(0, length, READ_BYTES):
                self._read_into(dropped[: length - start])
        self._end_of_value()
        return length

    def close(self) -> None:
        self._socket.close()

    def _send(self, part: memoryview) -> None:
        # In pieces: the socket's timeout is for each call as a whole.
        for start in range(0, part.nbytes, PIECE_BYTES):
            self._socket.sendall(part[start : start + PIECE_BYTES])

    def _line(self) -> bytes:
        end = self._received.find(b"\r\n", self._at)
        while end < 0:
            more = self._socket.recv(READ_BYTES)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._received, self._at = self._received[self._at :] + more, 0
            end = self._received.find(b"\r\n")
        line = self._received[self._at : end]
        self._at = end + 2
        return line

    def _read_into(self, target: memoryview) -> None:
        at = min(len(self._received) - self._at, len(target))
        target[:at] = self._received[self._at : self._at + at]
        self._at += at
        while at < len(target):
            count = self._socket.recv_into(target[at:])
            if not count:
                raise ConnectionError("the server closed the connection")
            at += count

    def _end_of_value(self) -> None:
        if self._line():
            raise ConnectionError("a value is longer than the server said")


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"not the reply of a Valkey server: {text[:40]!r}") from None
