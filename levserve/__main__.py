"""The command `levserve`, also as `python -m levserve`.

Imports little: Ctrl-C ends the command quietly from its first moments on, while the rest is being imported.
"""

from __future__ import annotations

import errno
import os
import sys
import threading


def main() -> int:
    """Returns the exit code, or ends the process with it if threads are left that cannot be stopped."""
    code = run_to_end()
    if code and any(thread.daemon for thread in threading.enumerate()):
        # One that compiles or imports is inside a library in C++. When Python exits, it ends a thread that
        # wants to return from there, and the library answers with "terminate called" or a segmentation fault.
        os._exit(code)
    return code


def run_to_end() -> int:
    """Runs the command; what it wrote to stdout has been flushed."""
    try:
        from levserve.cli import main as run

        try:
            return run()
        finally:
            flush_stdout()  # Python would do it after this function, and could only complain
    except KeyboardInterrupt:
        return 130  # the shell's code for SIGINT
    except BrokenPipeError:  # `levserve --dry-run | head`
        discard_stdout()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"levserve: error: {place}{error.strerror}", file=sys.stderr)
        discard_stdout()
        return 1


def flush_stdout() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def discard_stdout() -> None:
    """Redirects stdout, which takes no more, to the null device, for what Python writes to it at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
