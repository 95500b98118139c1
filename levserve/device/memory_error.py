"""Turns running out of memory at a start into one line: what needed how much, what is free, what to do.

It shows in many ways: Python has an exception class for it, XLA a code in a message, the system an errno, and
a library that finds no room for itself fails to import. Imports no jax: that may be what fails.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from levserve.device.host import free_address_space, free_memory
from levserve.device.sizing import human
from levserve.errors import StartupError

WORDS = ("RESOURCE_EXHAUSTED", "bad_alloc", "failed to map segment", "annot allocate memory")
"""In the messages of XLA, C++, the dynamic linker and the system."""
LIBRARY_BYTES = 700 << 20
"""Address space of a process that has imported jax and opened the CPU; 0.3 GB of it are in use."""
COMPILE_BYTES = 384 << 20
"""How much the address space grows while the first programs are compiled: 340 MB for a tiny model."""
RAISE_LIMIT = "raise the limit on memory (ulimit -v, docker --memory, MemoryMax= of systemd)"


@contextmanager
def explained(asked: str, advice: str, free: Callable[[], int] = free_memory) -> Iterator[None]:
    """Raises `StartupError` if memory runs out inside. `asked` begins the sentence "... were asked for".

    Free memory is read on entry.
    """
    free_bytes = free()
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        reason = find_reason(error)
        if reason is None:
            raise
        raise StartupError(
            f"out of memory: {asked} were asked for and {human(free_bytes)} are free; {advice} ({reason})"
        ) from error


def find_reason(error: BaseException | None) -> str | None:
    """The first line of the error, or of one of its causes, that says that memory is missing; else None."""
    while error is not None:
        text = str(error)
        is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if isinstance(error, MemoryError) or is_system:
            return text.partition("\n")[0] or type(error).__name__
        for line in text.splitlines():
            if any(word in line for word in WORDS):
                return line.strip()
        error = error.__cause__ or error.__context__
    return None


def check_address_space() -> None:
    """Refuses too little room for compiled code: for that LLVM ends the process, without an exception."""
    free = free_address_space()
    if free is not None and free < COMPILE_BYTES:
        raise StartupError(
            f"out of memory: compiling the model's programs takes up to {human(COMPILE_BYTES)}, and the "
            f"process's limit leaves {human(max(free, 0))} (ulimit -v, ulimit -d): raise it, or serve a "
            "smaller model"
        )
