"""What the machine's scheduler says about a job: defaults with their origin, below options and variables."""

from __future__ import annotations

from phalanx.core.record import Record


class Taken(Record):
    """One value, as an option would give it, and the variable that it comes from."""

    value: str
    origin: str


class Surroundings(Record):
    """What was found; `settings` by option, `conf` for --rdzv-conf.

    `refusal`: why nothing can be started like this, and what to do; empty: it can."""

    scheduler: str
    settings: dict[str, Taken] = {}
    conf: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    refusal: str = ""
    lasting_id: str = ""
    """The job's name over all its attempts, under which it finds what it kept."""
