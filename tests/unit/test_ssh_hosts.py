"""`--hosts` and what starter and steward say to each other."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import UsageError
from phalanx.job.config import parse
from phalanx.job.host_names import parse_host_file, parse_hosts
from phalanx.platforms.outcomes import AgentOutcome
from phalanx.platforms.ssh.frames import (
    GREETING,
    VERSION,
    GreetingReader,
    LinkFrameReader,
    SentFrames,
    frame,
)
from phalanx.platforms.ssh.starter import _options
from tests.support.run_helpers import run, script


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", 0)]),
        ("a,b:8, me@c:2 ,", [("a", 0), ("b", 8), ("me@c", 2)]),
        ("[::1]:4,[fe80::1]", [("::1", 4), ("fe80::1", 0)]),
        ("::1", [("::1", 0)]),
    ],
)
def test_hosts(text: str, hosts: list[tuple[str, int]]) -> None:
    assert [(host.target, host.slots) for host in parse_hosts(text)] == hosts


def test_a_host_file() -> None:
    found = parse_host_file("# nodes\na slots=4 max_slots=8\n\nb:2  # the other\nc\n")
    assert [(host.target, host.slots) for host in found] == [("a", 4), ("b", 2), ("c", 0)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a:0",
        "a:x",
        "a,a",
        "a b",
        "[::1",
        "a:99999",
        "[]",
        "me@",
        "[a b]",
        "[a\n]",
        "-oProxyCommand=x",
        "[-oProxyCommand=x]",
        "[-oProxyCommand=x]:8",
        "me@-oProxyCommand=x",
    ],
)
def test_hosts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_hosts(text)


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "[-oProxyCommand=x] slots=2", "a,is_host=1"])
def test_a_host_file_with_a_name_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host; write HOST or HOST:SLOTS"):
        parse_host_file(f"b\n{text}\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--hosts", "a,a"], "--hosts a,a: a is named twice"),
        (["--hosts", "a", "--hostfile", "f"], "both name the hosts"),
        (["--hostfile", "/absent"], "--hostfile /absent: No such file"),
        (["--hosts", "a,b", "--node-rank", "1"], "--node-rank 1: not with --hosts"),
        (["--hosts", "a,b", "--rdzv-backend", "etcd", "--rdzv-endpoint", "e:1"], "a store of its own"),
    ],
)
def test_refusals(words: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    with pytest.raises(UsageError, match=why):
        parse([*words, str(tmp_path / "t.py")], {})


def test_the_job_of_some_hosts(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    job = parse(["--hosts", "a,b:2,c", str(tmp_path / "t.py")], {"SLURM_JOB_ID": "1"})
    assert (job.cluster.min_nodes, job.cluster.max_nodes, job.cluster.rdzv_backend) == (3, 3, "phalanx")
    assert job.cluster.rdzv_endpoint.startswith("a:")
    spares = parse(["--hosts", "a,b,c", "--nnodes", "2", str(tmp_path / "t.py")], {})
    assert (spares.cluster.min_nodes, spares.cluster.max_nodes, len(spares.cluster.hosts)) == (2, 2, 3)


@given(st.lists(st.tuples(st.sampled_from([b"o", b"e"]), st.binary(max_size=50)), max_size=20), st.data())
def test_a_new_connection_goes_on_where_the_last_one_ended(
    messages: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    sent = SentFrames(1 << 20)
    for kind, body in messages:
        sent.add(kind, body)
    whole = sent.since(0)[1]
    cut = data.draw(st.integers(0, len(whole)))
    reader = LinkFrameReader()
    found = reader.feed(whole[:cut])
    begin, rest = sent.since(cut)
    assert begin == cut
    assert found + reader.feed(rest) == messages


def test_what_is_kept_for_a_new_connection_is_bounded() -> None:
    sent = SentFrames(100)
    for number in range(50):
        sent.add(b"o", b"%03d" % number)
    begin, rest = sent.since(3)
    assert (begin, begin + len(rest)) == (sent.start, sent.end)
    assert LinkFrameReader().feed(rest)[-1] == (b"o", b"049")


def test_a_login_shell_may_print_before() -> None:
    reader = GreetingReader()
    assert reader.feed(b"Welcome!\n" + GREETING[:5]) == b""
    assert reader.feed(GREETING[5:] + VERSION + b" 17\nrest") == b"rest"
    assert reader.offset == 17
    with pytest.raises(ValueError, match="the login shell prints more than"):
        GreetingReader().feed(b"x" * (1 << 17))


def test_a_host_with_another_version() -> None:
    with pytest.raises(ValueError, match="another version of Phalanx"):
        GreetingReader().feed(GREETING + b"1 0\n")


def test_a_message_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="bytes"):
        LinkFrameReader().feed(b"o" + b"\xff" * 4)
    assert LinkFrameReader().feed(frame(b"D")) == [(b"D", b"")]


def test_no_host_is_an_option_of_ssh(tmp_path: Path) -> None:
    """Every call ends its options before the host, whatever the check of names lets through."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" >> "$0.calls"\nexit 255\n')
    ssh.chmod(0o755)
    assert run("--hosts", "me@a", "--ssh", str(ssh), script(tmp_path, "")).code == 94
    asked, started = (tmp_path / "ssh.calls").read_text().splitlines()
    assert asked == "-G -- me@a"
    assert " -- me@a exec " in started


def test_the_users_own_time_to_connect_counts() -> None:
    assert "ConnectTimeout=20" in _options({"connecttimeout": "none"}, "/tmp/x")
    assert not any("ConnectTimeout" in word for word in _options({"connecttimeout": "60"}, "/tmp/x"))


def test_each_host_has_its_own_settings(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("""#!/bin/sh
case "$*" in
"-G -- a") echo hostname front ;;
"-G -- b") printf 'hostname back\\nconnecttimeout 60\\ncontrolpath /tmp/of-the-user\\n' ;;
*) echo "$@" | head -n 1 >> "$0.$(echo "$@" | sed 's/.* -- \\(.\\) exec .*/\\1/; q')"
   until [ -s "$0.a" ] && [ -s "$0.b" ]; do sleep 0.01; done  # the first that fails ends the other
   exit 255 ;;
esac
""")
    ssh.chmod(0o755)
    assert run("--hosts", "a,b", "--ssh", str(ssh), script(tmp_path, "")).code == 94
    first, second = ((tmp_path / f"ssh.{host}").read_text() for host in "ab")
    assert "ConnectTimeout=20" in first
    assert f"ControlPath={tempfile.gettempdir()}" in first
    assert "ConnectTimeout" not in second
    assert "ControlPath" not in second


@pytest.mark.parametrize(
    ("outcome", "code", "ends"),
    [
        ("SUCCEEDED", 0, True),
        ("CLOSED", 0, True),
        ("FAILED", 1, True),
        ("FAILED", 137, True),  # a worker was killed
        ("FAILED", 96, True),
        ("FAILED", 94, False),  # this node has lost the store
        ("FAILED", 95, False),
        ("LEFT", 0, False),  # drained
        ("SIGNALED", 143, False),
        ("", 2, False),  # it refused to start
        ("", 137, False),  # it was killed
    ],
)
def test_which_ends_of_an_agent_end_the_job(outcome: str, code: int, ends: bool) -> None:
    assert AgentOutcome("a", outcome, code).ends_job is ends
