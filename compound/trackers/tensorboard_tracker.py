"""TensorBoard tracker: an event file in the run directory, which ``tensorboard --logdir runs`` shows."""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compound.errors import RunDirectoryError
from compound.security.sanitize import sanitize_text
from compound.security.untrusted import UntrustedFolder
from compound.trackers.tracker import Status, TrackedRun

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

FOLDER = "tensorboard"  # in the run directory
PREFIX = "events.out.tfevents."  # of the names of event files
PARAMETERS = "parameters"  # tag of the table of parameters
LONGEST = 16 * 2**20  # bytes of a record
FRAME = 16  # bytes that a record of an event file has in addition to its content: length and checksums


class TensorboardTracker:
    """Logs to one event file in the folder ``tensorboard`` of the run directory.

    A point is one record of the file, so that the points of earlier sessions can be counted: a point that was
    written but not acknowledged before the process was killed is not written again. The id of a run is the
    name of its file.
    """

    def __init__(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._record_writer = RecordWriter
        self._writer: RecordWriter | None = None
        self._held = 0  # points in the file

    def start(self, run: TrackedRun, previous: str) -> str:
        """Create the event file or continue it, without a record that was cut off."""
        folder = UntrustedFolder(run.folder).below(FOLDER).make()
        found = [name for name in folder.names() if name.startswith(PREFIX)]
        name = found[0] if found else f"{PREFIX}{int(time.time()):010d}.{secrets.token_hex(4)}"
        size = 0
        for record in _records(folder, name):
            size += len(record) + FRAME
            self._held += _is_point(record)
        if size < folder.size(name):
            folder.truncate(name, size)
        self._writer = self._record_writer(folder.appender(name))
        if not size:
            self._write(_header())
            self._write(_parameters(run.parameters))
        return name

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float, point: int) -> None:
        """Write scalars at a step, the rounded number of system runs, unless the file has the point."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if point < self._held:
            return
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=at, step=round(system_runs), summary=Summary(value=values)))

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Close the event file; the other files stay where they are, in the run directory."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, event: Event) -> None:
        if self._writer is None:
            raise RuntimeError("the run was not started")
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _header() -> Event:
    """Return the first record of an event file."""
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), file_version="brain.Event:2")


def _parameters(parameters: Mapping[str, str]) -> Event:
    """Return a Markdown table of the parameters, which the Text tab shows."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    rows = [f"| {name} | {_cell(value)} |" for name, value in parameters.items()]
    text = "\n".join(["| parameter | value |", "| --- | --- |", *rows])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag=PARAMETERS, metadata=metadata, tensor=tensor)
    return Event(wall_time=time.time(), summary=Summary(value=[value]))


def _cell(value: str) -> str:
    return sanitize_text(value).replace("|", "\\|").replace("\n", " ")


def _is_point(record: bytes) -> bool:
    """Return whether a record is a point.

    Raises:
        RunDirectoryError: it is no event.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        values = Event.FromString(record).summary.value
    except DecodeError:
        raise RunDirectoryError("the event file of TensorBoard has a record that is no event") from None
    return any(value.HasField("simple_value") for value in values)


def _records(folder: UntrustedFolder, name: str) -> Iterator[bytes]:
    """Yield the complete records of an event file, up to a damaged one; none if it does not exist.

    A record consists of its length, the checksum of that, its content and the checksum of the content. The
    file is read here, as TensorBoard's own loader reads records of any length into memory.

    Raises:
        RunDirectoryError: a record is longer than any that this tracker writes.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    if folder.kind(name) is None:
        return
    with folder.reader(name) as file:
        while len(header := file.read(12)) == 12:
            size, checksum = struct.unpack("<QI", header)
            if masked_crc32c(header[:8]) != checksum:
                return
            if size > LONGEST:
                raise RunDirectoryError(
                    f"{folder.place(name)} has a record of {size} bytes", hint="remove the file"
                )
            record, end = file.read(size), file.read(4)
            if len(end) < 4 or struct.unpack("<I", end) != (masked_crc32c(record),):
                return
            yield record
