"""Reads new weights for a reload on a follower, beside its device thread."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from levserve.errors import StartupError, cause_of
from levserve.hosts.follower import Follower
from levserve.hosts.frame import FrameKind
from levserve.hosts.peer import PeerLost
from levserve.model.placement import HostArray
from levserve.models.kind import AnyKind
from levserve.weights.fingerprint import fingerprint
from levserve.weights.source import check_source, find_source

log = logging.getLogger(__name__)


class WeightReader:
    """`begin` and `take` are for the device thread. Host 0 runs one reload at a time."""

    def __init__(self, follower: Follower, description: AnyKind) -> None:
        self._follower = follower
        self._description = description
        self._leaves: Sequence[HostArray] = ()
        self._thread: threading.Thread | None = None

    def begin(self, names: bytes) -> None:
        """Reads the weights that host 0 names, and tells it when they are read or why they cannot be."""
        self._thread = threading.Thread(target=self._run, args=(names,), name="levserve-reload", daemon=True)
        self._thread.start()

    def take(self) -> Sequence[HostArray]:
        """The weights that were read last; host 0 has been told that they are read."""
        assert self._thread is not None
        self._thread.join()
        leaves, self._leaves = self._leaves, ()
        return leaves

    def _run(self, names: bytes) -> None:
        try:
            found = self._read(names)
        except StartupError as error:
            log.warning("the new weights cannot be read: %s", error)
            found = {"error": f"cannot read them: {error}"}
        except Exception as error:  # host 0 waits for an answer
            log.exception("the new weights cannot be read")
            found = {"error": f"cannot read them: {cause_of(error)}"}
        with suppress(PeerLost):
            self._follower.send_text(FrameKind.READ, json.dumps(found))

    def _read(self, names: bytes) -> dict[str, str]:
        settings = replace(self._description.settings, **json.loads(names))
        check_source(settings)
        files = find_source(settings, _report, with_tokenizer=False)
        try:
            self._leaves = self._description.read_leaves(settings, files, _report)
            return {"fingerprint": fingerprint(files)}
        finally:
            if files.lease is not None:
                files.lease.close()


def _report(progress: str) -> None:
    log.info("reloading: %s", progress)
