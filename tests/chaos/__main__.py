"""`python -m tests.chaos`: a campaign of random faults against real agents; see docs/chaos.md.

One line per episode, a summary at the end. Exit code 1 after a violation, 2 for bad usage, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

    from tests.chaos.campaign import EpisodeResult

_AT_MOST = 1 << 31


def main(argv: Sequence[str]) -> int:
    """Run the campaign."""
    from tests.chaos.private_network import run_isolated
    from tests.chaos.schedule import FAULTS

    options = _parser().parse_args(argv)
    if options.list_faults:
        for name, fault in FAULTS.items():
            print(f"{name:<17} {fault.about}{f' (needs: {fault.needs})' if fault.needs else ''}")
        return 0
    chosen = options.faults.split(",") if options.faults else list(FAULTS)
    if unknown := [name for name in chosen if name not in FAULTS]:
        raise UsageError(f"--faults {unknown[0]}: not a fault; --list-faults shows them")
    if options.agents is not None and not 2 <= options.agents <= 32:
        raise UsageError(f"--agents {options.agents}: use a number from 2 to 32")
    if options.duration <= 0 or options.episodes < 0:
        raise UsageError("--duration and --episodes are positive numbers")
    if options.backend == "etcd" and not shutil.which("etcd"):
        raise UsageError("--backend etcd: the program etcd is not installed")
    if options.keep and not os.path.isdir(options.keep):
        raise UsageError(f"--keep {options.keep}: not a directory")
    return run_isolated(lambda isolated: _campaign(options, chosen, isolated))


def _campaign(options: Namespace, chosen: list[str], isolated: bool) -> int:
    from tests.chaos.campaign import Bounds, run_episode
    from tests.chaos.schedule import plan_episode

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    usable, missing = _usable(chosen, isolated, options.backend)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    output = sys.stderr if options.json else sys.stdout

    def say(text: str) -> None:
        output.write(text)
        output.flush()

    where = "namespaces of their own" if isolated else "loopback"
    say(f"chaos: seed {seed}, backend {options.backend}, agents in {where}\n")
    for line in missing:
        say(f"chaos: {line}\n")
    if not usable:
        raise UsageError("none of the faults can be used here")
    folder = Path(tempfile.mkdtemp(prefix="phalanx-chaos-", dir=options.keep or None))
    begin = time.monotonic()
    results: list[EpisodeResult] = []
    last = options.episodes or _AT_MOST
    try:
        while len(results) < last and (options.episodes or time.monotonic() - begin < options.duration):
            plan = plan_episode(seed + len(results), options.backend, options.agents, usable)
            result = run_episode(
                plan,
                folder / f"seed-{plan.seed}",
                isolated=isolated,
                network=isolated,
                bounds=Bounds(options.idle),
            )
            results.append(result)
            say(_line(result))
            if result.violations:
                say(_explain(result, _repeat(options)))
                if not options.keep_going:
                    break
            elif not options.keep:
                shutil.rmtree(result.folder, ignore_errors=True)
    finally:
        _summary(results, time.monotonic() - begin, folder, options)
    return int(any(result.violations for result in results))


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _usable(chosen: list[str], isolated: bool, backend: str) -> tuple[list[str], list[str]]:
    """The faults that this machine allows, and one line about each facility that is missing."""
    from tests.chaos.private_network import clock_possible, delay_possible
    from tests.chaos.schedule import FAULTS

    wanted = {FAULTS[name].needs for name in chosen}
    there = {
        "": True,
        "network": isolated,
        "mount": isolated,
        "delay": isolated and "delay" in wanted and delay_possible(),
        "clock": isolated and "clock" in wanted and clock_possible(),
    }
    why = {
        "network": "network namespaces (root and the program ip)",
        "mount": "a mount namespace (root)",
        "delay": "tc with netem or tbf",
        "clock": "time namespaces",
    }
    lines = []
    for need, reason in why.items():
        names = [name for name in chosen if FAULTS[name].needs == need]
        if names and not there[need]:
            lines.append(f"left out, for lack of {reason}: {', '.join(names)}")
    usable = [name for name in chosen if there[FAULTS[name].needs]]
    return [name for name in usable if backend in FAULTS[name].backends], lines


def _line(result: EpisodeResult) -> str:
    plan = result.plan
    faults = sum(not note.partition(" ")[2].startswith(("skipped", "undone", "end", "recover", "finish"))
                 for note in result.applied)  # fmt: skip
    store = "hosted" if plan.hosted else "own store"
    verdict = result.violations[0].invariant.upper() if result.violations else "ok"
    return (
        f"seed {plan.seed}: {plan.nodes} agents ({plan.minimum}:{plan.maximum}, {store}), "
        f"{faults} faults, {result.rounds} rounds, {plan.ending}, {result.seconds:.0f} s: {verdict}\n"
    )


def _explain(result: EpisodeResult, repeat: str) -> str:
    lines = []
    for violation in result.violations[:5]:
        stamp = time.strftime("%H:%M:%S", time.localtime(violation.at)) + f"{violation.at % 1:.3f}"[1:]
        lines += [f"  VIOLATION {violation.invariant} at {stamp}: {violation.text}"]
    lines += ["  last actions (seconds since the start of the episode):"]
    lines += [f"    {note}" for note in result.applied[-10:]]
    lines += [f"  processes: {'; '.join(result.processes[:30]) or 'not recorded'}"]
    lines += [f"  everything is in {result.folder}"]
    lines += [
        f"  the same schedule again (its timing is not deterministic): {repeat} --seed {result.plan.seed}"
    ]
    return "\n".join(lines) + "\n"


def _repeat(options: Namespace) -> str:
    """The command that runs one plan again, but for its seed."""
    words = ["python -m tests.chaos --episodes 1", f"--backend {options.backend}"]
    words += [f"--agents {options.agents}"] if options.agents else []
    words += [f"--faults {options.faults}"] if options.faults else []
    return " ".join(words)


def _summary(results: list[EpisodeResult], seconds: float, folder: Path, options: Namespace) -> None:
    bad = [result for result in results if result.violations]
    faults: dict[str, int] = {}
    for result in results:
        for note in result.applied:
            words = note.split()
            if len(words) > 3 and words[2] == "s":
                faults[words[3]] = faults.get(words[3], 0) + 1
    if options.json:
        document = {
            "seconds": round(seconds, 1),
            "faults": faults,
            "violations": len(bad),
            "episodes": [result.as_json() for result in results],
        }
        print(json.dumps(document, indent=1, default=str))
    else:
        applied = ", ".join(f"{name} {count}" for name, count in sorted(faults.items()))
        rounds = sum(result.rounds for result in results)
        print(f"{len(results)} episodes in {seconds:.0f} s, {rounds} rounds, {len(bad)} with violations")
        print(f"faults: {applied or 'none'}")
    if not bad and not options.keep:
        shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Run jobs of several agents on this machine, disturb them at random, and check that "
        "every promise holds. As root, every agent gets a network of its own.",
    )
    add = parser.add_argument
    add("--duration", metavar="SECONDS", type=float, default=600.0, help="no new episode after this [600]")
    add("--episodes", metavar="N", type=int, default=0, help="this many episodes instead")
    add("--seed", metavar="N", type=int, help="of the first episode; each further one adds 1 [random]")
    add("--agents", metavar="N", type=int, help="nodes of every job [3 to 8, by the seed]")
    add("--backend", choices=("phalanx", "etcd", "static"), default="phalanx", help="[%(default)s]")
    add("--faults", metavar="NAME,…", default="", help="only these")
    add("--list-faults", action="store_true", help="show the faults and end")
    add(
        "--idle", metavar="SHARE", type=float, default=0.25, help="of a core, for an idle agent [%(default)s]"
    )
    add("--keep", metavar="DIR", default="", help="keep all logs in a new directory below this one")
    add("--keep-going", action="store_true", help="continue after a violation")
    add("--json", action="store_true", help="the result as JSON on stdout")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.stderr.write(f"chaos: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
