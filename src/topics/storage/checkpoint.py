"""Checkpoint files: frames written aside, synced, renamed. A checkpoint is whole or it is not there."""

from __future__ import annotations

from topics.storage import frame
from topics.storage.frame import HEADER, Frame, position
from topics.storage.fs import File, FileSystem, read_file, write_all

DIRECTORY = "checkpoints"
_SUFFIX = ".ckpt"
_UNFINISHED = ".tmp"
_BUFFER = 1 << 20

KIND_END = 4


def checkpoint_name(number: int) -> str:
    return f"{DIRECTORY}/{number:012d}{_SUFFIX}"


def checkpoint_numbers(fs: FileSystem) -> list[int]:
    return [int(name[: -len(_SUFFIX)]) for name in fs.listdir(DIRECTORY) if name.endswith(_SUFFIX)]


class CheckpointWriter:
    def __init__(self, fs: FileSystem, number: int) -> None:
        self._fs = fs
        self.number = number
        self._unfinished = checkpoint_name(number) + _UNFINISHED
        if fs.exists(self._unfinished):
            fs.remove(self._unfinished)
        self._file: File = fs.create(self._unfinished)
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._offset = 0
        self._frames = 0

    def add(self, kind: int, epoch: int, payload: bytes) -> None:
        header = frame.encode(position(self.number, self._offset), kind, epoch, self._frames, 0, payload)
        self._frames += 1
        self._offset += HEADER + len(payload)
        self._buffer += (header, payload)
        self._buffered += HEADER + len(payload)
        if self._buffered >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        buffers, self._buffer, self._buffered = self._buffer, [], 0
        write_all(self._file, buffers)

    def finish(self) -> None:
        """Writes the end; `publish` may then run on another thread."""
        self.add(KIND_END, 0, b"")
        self._flush()

    def publish(self) -> None:
        self._file.sync()
        self._file.close()
        self._fs.rename(self._unfinished, checkpoint_name(self.number))
        self._fs.sync_dir(DIRECTORY)


def read_checkpoint(fs: FileSystem, number: int) -> list[Frame] | None:
    """The frames of a checkpoint without its end, or None if any of it is missing or wrong."""
    items = list(frame.scan(read_file(fs, checkpoint_name(number)), position(number, 0)))
    frames = [item for item in items if isinstance(item, Frame)]
    whole = len(frames) == len(items) and frames and frames[-1].kind == KIND_END
    return frames[:-1] if whole and all(each.first == index for index, each in enumerate(frames)) else None


def remove_unfinished(fs: FileSystem) -> None:
    for name in fs.listdir(DIRECTORY):
        if name.endswith(_UNFINISHED):
            fs.remove(f"{DIRECTORY}/{name}")
