"""Where compiled code is kept from one start to the next, if somebody gave a place; and without LLVM, which only kernels need."""

from __future__ import annotations

from typing import Protocol


class Shelf(Protocol):
    def find(self, name: str) -> bytes | None: ...

    def keep(self, name: str, code: bytes) -> None: ...


class NoShelf:
    def find(self, name: str) -> bytes | None:
        return None

    def keep(self, name: str, code: bytes) -> None:
        pass


given: Shelf = NoShelf()


def keep_on(shelf: Shelf) -> None:
    """Looked at for all that is compiled from now on."""
    global given
    given = shelf
