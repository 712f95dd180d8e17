"""What a remote store must be able to do, and how it says that it cannot."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvmosaic.store.memory import Bytes

ABSENT = 0
"""What ``get_into`` answers for a key that is not there: no value is empty."""
FAILED = -1
"""What ``get_into`` answers for a key that is there, or was a moment ago, but cannot be read."""

Value = Sequence[memoryview]
"""Parts that follow one another, each contiguous bytes."""


class Incoming(Protocol):
    """Takes values as they arrive. It may hear of a value more than once, if the store had to be asked again."""

    def buffers_for(self, index: int, nbytes: int) -> Sequence[Bytes] | None:
        """Memory for value ``index``, as soon as its length is known: buffers to be filled one after the other, which
        together have ``nbytes`` bytes. ``None`` for a value that is not wanted at this length."""

    def received(self, index: int) -> None:
        """Value ``index`` is there. Others may be on their way meanwhile, or be told of by other threads."""


class RefusedError(OSError):
    """The store answered, but would not do it (out of memory, a key that is no plain value). It is not down."""


class RemoteClient(ABC):
    """A remote store of values by key: printable ASCII text, and bytes. Every method takes many keys, costs about one
    round trip however many they are, and is called from several threads at once. Any may raise ``OSError`` when the
    store cannot be reached or does not answer; nothing here has to be quick about that, see ``store/breaker.py``.
    """

    max_value_bytes: int | None = None
    """Longer values are not even sent; ``None`` when there is no such limit."""

    read_at_once_bytes: int = 0
    """Several entries are read by one call if they have no more bytes than this together."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which of ``keys`` are there."""

    @abstractmethod
    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Bytes of each value, ``None`` where there is none. May cost more than :meth:`exists`."""

    @abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[Callable[[], Value]]) -> list[str | None]:
        """Store values, each as a whole or not at all. They are asked for when it is their turn, maybe repeatedly and
        by several threads, so that one can be made while another is on its way. For each key ``None``, or in a few
        words why it was refused. A value that was there may stay: values of one key are equal."""

    @abstractmethod
    def get_into(self, keys: Sequence[str], incoming: Incoming) -> list[int]:
        """Read values into the memory that ``incoming`` has for them. For each key the length, or :data:`ABSENT`, or
        :data:`FAILED`."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Drop keys; those that are not there are no error."""

    @abstractmethod
    def scan(self, prefix: str) -> Iterator[list[str]]:
        """All keys that start with ``prefix``, in pages, one round trip each. Keys that come or go meanwhile may be
        missed or named twice."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections."""
