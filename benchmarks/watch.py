"""From a write to everybody who watches: 1 writer, 1 to 1,000 watchers over SSE, each side in a process of its own.

Every record carries the time of its write (the clock is one for all processes), every delivery is counted and timed.
The watchers' process does nothing else, on bare sockets: it takes less of a core than the server does."""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.measure import Figure
from benchmarks.servers import topics_server
from benchmarks.wire import _put

_SECONDS = 4.0
# Not timed: sockets and caches get warm.
_WARM_UP_NS = 500_000_000
_PATIENCE = 60.0
# With and without a stuck watcher in turn; the start of each turn is not timed.
_TURNS = 16
_TURN = 0.6
_SETTLING = 0.15
_WINDOW = 16
_BACKLOG_RECORDS = 12
_MARK = b'"t":"'
_DIGITS = 20
# Between two looks at the sockets. Woken for every single delivery, the watchers would take a whole core; so they see
# each a little later than it came, which counts.
_NAP = 0.0003
# The end of an event, and of the chunk that it is.
_END = b"\n\n\r\n"


class Sent(msgspec.Struct):
    records: int
    refused: int
    seconds: float


class Ending(msgspec.Struct):
    """What the watchers are told at the end: how much there was, and what to look at more closely."""

    records: int
    windows: list[tuple[int, int]] = []


class Received(msgspec.Struct):
    """Percentiles in milliseconds, of all and of each window, and how much of a core receiving took."""

    deliveries: int
    seconds: float
    p50: float
    p99: float
    windows: list[float]
    load: float


class Run(msgspec.Struct):
    sent: Sent
    received: Received
    # Microseconds of the server's CPU time for each delivery.
    cost: float

    @property
    def note(self) -> str:
        return f"{self.cost:.1f} µs of server CPU a delivery; the watchers took {self.received.load:.0%} of a core"


def run(directory: Path) -> list[Figure]:
    settings = {"TOPICS_MAX_SSE_CONNECTIONS_PER_KEY": "0", "TOPICS_MAX_INFLIGHT_PER_KEY": "0"}
    figures: list[Figure] = []
    with topics_server(directory / "watch", **settings) as (url, pid):
        bench = _Bench(url, pid)
        for watchers, rate in ((1, 500), (100, 500), (1000, 50)):
            figures += bench.measure(watchers, rate)
        figures += bench.measure_stuck()
    return figures


class _Bench:
    def __init__(self, url: str, pid: int) -> None:
        self._url = url
        self._port = url.rpartition(":")[2]
        self._pid = pid
        self._topics = 0

    def measure(self, watchers: int, rate: int) -> list[Figure]:
        most = max([self._run(watchers, 0) for _ in range(3)], key=lambda each: _rate(each.received))
        paced = min([self._run(watchers, rate) for _ in range(3)], key=lambda each: each.received.p99)
        what = f"{watchers:,} watcher{'s' if watchers > 1 else ''}"
        at = f"{what}, {rate} records/s"
        target = "< 10" if watchers == 100 else ""
        reached = "50,000" if watchers == 100 else ""
        return [
            Figure(f"{what}: most deliveries", _rate(most.received), "/s", note=most.note),
            Figure(f"{at}: deliveries", _rate(paced.received), "/s", reached, paced.note),
            Figure(f"{at}: write to delivery, p50", paced.received.p50, "ms"),
            Figure(f"{at}: write to delivery, p99", paced.received.p99, "ms", target),
        ]

    def measure_stuck(self) -> list[Figure]:
        """Within one run, 99 read all the time, and one more is there and stuck, or is not, in turn: so what else the
        machine does meets both. The quietest turn of each counts."""
        topic = self._new_topic()
        self._fill(topic)
        windows: list[tuple[int, int]] = []

        def take_turns() -> None:
            for turn in range(2 * _TURNS):
                stuck = _watch(self._port, topic, receive_buffer=4096) if turn % 2 else None
                time.sleep(_SETTLING)
                start = time.perf_counter_ns()
                time.sleep(_TURN - _SETTLING)
                windows.append((start, time.perf_counter_ns()))
                if stuck is not None:
                    stuck.close()

        turns = threading.Thread(target=take_turns)
        seconds = 2 * _TURNS * _TURN + 1
        received = self._run(99, 500, topic, seconds, turns, windows).received
        fine, stuck = min(received.windows[::2]), min(received.windows[1::2])
        return [
            Figure("99 watchers: p99", fine, "ms"),
            Figure("99 watchers and one that is stuck: p99 of the 99", stuck, "ms"),
            Figure("p99 of the others with one stuck / without", stuck / fine, "ratio", "< 1.1"),
        ]

    def _new_topic(self) -> str:
        self._topics += 1
        topic = f"t{self._topics}"
        _put(self._url, topic, b"{}")
        return topic

    def _run(
        self,
        watchers: int,
        rate: int,
        topic: str = "",
        seconds: float = _SECONDS,
        meanwhile: threading.Thread | None = None,
        windows: Sequence[tuple[int, int]] = (),
    ) -> Run:
        """A rate of 0 is as fast as it goes."""
        topic = topic or self._new_topic()
        with _child("receive", self._port, topic, str(watchers)) as receiving:
            assert receiving.stdin is not None
            assert receiving.stdout is not None
            assert receiving.stdout.readline() == b"ready\n", "the watchers could not connect"
            before = _spent(self._pid)
            with _child("send", self._port, topic, str(rate), str(seconds)) as sending:
                if meanwhile is not None:
                    meanwhile.start()
                    meanwhile.join(_PATIENCE)
                sent = msgspec.json.decode(sending.communicate(timeout=_PATIENCE)[0], type=Sent)
            receiving.stdin.write(msgspec.json.encode(Ending(sent.records, list(windows))) + b"\n")
            receiving.stdin.flush()
            received = msgspec.json.decode(receiving.stdout.readline(), type=Received)
        wanted = sent.records * watchers
        assert received.deliveries == wanted, f"{received.deliveries} deliveries instead of {wanted}"
        assert not rate or sent.records >= 0.95 * rate * seconds, "the writer did not keep its rate"
        return Run(sent, received, (_spent(self._pid) - before) / wanted * 1e6)

    def _fill(self, topic: str) -> None:
        """More than all buffers between the server and a watcher that reads nothing can hold."""
        with _connect(self._port) as writer:
            body = b'{"records":[{"data":"%b"}]}' % (b"x" * 1_000_000)
            for _ in range(_BACKLOG_RECORDS):
                writer.sendall(_post(f"/v0/topics/{topic}", body))
                _answer(writer)


def _rate(received: Received) -> float:
    return received.deliveries / received.seconds


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _child(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.watch", *arguments]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


# -- sockets ---------------------------------------------------------------------------------------------------------


def _connect(port: str, receive_buffer: int = 0) -> socket.socket:
    opened = socket.socket()
    if receive_buffer:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    opened.settimeout(_PATIENCE)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.connect(("127.0.0.1", int(port)))
    return opened


def _post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _answer(client: socket.socket) -> bytes:
    """The body of one answer, which must be a good one."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536) or _fail("the server hung up")
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 20"):
        _fail(data.decode(errors="replace"))
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536) or _fail("the server hung up")
    return body


def _fail(why: str) -> bytes:
    raise SystemExit(why)


# -- the writer's process --------------------------------------------------------------------------------------------


def send(port: str, topic: str, rate: str, seconds: str) -> None:
    """Writes single records for a while: at a fixed rate, whether the answers are slow or not, or a few at a time, as
    fast as they are answered."""
    period = 1 / float(rate) if float(rate) else 0.0
    path = f"/v0/topics/{topic}?return_seqs=false"
    client = _connect(port)
    client.setblocking(False)
    started = time.perf_counter()
    end = started + float(seconds)
    sent = good = bad = 0
    tail = b""
    while (now := time.perf_counter()) < end or good + bad < sent:
        if now > end + _PATIENCE:
            _fail("the writer waits for answers in vain")
        is_over = now >= end
        due = started + sent * period
        may_send = not is_over and (now >= due if period else sent - good - bad < _WINDOW)
        if may_send:
            body = b'{"records":[{"data":{"t":"%0*d"}}]}' % (_DIGITS, time.perf_counter_ns())
            client.send(_post(path, body))
            sent += 1
            continue
        wait = max(due - now, 0.0) if period and not is_over else _PATIENCE
        if select.select([client], [], [], wait)[0]:
            data = tail + (client.recv(65536) or _fail("the server hung up"))
            good += data.count(b"HTTP/1.1 200")
            bad += data.count(b"HTTP/1.1 429")
            # One byte less than what is counted: it may come in two pieces, and is not counted twice.
            tail = data[-11:]
    elapsed = time.perf_counter() - started
    print(msgspec.json.encode(Sent(good, bad, elapsed)).decode(), flush=True)


# -- the watchers' process -------------------------------------------------------------------------------------------


def receive(port: str, topic: str, count: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    watchers = [_watch(port, topic) for _ in range(int(count))]
    print("ready", flush=True)
    gc.disable()
    print(msgspec.json.encode(_receive(watchers)).decode(), flush=True)


def _watch(port: str, topic: str, receive_buffer: int = 0) -> socket.socket:
    """A stream that is live; one with a small buffer begins at the beginning, and is never read."""
    client = _connect(port, receive_buffer)
    where = b'{"from_seq":0}' if receive_buffer else b'{"tail":true}'
    client.sendall(_post("/v0/watch", b'{"topics":{"%b":%b}}' % (topic.encode(), where)))
    url = msgspec.json.decode(_answer(client))["stream_url"]
    client.sendall(f"GET {url} HTTP/1.1\r\nhost: b\r\naccept: text/event-stream\r\n\r\n".encode())
    data = b""
    while not receive_buffer and not (b"caught-up" in data and data.endswith(_END)):
        data += client.recv(65536) or _fail("the server hung up")
    return client


def _receive(watchers: Sequence[socket.socket]) -> Received:
    """Flat, for it must be cheaper than what it measures."""
    recv_of = {}
    tails: dict[int, bytes] = {}
    poll = select.epoll()
    for watcher in watchers:
        watcher.setblocking(False)
        recv_of[watcher.fileno()] = watcher.recv
        poll.register(watcher.fileno(), select.EPOLLIN)
    poll.register(0, select.EPOLLIN)
    clock = time.perf_counter_ns
    times: list[tuple[int, int]] = []
    deliveries = 0
    wanted = -1
    ending = Ending(0)
    started = time.process_time()
    deadline = time.monotonic() + _PATIENCE
    while deliveries != wanted and time.monotonic() < deadline:
        time.sleep(_NAP)
        for number, _ in poll.poll(1.0, 1024):
            if number == 0:
                ending = msgspec.json.decode(os.read(0, 65536), type=Ending)
                wanted = ending.records * len(watchers)
                poll.unregister(0)
                continue
            data = recv_of[number](262144)
            now = clock()
            if not data:
                _fail("the server ended a stream")
            if tails and number in tails:
                data = tails.pop(number) + data
            if not data.endswith(_END):
                end = data.rfind(_END) + len(_END) if _END in data else 0
                tails[number] = data[end:]
                data = data[:end]
            for part in data.split(_MARK)[1:]:
                times.append((int(part[:_DIGITS]), now))
                deliveries += 1
    return _summary(times, ending.windows, time.process_time() - started)


def _summary(times: list[tuple[int, int]], windows: list[tuple[int, int]], cpu: float) -> Received:
    if not times:
        _fail("nothing was delivered")
    first = min(written for written, _ in times)
    seconds = (max(arrived for _, arrived in times) - first) / 1e9
    end = first + int(seconds * 1e9)
    p50, p99 = (_percentile(times, (first + _WARM_UP_NS, end), share) for share in (0.5, 0.99))
    return Received(len(times), seconds, p50, p99, [_percentile(times, each, 0.99) for each in windows], cpu / seconds)


def _percentile(times: list[tuple[int, int]], window: tuple[int, int], share: float) -> float:
    """Of what was written within the window, in milliseconds."""
    taken = sorted(arrived - written for written, arrived in times if window[0] < written < window[1])
    if not taken:
        _fail("nothing was delivered in that time")
    return taken[int(len(taken) * share)] / 1e6


if __name__ == "__main__":
    work = send if sys.argv[1] == "send" else receive
    work(*sys.argv[2:])
