"""tracked(): write the progress of a training into files that other programs read."""

import csv
import logging
import math
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from pathlib import Path

from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress

_LOG = logging.getLogger(__name__)
_COLUMNS = [field.name for field in fields(TrainingProgress) if field.name != "first_failure"]


def tracked(
    run: Iterator[TrainingProgress],
    folder: str | Path,
    *,
    former: Sequence[TrainingProgress] = (),
    tensorboard: bool = False,
) -> Iterator[TrainingProgress]:
    """Write the progress of a training into files, and yield it.

    ``progress.csv`` has a row for each iteration, ``nan`` where a number is not known. Files are
    flushed before the progress is yielded. ``run`` is closed when this ends or is closed. What
    cannot be written, as on a full disk, is logged once; the training goes on without it.

    Args:
        run: What ``train`` returned.
        folder: Folder of the files.
        former: For a training that goes on: its progress up to the checkpoint, from
            ``saved_progress``. Rows of iterations that run again are replaced.
        tensorboard: Also write TensorBoard's event files, over env steps.
    """
    with ExitStack() as stack:
        if isinstance(run, Generator):
            stack.callback(run.close)
        kinds: list[type[_CsvWriter | _EventWriter]] = [_CsvWriter]
        if tensorboard:
            kinds.append(_EventWriter)
        writers: dict[type[_CsvWriter | _EventWriter], _CsvWriter | _EventWriter] = {}
        for progress in run:
            for kind in kinds:
                try:
                    if kind not in writers:  # a training that fails before leaves no file
                        writers[kind] = kind(folder, former)
                        stack.callback(_close, writers[kind])
                    writers[kind].write(progress)
                except OSError as error:
                    kinds = [each for each in kinds if each is not kind]
                    _LOG.warning("%s is not written any more: %s", kind.files, error)
            yield progress


def _close(writer: "_CsvWriter | _EventWriter") -> None:
    with suppress(OSError):  # what it still holds finds no room, either
        writer.close()


class _CsvWriter:
    files = "progress.csv"

    def __init__(self, folder: str | Path, former: Sequence[TrainingProgress]) -> None:
        partial = Path(folder, "progress.csv.partial")
        partial.unlink(missing_ok=True)
        self._file = partial.open("x", newline="")  # what another user has put there stays as it is
        self._rows = csv.DictWriter(
            self._file, _COLUMNS, extrasaction="ignore", lineterminator="\n"
        )
        self._rows.writeheader()
        for progress in former:
            self.write(progress)
        partial.rename(partial.with_suffix(""))
        self.close = self._file.close

    def write(self, progress: TrainingProgress) -> None:
        self._rows.writerow(asdict(progress))
        self._file.flush()


class _EventWriter:
    files = "TensorBoard's event file"

    def __init__(self, folder: str | Path, former: Sequence[TrainingProgress]) -> None:
        # Its SummaryWriter writes in a thread, which dies of a full disk; the training would then
        # wait for that thread for ever.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._events = RecordWriter(str(Path(folder, name)))
        self.close = self._events.close
        self._add(file_version="brain.Event:2")
        if former:  # TensorBoard drops what an earlier process wrote of later steps
            start = SessionLog(status=SessionLog.START)
            self._add(step=former[-1].env_steps + 1, session_log=start)

    def write(self, progress: TrainingProgress) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=getattr(progress, name))
            for name in _COLUMNS
            if name != "env_steps" and not math.isnan(getattr(progress, name))
        ]
        self._add(step=progress.env_steps, summary=self._summary(value=values))
        self._events.flush()

    def _add(self, **content: object) -> None:
        self._events.write(self._event(wall_time=time.time(), **content).SerializeToString())
