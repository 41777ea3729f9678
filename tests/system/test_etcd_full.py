"""An etcd that is out of space: jobs wait for its operator, until the grace period is over."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

from phalanx.core.rounds.store_commands import Grant, KeepAlive, Put, Reply
from phalanx.errors import StoreError
from phalanx.store.etcd.client import EtcdClient
from phalanx.store.etcd.http import EtcdError, _decode
from tests.conftest import HUNG
from tests.support.etcd_process import Cluster
from tests.support.run_helpers import READY, Running, plain_environment, script


@pytest.fixture
def full(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_writes_wait_for_space_and_leases_stay_alive(full: Cluster) -> None:
    with full as etcd, EtcdClient(etcd.addresses, grace=HUNG) as client:
        (member,) = etcd.members
        lease = client.request(Grant(HUNG), HUNG).number
        client.put("before", b"1", lease)
        member.alarm("ACTIVATE")
        written: queue.Queue[Reply] = queue.Queue()
        client.send(Put("first", b"1"), written.put)
        client.send(Put("second", b"2"), written.put)
        for _ in range(3):
            assert client.request(KeepAlive(lease), HUNG).ok
        assert written.empty()
        member.alarm("DEACTIVATE")
        first, second = written.get(timeout=HUNG), written.get(timeout=HUNG)
        assert first.ok
        assert second.ok
        assert first.revision < second.revision, "in the order in which they were asked"
        assert client.get("before") is not None


def test_the_grace_period_ends_the_wait(full: Cluster) -> None:
    with full as etcd, EtcdClient(etcd.addresses, grace=1.0) as client:
        etcd.members[0].alarm("ACTIVATE")
        with pytest.raises(StoreError, match="alarm disarm"):
            client.put("k", b"v")


def test_close_does_not_wait_for_space(full: Cluster) -> None:
    with full as etcd:
        client = EtcdClient(etcd.addresses, grace=HUNG)
        client.connect(HUNG)
        etcd.members[0].alarm("ACTIVATE")
        client.send(Put("k", b"v"), lambda reply: None)
        closing = threading.Thread(target=client.close)
        closing.start()
        closing.join(HUNG)
        assert not closing.is_alive()


def test_a_proxy_that_has_no_etcd_behind_it_is_asked_again() -> None:
    for status in (429, 502, 503, 504):
        with pytest.raises(EtcdError) as caught:
            _decode(b"<html>bad gateway</html>", status)
        assert caught.value.temporary
    with pytest.raises(EtcdError) as caught:
        _decode(b"<html>hello</html>", 200)
    assert not caught.value.temporary


WORKER = (
    READY
    + """
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
while first and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
if first and os.environ["RANK"] == "0":
    sys.exit(3)
if first:
    time.sleep(1000)
print("second", flush=True)
"""
)


def test_a_job_goes_on_when_the_alarm_is_over(full: Cluster, tmp_path: Path) -> None:
    """Raised while two nodes run; a worker fails meanwhile, and the group restarts when etcd has space."""
    go = tmp_path / "go"
    with full as etcd:
        (member,) = etcd.members
        words = [
            *("--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", str(member.address)),
            *("--rdzv-id", "full", "--max-restarts", "2", "--store-grace", "60"),
            *(script(tmp_path, WORKER), str(go)),
        ]
        with Running(words, env=plain_environment()) as one, Running(words, env=plain_environment()) as two:
            nodes = [one, two]
            for node in nodes:
                node.workers(1)
            member.alarm("ACTIVATE")
            go.touch()
            failed = next(node for node in nodes if 0 in node.workers(1))
            failed.read_until("space exceeded")
            member.alarm("DEACTIVATE")
            for node in nodes:
                ended = node.end()
                assert ended.code == 0, ended
                assert "second" in ended.out


def test_a_job_that_writes_nothing_does_not_notice_the_alarm(full: Cluster, tmp_path: Path) -> None:
    with full as etcd:
        (member,) = etcd.members
        words = [
            *("--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-endpoint", str(member.address)),
            *("--rdzv-id", "quiet", "--store-grace", "60", "--rdzv-conf", "ttl=5,last_call_timeout=0.1"),
            script(tmp_path, READY + "time.sleep(11)\n"),
        ]
        with Running(words, env=plain_environment()) as job:
            job.workers(1)
            member.alarm("ACTIVATE")
            timer = threading.Timer(10.0, member.alarm, ["DEACTIVATE"])
            timer.start()
            ended = job.end()
            timer.join()
            assert ended.code == 0, ended
            assert ended.out.count("ready ") == 1
