"""Owns what is asked of a store that ranks agree over, and the store of a lone process; refuses to wait inside one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

BATCH = 256  # keys in one question: some 16 KB


class Store(Protocol):
    """The calls of a torch.distributed Store that are used; `clone`, where there is one, gives a new connection."""

    def set(self, key: str, value: Any, /) -> Any:
        """Store bytes under a key; a return is no receipt."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that starts at 0 and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""

    def compare_set(self, key: str, expected: Any, desired: Any, /) -> bytes:
        """Store `desired` if the value is `expected` ("" for an absent key); return the value that then stands."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of keys that are all there."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; whether it was there."""


class LocalStore:
    """A store inside this process, for a job of one rank, or for ranks that are threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        with self._changed:
            self._values[key] = _bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout: float = 300.0) -> bytes:
        """Return a value, waiting for its key up to `timeout` seconds; raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(f"no key {key} after {timeout:g} s")
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        with self._changed:
            return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store if the present value is as expected, "" meaning none."""
        with self._changed:
            found = self._values.get(key)
            if found == _bytes(expected) or (found is None and not expected):
                found = self._values[key] = _bytes(desired)
                self._changed.notify_all()
            return _bytes(expected) if found is None else found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all keys."""
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        with self._changed:
            return self._values.pop(key, None) is not None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# ---- one key of every rank -------------------------------------------------------------------------------------------


class Roll:
    """One key for each of many ranks, asked for in batches: who has set theirs, and all the values at the end."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self.open = [range(at, min(at + BATCH, len(keys))) for at in range(0, len(keys), BATCH)]

    def complete(self, store: Store) -> bool:
        """Return whether every key is there; asks for one batch while that one is not."""
        while self.open:
            if not self.present(store, self.open[0]):
                return False
            self.open.pop(0)
        return True

    def present(self, store: Store, ranks: Sequence[int]) -> bool:
        """Return whether these ranks have set their keys."""
        return store.check([self._keys[rank] for rank in ranks])

    def missing(self, store: Store) -> list[int]:
        """Return the ranks that have not set their keys, asking for them one by one where a batch has a gap."""
        gaps = [batch for batch in self.open if not self.present(store, batch)]
        return [rank for batch in gaps for rank in batch if not self.present(store, [rank])]

    def values(self, store: Store) -> Iterator[bytes]:
        """Yield every rank's value; to be called once complete, for an absent key would be waited for."""
        for at in range(0, len(self._keys), BATCH):
            yield from store.multi_get(list(self._keys[at : at + BATCH]))
