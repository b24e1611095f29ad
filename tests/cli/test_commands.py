"""The commands of the contract, each against a real server: what they do, what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.http.server import eventually, local_server
from topics.cli.read import parse_time
from topics.client.sync import Client

# -- topics ------------------------------------------------------------------------------------------------------------


def test_put_creates_a_topic_with_its_configuration(topics: Run, client: Client, topic: str) -> None:
    done = topics("put", topic, "--cap-records", "3", "--durability", "fsync", "--no-dedupe-node")
    assert done.out.splitlines()[0] == f"{topic} is created"
    config = client.get(topic).config
    assert (config.cap_records, config.durability, config.dedupe_node) == (3, "fsync", False)
    assert topics("put", topic, "--set", "priority=7").out.startswith(f"{topic} is changed")
    assert client.get(topic).config.priority == 7
    topics("put", topic, "--set", "priority=null")
    assert client.get(topic).config.priority is None
    assert client.get(topic).config.cap_records == 3


def test_put_as_json(topics: Run, topic: str) -> None:
    answer = topics("put", topic, "--type", "queue", "--max-deliveries", "2", "--json").json
    assert answer["created"] is True
    assert answer["config"]["max_deliveries"] == 2


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--discard", "new"], 2, "discard must be one of old, reject"),
        (["--ttl-ms", "soon"], 2, "--ttl-ms"),
        (["--set", "priority"], 2, "FIELD=JSON"),
        (["--set", "cap_record=3"], 2, "cap_record"),
        (["--seq-base", "0"], 2, "seq_base"),
        (["--dlq-strategy", "block_and_dlq", "--type", "queue"], 2, "dead_letter"),
    ],
)
def test_put_refuses_by_name(args: list[str], code: int, message: str, topics: Run, topic: str) -> None:
    assert message in topics("put", topic, *args, code=code).err


def test_put_of_another_type_is_refused(topics: Run, topic: str) -> None:
    topics("put", topic)
    assert "type" in topics("put", topic, "--type", "queue", code=1).err


def test_get_shows_what_is_there_and_what_was_lost(topics: Run, client: Client, topic: str) -> None:
    client.put(topic, cap_records=2)
    client.write(topic, [{"data": n} for n in range(5)])
    out = topics("get", topic).out
    assert "seqs below 4 fell out" in out
    assert topics("get", topic, "--json").json["evict_floor"] == 4


def test_get_of_nothing_is_1(topics: Run) -> None:
    done = topics("get", "nothing", code=1)
    assert done.err == "topics: topic 'nothing' does not exist\n"
    error = json.loads(topics("get", "nothing", "--json", code=1).err)
    assert error["error"]["code"] == "topic_not_found"


def test_list_goes_through_all_pages(topics: Run, client: Client, topic: str) -> None:
    for n in range(12):
        client.put(f"{topic}.{n:02}")
    lines = topics("list", topic, "--json").lines
    assert [line["topic"] for line in lines] == [f"{topic}.{n:02}" for n in range(12)]
    assert len(topics("list", topic).out.splitlines()) == 13
    assert "no topics" in topics("list", "zzz").err


def test_drop_deletes_a_topic(topics: Run, client: Client, topic: str) -> None:
    client.write(topic, [{"data": 1}])
    assert "topic_not_empty" in topics("drop", topic, "--if-empty", "--json", code=1).err
    assert topics("drop", topic).out == f"{topic} is deleted\n"
    assert topics("drop", topic, "--json").json["deleted"] is False


# -- write -------------------------------------------------------------------------------------------------------------


def test_write_takes_json_arguments_byte_for_byte(topics: Run, client: Client, topic: str) -> None:
    done = topics("write", topic, "1.0", '{"a":  [1e2]}', '"x"', "--tag", "t", "--node", "n", "--meta", "k=v=w")
    assert done.out == f"{topic}: seqs 1 to 3\n"
    records = client.diff(topic, include_tags=True).records
    assert [bytes(record.raw) for record in records] == [b"1.0", b'{"a":  [1e2]}', b'"x"']
    assert (records[0].tag, records[0].node, records[0].meta) == ("t", "n", {"k": "v=w"})
    assert topics("write", topic, "4", "--json").json["seqs"] == [4]


def test_write_takes_text(topics: Run, client: Client, topic: str) -> None:
    topics("write", topic, "--text", "hello world", "3")
    assert [record.data for record in client.diff(topic).records] == ["hello world", "3"]


def test_write_with_a_key_is_made_once(topics: Run, client: Client, topic: str) -> None:
    topics("write", topic, "1", "--idempotency-key", "k")
    assert "was there already" in topics("write", topic, "1", "--idempotency-key", "k").out
    assert client.get(topic).count == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{bad"], "argument 1 is not JSON"),
        (["1", "hello"], "argument 2 is not JSON"),
        (["1", "--meta", "k"], "NAME=TEXT"),
        (["1", "--records"], "--records is for standard input"),
        (["1", "--batch", "0"], "--batch"),
    ],
)
def test_write_refuses_bad_arguments(args: list[str], message: str, topics: Run, topic: str) -> None:
    assert message in topics("write", topic, *args, code=2).err


def test_write_to_a_topic_that_must_exist(topics: Run, topic: str) -> None:
    assert "does not exist" in topics("write", topic, "1", "--no-create", code=1).err


def test_write_reads_lines(topics: Run, client: Client, topic: str) -> None:
    lines = "".join(f'{{"n": {n}}}\n' for n in range(2500))
    done = topics("write", topic, "--batch", "100", input=lines + "\n  \n")
    assert done.out == f"{topic}: 2500 records written\n"
    assert [record.data["n"] for record in client.read(topic)] == list(range(2500))  # type: ignore[union-attr]


def test_write_reads_lines_of_whole_records(topics: Run, client: Client, topic: str) -> None:
    lines = '{"data": 1, "tag": "own"}\n{"data": {"x": 1.50}, "meta": {"a": "b"}}\n'
    done = topics("write", topic, "--records", "--tag", "t", "--json", input=lines)
    assert done.json == {"topic": topic, "written": 2, "unwritten": 0, "first_seq": 1, "last_seq": 2}
    first, second = client.diff(topic, include_tags=True).records
    assert (first.tag, second.tag, second.meta) == ("own", "t", {"a": "b"})
    assert bytes(second.raw) == b'{"x": 1.50}'


def test_a_line_that_is_not_json_is_named_and_what_came_before_it_is_written(
    topics: Run, client: Client, topic: str
) -> None:
    done = topics("write", topic, input="1\n2\n{bad\n4\n", code=2)
    assert "line 3 is not JSON" in done.err
    assert "2 records written" in done.out
    assert [record.data for record in client.diff(topic).records] == [1, 2]
    assert "line 1 is not a record" in topics("write", topic, "--records", input="5\n", code=2).err


def test_a_refusal_in_the_middle_of_lines_tells_how_far_it_came(topics: Run, client: Client, topic: str) -> None:
    client.put(topic, cap_records=25, discard="reject")
    done = topics("write", topic, "--batch", "10", "--json", input="".join(f"{n}\n" for n in range(100)), code=1)
    assert done.json["written"] == 20
    assert done.json["unwritten"] >= 10
    assert "cap_records" in done.err
    assert client.get(topic).count == 20


# -- reading -----------------------------------------------------------------------------------------------------------


def lossy(client: Client, topic: str) -> None:
    client.put(topic, cap_records=3)
    client.write(topic, [{"data": n, "tag": f"t{n}"} for n in range(5)])


def test_diff_shows_losses_and_records(topics: Run, client: Client, topic: str) -> None:
    lossy(client, topic)
    done = topics("diff", topic)
    first, *rest = done.out.splitlines()
    assert first.split() == ["LOST", "seqs", "1", "to", "2:", "2", "records,", "cap"]
    assert [line.split()[0] for line in rest] == ["3", "4", "5"]
    assert "[t2]" in rest[0]
    assert "next: --from 5" in done.err
    assert [record["data"] for record in topics("diff", topic, "--json").json["records"]] == [2, 3, 4]


def test_diff_of_everything_is_one_item_a_line(topics: Run, client: Client, topic: str) -> None:
    lossy(client, topic)
    lines = topics("diff", topic, "--all", "--limit", "1", "--json").lines
    assert lines[0]["tombstone"]["gap_to"] == 2
    assert [line["$seq"] for line in lines[1:]] == [3, 4, 5]
    assert [line["$seq"] for line in topics("diff", topic, "--all", "--from", "3", "--to", "4", "--json").lines] == [4]


def test_diff_selects_by_tag(topics: Run, client: Client, topic: str) -> None:
    client.write(topic, [{"data": n, "tag": "ab"[n % 2] + str(n)} for n in range(4)])
    assert len(topics("diff", topic, "--match-prefix", "a", "--json").json["records"]) == 2
    assert len(topics("diff", topic, "--match", "a", "--json").json["records"]) == 0
    assert "exclude each other" in topics("diff", topic, "--match", "a", "--match-prefix", "a", code=2).err


@pytest.mark.parametrize(
    "args", [["diff"], ["diff", "--all"], ["tail", "--from", "0"], ["diff", "--json"], ["diff", "--all", "--json"]]
)
def test_a_loss_is_4_for_whoever_asks(args: list[str], topics: Run, client: Client, topic: str) -> None:
    lossy(client, topic)
    command, *options = args
    topics(command, topic, *options, "--fail-on-loss", code=4)


def test_no_loss_is_0_for_whoever_asks(topics: Run, client: Client, topic: str) -> None:
    lossy(client, topic)
    topics("diff", topic, "--from", "2", "--fail-on-loss")


def test_tail_follows_and_ends_after_so_many(topics: Run, client: Client, topic: str) -> None:
    lossy(client, topic)
    lines = topics("tail", topic, "--from", "0", "--max", "2", "--json").lines
    assert lines[0]["tombstone"]["reason"] == "cap"
    assert [line["$seq"] for line in lines[1:]] == [3, 4]
    assert [line["$seq"] for line in topics("tail", topic, "-n", "1", "--max", "1", "--json").lines] == [5]


def test_watch_follows_several_topics(topics: Run, client: Client, topic: str) -> None:
    lossy(client, f"{topic}.a")
    client.write(f"{topic}.b", [{"data": "x"}])
    lines = topics("watch", f"{topic}.a@0", f"{topic}.b@0", "--until-caught-up", "--json").lines
    assert [line["record"]["$seq"] for line in lines if line["topic"].endswith("a") and "record" in line] == [3, 4, 5]
    assert [line["record"]["data"] for line in lines if line["topic"].endswith("b") and "record" in line] == ["x"]
    assert sum("caught_up" in line for line in lines) == 2
    text = topics("watch", f"{topic}.a@0", "--max", "1").out
    assert "LOST" in text
    topics("watch", f"{topic}.a@0", "--fail-on-loss", code=4)
    assert "NAME@SEQ" in topics("watch", f"{topic}.a@x", code=2).err
    topics("watch", "nothing", code=1)


def test_seek_finds_a_cursor(topics: Run, client: Client, topic: str) -> None:
    client.write(topic, [{"data": 1}])
    assert topics("seek", topic, "0").out == "0\n"
    assert topics("seek", topic, "1h", "--json").json["from_seq"] == 0
    assert topics("seek", topic, "2999-01-01").out == "1\n"
    assert "a time is" in topics("seek", topic, "soon", code=2).err


@pytest.mark.parametrize(
    ("text", "ts"),
    [
        ("1000", 1000),
        ("90s", 10_000_000 - 90_000),
        ("2h", 10_000_000 - 7_200_000),
        ("9d", 0),
        ("1970-01-01T00:00:01", 1000),
        ("1970-01-01T01:00:01+01:00", 1000),
        ("1970-01-02", 86_400_000),
    ],
)
def test_times_as_people_write_them(text: str, ts: int) -> None:
    assert parse_time(text, 10_000_000) == ts


# -- deleting ----------------------------------------------------------------------------------------------------------


def test_delete_by_seq_and_tag(topics: Run, client: Client, topic: str) -> None:
    client.write(topic, [{"data": n, "tag": "ab"[n % 2]} for n in range(6)])
    assert topics("delete", topic, "--before", "3").out == "2 records deleted; 4 left, from seq 3\n"
    assert topics("delete", topic, "--match", "a", "--trim", "--json").json["deleted"] == 2
    past = topics("deletes", topic, "--json").json["deletes"]
    assert [each["purpose"] for each in past] == ["erase", "trim"]
    assert len(topics("deletes", topic, "--after", "1").out.splitlines()) == 2


def test_delete_of_nothing_in_particular_is_refused(topics: Run, topic: str) -> None:
    assert f"topics drop {topic}" in topics("delete", topic, code=2).err


# -- queues ------------------------------------------------------------------------------------------------------------


def jobs(client: Client, topic: str, count: int = 3, **config: object) -> None:
    client.put(topic, type="queue", **config)
    client.write(topic, [{"data": {"n": n}} for n in range(count)])


def test_a_job_is_claimed_extended_acked(topics: Run, client: Client, topic: str) -> None:
    jobs(client, topic)
    claimed = topics("queue", "claim", topic, "--node", "w", "--max", "2", "--json").json
    assert [job["$seq"] for job in claimed["claimed"]] == [1, 2]
    lease = claimed["lease_id"]
    assert "held until" in topics("queue", "extend", topic, "--lease", lease, "--lease-ms", "60000").out
    assert topics("queue", "ack", topic, "1", "--node", "w").out.startswith("1 acked; 1 ready, 1 in flight")
    assert [line["$seq"] for line in topics("queue", "leases", topic, "--json").lines] == [2]
    assert "in_flight" in topics("queue", "leases", topic).out
    assert topics("queue", "nack", topic, "--lease", lease, "--delay-ms", "3600000").out.startswith("1 given back")
    state = client.get(topic).queue
    assert state is not None
    assert (state.ready, state.delayed) == (1, 1)


def test_what_is_not_held_is_1(topics: Run, client: Client, topic: str) -> None:
    jobs(client, topic)
    done = topics("queue", "ack", topic, "1", "--node", "w", code=1)
    assert "skipped: 1" in done.err
    assert topics("queue", "nack", topic, "1", "--node", "w", "--json", code=1).json["nacked"] == 0
    topics("queue", "extend", topic, "1", "--node", "w", code=1)
    topics("queue", "unblock", topic, "1", code=1)
    assert "--lease, or --node and seqs" in topics("queue", "ack", topic, "1", code=2).err


def test_a_log_is_no_queue(topics: Run, client: Client, topic: str) -> None:
    client.put(topic)
    assert "queue" in topics("queue", "claim", topic, "--node", "w", code=1).err


def test_a_queue_that_has_lost_jobs_says_so(topics: Run, client: Client, topic: str) -> None:
    jobs(client, topic, 5, cap_records=2)
    done = topics("queue", "claim", topic, "--node", "w", "--fail-on-loss", code=4)
    assert "has lost 3 jobs" in done.err
    assert "LOST" in done.out


def test_work_runs_a_command_for_each_job(topics: Run, client: Client, topic: str, tmp_path: Path) -> None:
    jobs(client, topic, 4)
    script = f'cat > {tmp_path}/$TOPICS_SEQ; test "$TOPICS_SEQ" != 2'
    lines = topics(
        *("queue", "work", topic, "--max", "4", "--delay-ms", "3600000", "--json", "--", "sh", "-c", script)
    ).lines
    assert sorted((line["job"]["$seq"], line["exit_code"]) for line in lines) == [(1, 0), (2, 1), (3, 0), (4, 0)]
    assert json.loads((tmp_path / "3").read_text()) == {"n": 2}
    state = client.get(topic).queue
    assert state is not None
    assert (state.delayed, state.ready, state.in_flight, client.get(topic).count) == (1, 0, 0, 1)


def test_work_without_a_command_prints_jobs(topics: Run, client: Client, topic: str) -> None:
    jobs(client, topic, 3)
    done = topics("queue", "work", topic, "--max", "3", "--concurrency", "1")
    assert [line.split()[0] for line in done.out.splitlines()] == ["1", "2", "3"]
    assert "3 done" in done.err
    assert client.get(topic).count == 0


def test_a_command_that_cannot_be_run_gives_its_job_back(topics: Run, client: Client, topic: str) -> None:
    jobs(client, topic, 1)
    done = topics("queue", "work", topic, "--max", "1", "--", "/no/such/command")
    assert "cannot run /no/such/command" in done.err
    assert client.get(topic).count == 1


def test_redrive_moves_jobs_back(topics: Run, client: Client, topic: str) -> None:
    dead = f"{topic}.dead"
    jobs(client, topic, 1, max_deliveries=1, dead_letter=dead)
    client.claim(topic, "w")
    client.nack(topic, node="w", seqs=[1])
    assert client.claim(topic, "w").count == 0
    assert topics("queue", "redrive", dead, "--json").json["moved"] == 1
    assert client.claim(topic, "w").count == 1


def test_unblock_puts_jobs_back(topics: Run, client: Client, topic: str) -> None:
    jobs(client, topic, 1, max_deliveries=1, dlq_strategy="block")
    client.claim(topic, "w")
    client.nack(topic, node="w", seqs=[1])
    assert client.claim(topic, "w").count == 0
    assert topics("queue", "unblock", topic, "1").out.startswith("1 unblocked")


# -- routers -----------------------------------------------------------------------------------------------------------


def test_routers_are_made_shown_changed_and_deleted(topics: Run, client: Client, topic: str) -> None:
    client.write(f"{topic}.a", [{"data": n, "tag": f"t{n}"} for n in range(3)])
    made = topics(
        "routers", "put", topic, f"{topic}.a", f"{topic}.b", "--earliest", "--match-prefix", "t", "--json"
    ).json
    assert (made["created"], made["filter"]) == (True, ["tag", "Glob", "t*"])
    # A router that catches up is not waited for.
    eventually(lambda: [record.data for record in client.diff(f"{topic}.b").records] == [0, 1, 2], "the copies")
    assert "is changed" in topics("routers", "put", topic, "--no-preserve-tag").out
    shown = topics("routers", "get", topic, "--json").json
    assert (shown["preserve_tag"], shown["filter"], shown["forwarded_total"]) == (False, ["tag", "Glob", "t*"], 3)
    assert topic in topics("routers", "list", topic).out
    assert [line["router"] for line in topics("routers", "list", "--source", f"{topic}.a", "--json").lines] == [topic]
    assert topics("routers", "delete", topic).out == f"{topic} is deleted\n"
    topics("routers", "delete", topic, code=1)
    topics("routers", "get", topic, code=1)


def test_a_router_that_cannot_be_is_refused(topics: Run, topic: str) -> None:
    assert "dest is required" in topics("routers", "put", topic, "a", code=2).err
    assert "the same topic" in topics("routers", "put", topic, "a", "a", code=2).err
    topics("routers", "put", f"{topic}>1", "cycle.a", "cycle.b")
    assert "cycle" in topics("routers", "put", f"{topic}>2", "cycle.b", "cycle.a", code=1).err
    topics("routers", "put", f"{topic}>2", "cycle.b", "cycle.a", "--allow-cycle")
    assert "remote key" in topics("routers", "put", topic, "a", "b", "--dest-key", "k", code=2).err


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_bench_measures_and_leaves_nothing_behind(topics: Run, client: Client) -> None:
    lines = topics("bench", "--seconds", "0.1", "--connections", "2", "--json").lines
    assert [line["what"] for line in lines] == [
        "writes of 1 record",
        "records in writes of 100",
        "records in reads of 1000",
        "jobs through claim and ack",
    ]
    assert all(line["rate"] > 0 and line["p50_ms"] <= line["p99_ms"] for line in lines)
    assert not list(client.topics("bench."))
    assert "p99 ms" in topics("bench", "--seconds", "0.1").out


@pytest.mark.parametrize(
    "args",
    [
        ("put", "t"),
        ("get", "t"),
        ("list",),
        ("drop", "t"),
        ("write", "t", "1"),
        ("diff", "t"),
        ("tail", "t"),
        ("watch", "t"),
        ("seek", "t", "0"),
        ("delete", "t", "--before", "1"),
        ("queue", "claim", "t", "--node", "w"),
        ("routers", "list"),
        ("bench",),
    ],
)
def test_a_server_that_is_not_there_is_3(args: tuple[str, ...], topics: Run) -> None:
    retry = () if args[0] == "bench" else ("--retry-ms", "0")
    done = topics(*args, "--url", "http://127.0.0.1:9", *retry, code=3)
    assert done.err.startswith("topics: cannot reach http://127.0.0.1:9")


def test_lines_for_a_server_that_is_not_there_are_3(topics: Run) -> None:
    done = topics("write", "t", "--url", "http://127.0.0.1:9", "--retry-ms", "0", "--json", input="1\n2\n", code=3)
    assert done.json == {"topic": "t", "written": 0, "unwritten": 2}


def test_a_bad_name_or_url_is_2(topics: Run) -> None:
    assert "starts with a letter or digit" in topics("get", "../admin", code=2).err
    assert "url must be http://" in topics("get", "t", "--url", "localhost", code=2).err


def test_a_key_is_sent_and_asked_for(topics: Run, tmp_path: Path) -> None:
    with local_server(tmp_path, api_keys="secret") as guarded:
        assert "key" in topics("list", "--url", guarded.url, code=1).err
        done = topics("list", "--url", guarded.url, "--key", "wrong-secret", code=1)
        assert "wrong-secret" not in done.err + done.out
        topics("list", "--url", guarded.url, "--key", "secret")
