"""Exits with 0 if the levserve of this container is ready to answer; the images' HEALTHCHECK runs it.

The port may come from a flag, a variable or a settings file, so it is read from them the way levserve did,
with the flags of the container's first process.
"""

import os
import sys
from http.client import HTTPConnection
from pathlib import Path

from levserve.settings.parse import parse_settings

TIMEOUT_SECONDS = 5  # below HEALTHCHECK's own


def flags_of(process: Path) -> list[str]:
    """What follows `levserve` in the command line, which may begin with Python or an init process."""
    words = process.joinpath("cmdline").read_text().split("\0")[:-1]
    for index, word in enumerate(words):
        if Path(word).name == "levserve":
            return words[index + 1 :]
    return []


def main(process: Path = Path("/proc/1")) -> int:
    settings = parse_settings(flags_of(process), os.environ)
    host = "localhost" if settings.host in ("0.0.0.0", "::") else settings.host
    connection = HTTPConnection(host, settings.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        print(response.read().decode())
    except OSError as error:
        print(f"no answer from {host}:{settings.port}: {error}")
        return 1
    finally:
        connection.close()
    return 0 if response.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
