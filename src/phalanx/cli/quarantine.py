"""`phalanx quarantine [list|add|remove] [--run RUN] HOST...`: which hosts a job keeps out.

Of a job on this machine through its agent, which knows the job's store; of any other with --rdzv-endpoint,
also after the job has ended, if its store outlives it. What is added stays until it is removed, or for --for
TIME; docs/quarantine.md has the rest.
"""

from __future__ import annotations

import json
import os

import msgspec

from phalanx.cli.drain import add_store, settings_of, store_client
from phalanx.cli.parser import TRUST, Parser
from phalanx.cli.runs import NoSuchRun, add_all_users, local_agents, request, running
from phalanx.core.rounds.causes import HOSTS
from phalanx.core.rounds.records import UNTIL_REMOVED, HostRecord, decode_host, encode
from phalanx.core.rounds.store_commands import Delete, Get, Put
from phalanx.errors import UsageError
from phalanx.log import printable
from phalanx.observe.snapshot import QuarantineSnapshot
from phalanx.observe.status_text import quarantine_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from phalanx.store.client import StoreClient

ACTIONS = ("list", "add", "remove")


def main(argv: Sequence[str]) -> int:
    """List, add or remove."""
    options = make_parser().parse_intermixed_args(argv)  # add --run RUN HOST
    if options.action not in ACTIONS:
        raise UsageError(f"{options.action}: not an action; use {', '.join(ACTIONS)}")
    _check_words(options)
    if options.dir:
        return _in_directory(options)
    return _at_store(options) if options.rdzv_endpoint else _at_agent(options)


def _at_agent(options: Namespace) -> int:
    agent, words = running(local_agents("quarantine", options.all_users), options.run)[0], options.words
    if options.action == "list":
        return _show(request(agent, {"ask": "quarantine"}).get("quarantine") or [], options.json)
    what: dict[str, Any] = {"do": "quarantine", "hosts": words}
    if options.action == "remove":
        listed = request(agent, {"ask": "quarantine"}).get("quarantine") or []
        _check_known(words, {str(one.get("host")) for one in listed if isinstance(one, dict)})
        what["remove"] = True
    else:
        what |= {"reason": options.reason, "seconds": options.seconds}
    print(printable(str(request(agent, what).get("done", "asked"))))
    return 0


def _in_directory(options: Namespace) -> int:
    """Of all jobs that share a directory (--quarantine-dir)."""
    from phalanx.cluster.shared_quarantine import path_of, read_all, write_host

    try:
        held = dict(read_all(options.dir))
        if options.action == "list":
            return _show(_listed(held), options.json)
        if options.action == "remove":
            _check_known(options.words, set(held))
        for host in options.words:
            if options.action == "remove":
                os.unlink(path_of(options.dir, host))
            else:
                write_host(options.dir, host, options.reason, options.seconds)
    except OSError as error:
        raise NoSuchRun(printable(f"--dir {options.dir}: {error.strerror}")) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    return _say_done(options)


def _listed(held: Mapping[str, HostRecord]) -> list[dict[str, Any]]:
    return [
        {"host": host, "reason": one.reason, "left": None if one.left == UNTIL_REMOVED else one.left}
        for host, one in sorted(held.items())
    ]


def _at_store(options: Namespace) -> int:
    with store_client(options, settings_of(options)) as client:
        return _change(client, options, f"job/{options.run or options.rdzv_id}/{HOSTS}")


def _change(client: StoreClient, options: Namespace, prefix: str) -> int:
    entries = client.request(Get(prefix, prefix=True), options.timeout).entries
    found = {entry.key.removeprefix(prefix): decode_host(entry.value) for entry in entries}
    held = {host: record for host, record in found.items() if record is not None and record.reason}
    if options.action == "list":
        return _show(_listed(held), options.json)
    if options.action == "remove":
        _check_known(options.words, set(held))
    for host in options.words:
        left = UNTIL_REMOVED if options.seconds is None else options.seconds
        put = Put(prefix + host, encode(HostRecord(options.reason, left)))
        client.request(Delete(prefix + host) if options.action == "remove" else put, options.timeout)
    return _say_done(options)


def _say_done(options: Namespace) -> int:
    what = "may take part again" if options.action == "remove" else f"is quarantined: {options.reason}"
    print(printable(f"{' '.join(options.words)} {what}"))
    return 0


def _check_words(options: Namespace) -> None:
    """Before anything is asked: hosts to add or remove, and none to list."""
    words = options.words
    if options.action == "list" and words:
        raise UsageError(f"list {' '.join(words)}: lists all hosts; to choose a job, use --run RUN")
    if options.action != "list" and not words:
        raise UsageError(f"{options.action}: name the hosts")
    for word in words:
        if not word.isprintable() or len(word) > 256:
            raise UsageError(f"{printable(word[:80])}: not the name of a host")


def _check_known(hosts: list[str], known: set[str]) -> None:
    for host in hosts:
        if host not in known:
            there = " ".join(sorted(known)) or "none"
            raise NoSuchRun(printable(f"{host} is not quarantined; these are: {there}"))


def _show(listed: list[dict[str, Any]], as_json: bool) -> int:
    if as_json:
        print(json.dumps(listed, indent=2))
    else:
        hosts = msgspec.convert(listed, list[QuarantineSnapshot])
        print("\n".join(printable(quarantine_line(one)) for one in hosts) or "no host is quarantined")
    return 0


def make_parser() -> Parser:
    """The options."""
    parser = Parser("quarantine", "Keep hosts out of a running job, or let them in again.")
    parser.add_argument("action", nargs="?", default="list", metavar="list|add|remove")
    parser.add_argument("words", nargs="*", metavar="HOST", help="names of hosts, to add or remove")
    about = "a run id, or its beginning, or a script's name [the one that runs here]"
    parser.add_argument("--run", metavar="RUN", default="", help=about)
    parser.add_argument("--reason", default="by hand", help="why, for everyone to see [%(default)s]")
    parser.add_value("--for", "duration", "only for this long", dest="seconds", least=0.001)
    parser.add_argument("--json", action="store_true", help="list as JSON")
    parser.add_argument("--dir", metavar="DIR", help="of the jobs with this --quarantine-dir, not of one job")
    parser.add_run_options("rdzv_endpoint", "rdzv_id", "rdzv_conf", *TRUST)
    add_all_users(parser)
    add_store(parser)
    return parser
