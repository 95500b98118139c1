"""The folder of files and batches: below `--state-dir`, or a temporary one that is made when it is needed."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

from levserve.errors import StartupError
from levserve.web.state_files import PART_SUFFIX, make_folder


class DiskFolder:
    """The files hold what clients wrote: only the server's own user may read them."""

    def __init__(self, state_dir: str, cache_path: Path) -> None:
        """Raises `StartupError` if the folder cannot be used.

        A temporary folder is below `cache_path` if the system has no place for one, as in a container whose
        root is read-only.
        """
        self._is_temporary = not state_dir
        self._root = _name_temporary(cache_path) if self._is_temporary else Path(state_dir)
        self.files, self.batches = self._root / "files", self._root / "batches"
        if self._is_temporary:
            return
        try:
            self.prepare()
            for folder in (self.files, self.batches):
                for part in folder.glob(f"*{PART_SUFFIX}"):
                    part.unlink()
        except OSError as error:
            raise StartupError(f"cannot use --state-dir {state_dir}: {error.strerror}") from None

    def prepare(self) -> None:
        """Makes the folders that are missing. Raises `OSError`."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.files, self.batches):
            make_folder(folder)

    def close(self) -> None:
        """Removes the folder, if it is a temporary one."""
        if self._is_temporary:
            shutil.rmtree(self._root, ignore_errors=True)


def _name_temporary(cache_path: Path) -> Path:
    try:
        place = Path(tempfile.gettempdir())
    except FileNotFoundError:
        place = cache_path
    return place / f"levserve-{secrets.token_hex(12)}"
