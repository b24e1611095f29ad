"""One Spark for all tests of this folder, in this process; a real server, and a topic name for each test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.http.server import LocalServer, local_server

# Spark's Python processes must be ones that have topics.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

from pyspark.sql import SparkSession


def need_java() -> None:
    """Spark needs Java 17 or later: installed where that can be done, and said where not."""
    if shutil.which("java") is None and shutil.which("apt-get") is not None and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "openjdk-17-jre-headless"], check=True)
    if shutil.which("java") is None:
        pytest.fail("Spark needs Java 17 or later. On Debian and Ubuntu: apt install openjdk-17-jre-headless")


def session(**conf: str) -> SparkSession:
    builder = SparkSession.builder.master("local[2]").appName("topics-tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        **conf,
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    started = builder.getOrCreate()
    started.sparkContext.setLogLevel("OFF")
    return started


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    need_java()
    started = session()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test of the file uses."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", request.node.name)[-200:].lstrip("._:-")
