"""Where a lake lies: a folder of this machine, or any path that Spark's Hadoop can write. Few verbs, and one promise: a
file that `create` makes is there whole or not at all, and never over another."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from topics.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Object stores: a new object appears when it is whole, and a rename is a copy.
_OBJECT_STORES = ("s3", "s3a", "s3n", "gs", "abfs", "abfss", "wasb", "wasbs", "oss", "obs", "cosn")


class Entry(msgspec.Struct, frozen=True):
    """A file: where it is below the root, how large, and when it was last written, in milliseconds."""

    path: str
    bytes: int
    changed: int


class Store(Protocol):
    """Paths are relative to the root, with `/` in between."""

    @property
    def uri(self) -> str:
        """The root as Spark is told it."""

    def read(self, path: str) -> bytes | None:
        """The whole content; None when there is no such file."""

    def create(self, path: str, content: bytes) -> bool:
        """Makes a file, durably; False when there is one of that name already."""

    def replace(self, path: str, content: bytes) -> None:
        """Makes a file, or makes it anew. For hints only: a reader may find it missing for a moment."""

    def move(self, path: str, to: str) -> None:
        """Moves a file to a name that nobody has; durably."""

    def delete(self, path: str) -> None:
        """Removes a file or a folder, if it is there."""

    def walk(self, path: str) -> Iterator[Entry]:
        """All files below a folder, in no order."""

    def local(self, path: str) -> Path | None:
        """Where this machine has a file, if it has it."""


def open_store(root: str, spark: SparkSession | None = None) -> Store:
    scheme = urlsplit(root).scheme
    if scheme in ("", "file"):
        return LocalStore(Path(unquote(urlsplit(root).path)) if scheme else Path(root))
    if spark is None:
        raise InvalidRequest(f"{root} is not on this machine: give the SparkSession that can reach it")
    return HadoopStore(root, spark)


class LocalStore:
    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def uri(self) -> str:
        return str(self._root)

    def read(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, path: str, content: bytes) -> bool:
        target = self._root / path
        draft = self._draft(target, content)
        try:
            # A link, because a rename would replace what is there.
            os.link(draft, target)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        _sync_folder(target.parent)
        return True

    def replace(self, path: str, content: bytes) -> None:
        target = self._root / path
        self._draft(target, content).replace(target)

    def _draft(self, target: Path, content: bytes) -> Path:
        self._make_folder(target.parent)
        draft = target.parent / f".{uuid.uuid4().hex}.draft"
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return draft

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            made = [folder, *folder.parents]
            folder.mkdir(parents=True, exist_ok=True)
            for each in made:
                if each == self._root.parent:
                    break
                _sync_folder(each.parent)

    def move(self, path: str, to: str) -> None:
        source, target = self._root / path, self._root / to
        self._make_folder(target.parent)
        # Spark has written it and left it to the kernel; what the manifest names must outlive a power cut.
        with source.open("rb") as file:
            os.fsync(file.fileno())
        os.link(source, target)
        source.unlink()
        # Nobody names it yet, and it is no left-over for an hour from now.
        os.utime(target)
        _sync_folder(target.parent)

    def delete(self, path: str) -> None:
        target = self._root / path
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                target.unlink()

    def walk(self, path: str) -> Iterator[Entry]:
        for folder, _, names in os.walk(self._root / path):
            for name in names:
                file = Path(folder) / name
                with suppress(FileNotFoundError):
                    found = file.stat()
                    relative = str(file.relative_to(self._root))
                    yield Entry(relative, found.st_size, found.st_mtime_ns // 1_000_000)

    def local(self, path: str) -> Path | None:
        return self._root / path


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class HadoopStore:
    """Through Spark's JVM. On HDFS and its like a rename to a taken name fails, which makes `create` exclusive; an
    object store is asked for a conditional create instead (S3A of Hadoop 3.4.2 and later knows it)."""

    def __init__(self, root: str, spark: SparkSession) -> None:
        jvm: Any = spark.sparkContext._jvm
        self._jvm = jvm
        self._conf = spark.sparkContext._jsc.hadoopConfiguration()
        self._root = jvm.org.apache.hadoop.fs.Path(root)
        self._fs = self._root.getFileSystem(self._conf)
        self._root = self._fs.makeQualified(self._root)
        self._context = jvm.org.apache.hadoop.fs.FileContext.getFileContext(self._root.toUri(), self._conf)
        self._is_objects = self._root.toUri().getScheme() in _OBJECT_STORES
        gateway: Any = spark.sparkContext._gateway
        self._no_options = gateway.new_array(jvm.org.apache.hadoop.fs.Options.Rename, 0)

    @property
    def uri(self) -> str:
        return str(self._root.toString())

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, path) if path else self._root

    def read(self, path: str) -> bytes | None:
        target = self._path(path)
        if not self._fs.exists(target):
            return None
        stream = self._fs.open(target)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def create(self, path: str, content: bytes) -> bool:
        target = self._path(path)
        if self._fs.exists(target):
            return False
        if self._is_objects:
            return self._create_object(target, content)
        draft = self._path(f"{path}.{uuid.uuid4().hex}.draft")
        self._write(self._fs.create(draft, False), content)
        try:
            self._context.rename(draft, target, self._no_options)
        except Exception as error:
            self._fs.delete(draft, False)
            if "FileAlreadyExistsException" in str(error):
                return False
            raise
        return True

    def _create_object(self, target: Any, content: bytes) -> bool:
        builder = self._fs.createFile(target).overwrite(False)
        builder.opt("fs.option.create.conditional.overwrite", True)
        try:
            self._write(builder.build(), content)
        except Exception as error:
            if "FileAlreadyExistsException" in str(error) or "412" in str(error):
                return False
            raise
        return True

    def _write(self, stream: Any, content: bytes) -> None:
        try:
            stream.write(bytearray(content))
            if not self._is_objects:
                stream.hsync()
        finally:
            stream.close()

    def replace(self, path: str, content: bytes) -> None:
        self._write(self._fs.create(self._path(path), True), content)

    def move(self, path: str, to: str) -> None:
        target = self._path(to)
        self._fs.mkdirs(target.getParent())
        if self._fs.exists(target) or not self._fs.rename(self._path(path), target):
            raise FileExistsError(f"cannot move {path} to {to}")
        self._fs.setTimes(target, time.time_ns() // 1_000_000, -1)

    def delete(self, path: str) -> None:
        self._fs.delete(self._path(path), True)

    def local(self, path: str) -> Path | None:
        return None

    def walk(self, path: str) -> Iterator[Entry]:
        target = self._path(path)
        if not self._fs.exists(target):
            return
        files = self._fs.listFiles(target, True)
        prefix = len(self._root.toUri().getPath().rstrip("/")) + 1
        while files.hasNext():
            found = files.next()
            relative = found.getPath().toUri().getPath()[prefix:]
            yield Entry(relative, found.getLen(), found.getModificationTime())
