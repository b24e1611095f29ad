"""`topics queue …`: jobs, and the leases that hold them."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from contextlib import suppress
from typing import Annotated

import typer

from topics.cli.common import (
    DEFAULT_URL,
    LOSS,
    REFUSED,
    FailOnLoss,
    Json,
    Key,
    QueueName,
    RetryMs,
    Url,
    command,
    complete_topics,
    connect,
)
from topics.cli.show import RED, emit, note, show_loss, show_record, table, time_of
from topics.core.answers import Job
from topics.core.tombstone import Tombstone

app = typer.Typer(
    help="Jobs: claim, ack, nack, extend, work, redrive, unblock, leases.", no_args_is_help=True, add_completion=False
)

Node = Annotated[str | None, typer.Option("--node", envvar="TOPICS_NODE", help="Who works.")]
Seqs = Annotated[list[int] | None, typer.Argument(min=0, help="Jobs, by seq.")]
Lease = Annotated[str | None, typer.Option("--lease", help="The lease that holds them; without seqs, all of it.")]
LeaseMs = Annotated[int | None, typer.Option("--lease-ms", min=100, max=86_400_000, help="How long they are held.")]


def _holder(node: str | None, seqs: list[int] | None, lease: str | None) -> tuple[str | None, list[int] | None]:
    if lease is None and (not seqs or not node):
        raise typer.BadParameter("say which jobs: --lease, or --node and seqs")
    return node, seqs or None


@app.command(help="Lease jobs, and print them.")
@command
def claim(
    queue: QueueName,
    node: Annotated[str, typer.Option("--node", envvar="TOPICS_NODE", help="Who works.")],
    most: Annotated[int, typer.Option("--max", min=1, help="At most so many jobs.")] = 1,
    lease_ms: LeaseMs = None,
    wait_ms: Annotated[int, typer.Option("--wait-ms", min=0, max=30_000, help="Wait for jobs.")] = 0,
    fail_on_loss: FailOnLoss = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        claimed = client.claim(queue, node, most, lease_ms=lease_ms, wait_ms=wait_ms)
    if as_json:
        emit(claimed)
    else:
        for job in claimed.claimed:
            show_record(job)
            note(f"          delivery {job.deliveries}, held until {time_of(job.deadline)}")
        if claimed.lease_id is not None:
            note(f"lease {claimed.lease_id}")
        note(f"{claimed.count} claimed, {claimed.ready} ready")
        if claimed.lost:
            note(f"this queue has lost {claimed.lost} jobs", RED)
            if claimed.tombstone is not None:
                show_loss(claimed.tombstone)
    if claimed.lost and fail_on_loss:
        raise typer.Exit(LOSS)


def _settled(word: str, count: int, skipped: list[int], ready: int, in_flight: int) -> None:
    print(f"{count} {word}; {ready} ready, {in_flight} in flight")
    if skipped:
        note(f"not held as named, skipped: {' '.join(map(str, skipped))}", RED)
    if not count:
        raise typer.Exit(REFUSED)


@app.command(help="Jobs that are done: they go for good.")
@command
def ack(
    queue: QueueName,
    seqs: Seqs = None,
    node: Node = None,
    lease: Lease = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    node, seqs = _holder(node, seqs, lease)
    with connect(url, key, retry_ms) as client:
        answer = client.ack(queue, node=node, seqs=seqs, lease_id=lease)
    if as_json:
        emit(answer)
        raise typer.Exit(0 if answer.acked else REFUSED)
    _settled("acked", answer.acked, answer.skipped_seqs, answer.ready, answer.in_flight)


@app.command(help="Give jobs back, perhaps for later.")
@command
def nack(
    queue: QueueName,
    seqs: Seqs = None,
    node: Node = None,
    lease: Lease = None,
    delay_ms: Annotated[int, typer.Option("--delay-ms", min=0, help="Not before this time is over.")] = 0,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    node, seqs = _holder(node, seqs, lease)
    with connect(url, key, retry_ms) as client:
        answer = client.nack(queue, node=node, seqs=seqs, lease_id=lease, delay_ms=delay_ms)
    if as_json:
        emit(answer)
        raise typer.Exit(0 if answer.nacked else REFUSED)
    _settled("given back", answer.nacked, answer.skipped_seqs, answer.ready, answer.in_flight)


@app.command(help="Hold jobs longer.")
@command
def extend(
    queue: QueueName,
    seqs: Seqs = None,
    node: Node = None,
    lease: Lease = None,
    lease_ms: LeaseMs = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    node, seqs = _holder(node, seqs, lease)
    with connect(url, key, retry_ms) as client:
        answer = client.extend(queue, node=node, seqs=seqs, lease_id=lease, lease_ms=lease_ms)
    if as_json:
        emit(answer)
        raise typer.Exit(0 if answer.extended else REFUSED)
    for seq, deadline in answer.deadlines.items():
        print(f"{seq:>8}  held until {time_of(deadline)}")
    _settled("extended", answer.extended, answer.skipped_seqs, answer.ready, answer.in_flight)


@app.command(help="Put blocked jobs back in line.")
@command
def unblock(
    queue: QueueName,
    seqs: Annotated[list[int], typer.Argument(min=0, help="Jobs, by seq.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        answer = client.unblock(queue, seqs)
    if as_json:
        emit(answer)
        raise typer.Exit(0 if answer.unblocked else REFUSED)
    _settled("unblocked", answer.unblocked, answer.skipped_seqs, answer.ready, answer.in_flight)


@app.command(help="Move dead-lettered jobs back where they came from.")
@command
def redrive(
    queue: Annotated[str, typer.Argument(help="A dead-letter topic.", autocompletion=complete_topics)],
    most: Annotated[int, typer.Option("--max", min=1, help="At most so many jobs.")] = 100,
    to: Annotated[str | None, typer.Option("--to", help="Another queue than the one they came from.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    with connect(url, key, retry_ms) as client:
        answer = client.redrive(queue, most, to)
    if as_json:
        emit(answer)
    else:
        print(f"{answer.moved} moved, {answer.unblocked} unblocked, {answer.skipped} skipped")


@app.command(help="Jobs that are out or set aside: by whom, until when, how often delivered.")
@command
def leases(
    queue: QueueName,
    url: Url = DEFAULT_URL,
    key: Key = None,
    retry_ms: RetryMs = 2_000,
    as_json: Json = False,
) -> None:
    rows: list[list[str]] = []
    after = 0
    with connect(url, key, retry_ms) as client:
        while True:
            page = client.leases(queue, 1000, after)
            for lease in page.leases:
                after = lease.seq
                if as_json:
                    emit(lease)
                    continue
                until = lease.deadline if lease.deadline is not None else lease.not_before
                rows.append(
                    [
                        *(str(lease.seq), lease.state, lease.node or "", "" if until is None else time_of(until)),
                        *(str(lease.deliveries), lease.lease_id or ""),
                    ]
                )
            if len(page.leases) < 1000:
                break
    if not as_json:
        table(["seq", "state", "node", "until", "deliveries", "lease"], rows)


@app.command(
    help="Work: run a command for each job, or print it. Exit code 0 of the command acks, others give it back."
)
@command
def work(
    queue: QueueName,
    run: Annotated[
        list[str] | None,
        typer.Argument(help="A command; it gets the job's data on standard input.", metavar="[-- COMMAND…]"),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, max=1000, help="Jobs at a time.")] = 1,
    node: Node = None,
    lease_ms: Annotated[
        int, typer.Option("--lease-ms", min=100, max=86_400_000, help="Leases; they are extended by themselves.")
    ] = 30_000,
    most: Annotated[int | None, typer.Option("--max", min=1, help="End after so many jobs.")] = None,
    delay_ms: Annotated[int, typer.Option("--delay-ms", min=0, help="A failed job stays away so long.")] = 1000,
    stop_ms: Annotated[int, typer.Option("--stop-ms", min=0, help="How long Ctrl-C waits for jobs at work.")] = 30_000,
    fail_on_loss: FailOnLoss = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Json = False,
) -> None:
    from topics.client.worker import Postpone, Worker

    count = 0
    has_loss = False

    async def handle(job: Job) -> None:
        nonlocal count
        code = 0
        if run:
            code = await _run(run, queue, job)
        if as_json:
            emit({"job": job} | ({"exit_code": code} if run else {}))
        elif run:
            print(f"{job.seq:>8}  {'done' if code == 0 else f'exit code {code}, given back'}")
        else:
            show_record(job)
        sys.stdout.flush()
        count += 1
        if count == most:
            worker.stop()
        if code:
            raise Postpone(delay_ms)

    def on_loss(stone: Tombstone | None, lost: int) -> None:
        nonlocal has_loss
        has_loss = True
        if as_json:
            emit({"lost": lost, "tombstone": stone})
        else:
            note(f"{queue} has lost {lost} jobs", RED)
            if stone is not None:
                show_loss(stone)

    worker = Worker(
        url,
        queue,
        handle,
        key=key,
        node=node or f"{socket.gethostname()[:80]}-{os.getpid()}-{secrets.token_hex(4)}",
        # The last jobs are not to be more than were asked for.
        concurrency=min(concurrency, most or concurrency),
        lease_ms=lease_ms,
        error_delay_ms=delay_ms,
        stop_ms=stop_ms,
        wait_ms=2000,
        on_loss=on_loss,
    )
    worker.run()
    if not as_json:
        note(f"{worker.done} done")
    if has_loss and fail_on_loss:
        raise typer.Exit(LOSS)


async def _run(command_line: list[str], queue: str, job: Job) -> int:
    """One process for one job. It is ended when the worker is told to hurry."""
    environment = {
        **os.environ,
        "TOPICS_QUEUE": queue,
        "TOPICS_SEQ": str(job.seq),
        "TOPICS_DELIVERIES": str(job.deliveries),
        "TOPICS_TAG": job.tag or "",
    }
    try:
        # A group of its own: Ctrl-C is for us, the job is finished.
        process = await asyncio.create_subprocess_exec(
            *command_line, stdin=asyncio.subprocess.PIPE, env=environment, start_new_session=True
        )
    except OSError as error:
        note(f"cannot run {command_line[0]}: {error.strerror}", RED)
        return 127
    try:
        with suppress(BrokenPipeError, ConnectionResetError):
            await process.communicate(bytes(job.raw))
        return await process.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise
