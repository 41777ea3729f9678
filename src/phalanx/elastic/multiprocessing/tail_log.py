"""torch's import path for following log files."""

from phalanx.logs.tail_log import TailLog, tail_logfile

__all__ = ["TailLog", "tail_logfile"]
