"""The interface of remote stores, and how they report failures."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvmosaic.store.memory import Bytes

ABSENT = 0
"""Result of ``get_into`` for a key that is absent: no value is empty."""
FAILED = -1
"""Result of ``get_into`` for a key that exists, or did a moment ago, but cannot be read."""

Value = Sequence[memoryview]
"""Consecutive parts of a value, each contiguous bytes."""


class Incoming(Protocol):
    """Receives values as they arrive; a value more than once, if the store had to be asked again."""

    def buffers_for(self, index: int, nbytes: int) -> Sequence[Bytes] | None:
        """Memory for value ``index``, requested when its length is known: buffers of ``nbytes`` bytes in total, which
        are filled one after the other. ``None`` for a value that is not wanted at this length."""

    def received(self, index: int) -> None:
        """Called when value ``index`` is complete. Other values may still arrive, also in other threads."""


class RefusedError(OSError):
    """The store answered but refused (out of memory, a key that is not a plain value). It is not down."""


class RemoteClient(ABC):
    """A remote store that maps keys (printable ASCII text) to values (bytes). Every method takes many keys, costs
    about one round trip for all of them, and is called from several threads at once. Any method may raise ``OSError``
    when the store cannot be reached or does not answer. It need not do so quickly, see ``store/breaker.py``.
    """

    max_value_bytes: int | None = None
    """Maximum bytes of a value; longer ones are not sent. ``None`` for no limit."""

    read_at_once_bytes: int = 0
    """Maximum bytes of several entries that are read by one call."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each of ``keys`` exists."""

    @abstractmethod
    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Bytes of each value; ``None`` for an absent one. May cost more than :meth:`exists`."""

    @abstractmethod
    def put(self, keys: Sequence[str], values: Sequence[Callable[[], Value]]) -> list[str | None]:
        """Store values, each completely or not at all. The function that makes a value is called when its turn comes,
        maybe repeatedly and by several threads, so that one value can be made while another is sent. Returns for each
        key ``None``, or a short reason for a refusal. An existing value may stay: values of one key are equal."""

    @abstractmethod
    def get_into(self, keys: Sequence[str], incoming: Incoming) -> list[int]:
        """Read values into the memory that ``incoming`` provides. Returns for each key the length, or :data:`ABSENT`,
        or :data:`FAILED`."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys. An absent key is no error."""

    @abstractmethod
    def scan(self, prefix: str) -> Iterator[list[str]]:
        """All keys that start with ``prefix``, in pages, one round trip each. Keys that are added or deleted
        meanwhile may be missed or listed twice."""

    @abstractmethod
    def close(self) -> None:
        """Close connections."""
