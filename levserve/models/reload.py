"""Swaps newer weights of the same shape into a running server.

`WeightReloader.reload` runs on the thread that calls it. It reads the new weights into the host's memory
while the old ones serve, checks them, and hands them to the device thread, which swaps them between two
rounds. Programs take the weights as arguments, so nothing is compiled. New weights that cannot be served are
refused before the swap, and the old ones stay.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from levserve.device.tasks import SwapWeights
from levserve.engine.engine import Engine
from levserve.engine.served_model import ServedModel
from levserve.errors import Conflict, Poisoned, StartupError
from levserve.model.placement import HostArray
from levserve.models.entry import Reloaded, SwappedWeights
from levserve.models.group import Group
from levserve.models.kind import AnyKind
from levserve.models.probe import ProbeScores, gather_scores, probe_request
from levserve.schedule.request import TokenBatch
from levserve.settings.revision import split_revision
from levserve.settings.settings import Settings
from levserve.weights.model_files import ModelFiles
from levserve.weights.source import check_source, find_source

log = logging.getLogger(__name__)


def settings_for(settings: Settings, model: str, checkpoint_path: str, revision: str) -> Settings:
    """The settings with the weights that a request names, which may be empty; raises `ConfigError`.

    A model that is named may be another one, whose revisions have nothing to do with the old one's.
    """
    if model:
        sources = {**settings.sources, "model": "in the request", "revision": "in the request"}
        named = replace(settings, model=model, checkpoint_path="", revision=revision, sources=sources)
        return split_revision(named)
    return replace(
        settings,
        checkpoint_path=checkpoint_path or settings.checkpoint_path,
        revision=revision or settings.revision,
    )


class WeightReloader:
    """Reloads one model. One reload at a time: a second one is refused."""

    def __init__(
        self, engine: Engine, description: AnyKind, model: ServedModel, group: Group | None = None
    ) -> None:
        self._engine = engine
        self._description = description
        self._model = model
        self._group = group
        self._reloading = threading.Lock()

    def reload(self, *, model: str = "", checkpoint_path: str = "", revision: str = "") -> Reloaded:
        """Serves the newest weights that the settings name, or those named here.

        Raises `StartupError` for weights that cannot replace those that are served, and `Poisoned` if the new
        ones, which then serve, compute values that are not finite.
        """
        with self._one_at_a_time():
            settings = settings_for(self._description.settings, model, checkpoint_path, revision)
            reloaded = self._reload(settings)
        log.info(
            "%s: reloaded %s in %.1f s, swapped in %.2f s: "
            "the probe's log-probabilities differ by up to %s (mean %.4f, before %s)",
            reloaded.model,
            reloaded.path,
            reloaded.load_seconds,
            reloaded.swap_seconds,
            _four_digits(reloaded.max_logprob_difference),
            reloaded.mean_logprob,
            _four_digits(reloaded.mean_logprob_before),
        )
        return reloaded

    def load(
        self, arrays: Mapping[str, Any], hold_back: Callable[[], AbstractContextManager[None]]
    ) -> SwappedWeights:
        """Serves these weights, which have the names of a Hugging Face checkpoint of the model.

        The swap happens inside `hold_back`, which must wait for running work and let nothing new in. Raises
        `StartupError` for weights that cannot replace those that are served.
        """
        if self._group is not None:
            raise Conflict("Several hosts serve this model: weights cannot be given to one of them.")
        with self._one_at_a_time():
            start = time.monotonic()
            leaves = self._description.convert_leaves(arrays, self._report)
            converted = time.monotonic()
            with hold_back():  # the probes too would wait behind running work
                waited = time.monotonic()
                before = self._probe_old()
                swap_seconds = self._swap(leaves)
                after = self._probe()
        log.info(
            "%s: loaded weights from memory in %.2f s, swapped in %.2f s",
            self._model.name,
            converted - start,
            swap_seconds,
        )
        return SwappedWeights(
            convert_seconds=converted - start,
            wait_seconds=waited - converted,
            swap_seconds=swap_seconds,
            mean_logprob=after.mean,
            mean_logprob_before=None if before is None else before.mean,
        )

    def close(self) -> None:
        """Called when the model is unloaded: the cache may then delete its files."""
        self._description.files.close()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Counts reloads done and refused. Raises `Conflict` while another reload runs."""
        outcome = "done"
        if not self._reloading.acquire(blocking=False):
            raise Conflict(f"A reload is under way ({self._engine.progress}); please wait for it.")
        try:
            yield
        except StartupError as error:
            outcome = "refused"
            log.warning("%s: reload refused, the old weights stay: %s", self._model.name, error)
            raise
        except Poisoned as error:
            log.error("%s: the new weights serve: %s", self._model.name, error)
            raise
        except BaseException:
            outcome = "refused"
            raise
        finally:
            self._engine.metrics.reloads.labels(outcome).inc()
            self._engine.progress = "ready"
            self._reloading.release()

    def _reload(self, settings: Settings) -> Reloaded:
        start = time.monotonic()
        served = self._description
        files, leaves = self._read(settings)
        loaded = time.monotonic()
        try:
            before = self._probe_old()
            swap_seconds = self._swap(leaves)
        except BaseException:
            self._let_go(files)
            raise
        self._description = served.with_files(settings, files)
        self._let_go(served.files)
        after = self._probe()
        return Reloaded(
            model=self._model.name,
            path=str(files.path),
            load_seconds=loaded - start,
            swap_seconds=swap_seconds,
            probe_tokens=len(after.logprobs),
            max_logprob_difference=None if before is None else after.largest_difference(before),
            mean_logprob=after.mean,
            mean_logprob_before=None if before is None else before.mean,
        )

    def _read(self, settings: Settings) -> tuple[ModelFiles, Sequence[HostArray]]:
        """Reads weights; with several hosts, each host reads its own part."""
        check_source(settings)
        if self._group is None:
            return self._read_here(settings)
        self._group.begin_read(settings)
        try:
            files, leaves = self._read_here(settings)
        except BaseException:
            self._group.end_read(None)
            raise
        try:
            self._group.end_read(files)
        except BaseException:
            self._let_go(files)
            raise
        return files, leaves

    def _read_here(self, settings: Settings) -> tuple[ModelFiles, Sequence[HostArray]]:
        files = find_source(settings, self._report, with_tokenizer=False)
        try:
            return files, self._description.read_leaves(settings, files, self._report)
        except BaseException:
            self._let_go(files)
            raise

    def _swap(self, leaves: Sequence[HostArray]) -> float:
        """Swaps weights in; returns the seconds that it took."""
        done: Future[float] = Future()
        self._engine.send(SwapWeights(self._model.name, leaves, done))
        return done.result()

    def _probe_old(self) -> ProbeScores | None:
        """The scores of weights that new ones may replace even if they compute values that are not finite."""
        try:
            return self._probe()
        except Poisoned:
            return None

    def _probe(self) -> ProbeScores:
        """Scores the probe's text beside the requests of clients."""
        stream = self._engine.submit([probe_request(self._model)], self._model)

        def receive() -> Iterator[TokenBatch]:
            while not stream.is_finished:
                _, batch = stream.get(timeout_seconds=None)
                yield batch

        try:
            return gather_scores(receive())
        finally:
            stream.close()

    def _let_go(self, files: ModelFiles) -> None:
        if files.lease is not None and files.lease is not self._description.files.lease:
            files.lease.close()

    def _report(self, progress: str) -> None:
        self._engine.progress = f"ready; reloading: {progress}"
        log.info("reloading: %s", progress)


def _four_digits(number: float | None) -> str:
    return "unknown" if number is None else f"{number:.4f}"
