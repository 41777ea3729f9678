"""The error file: a failing worker's own record of its error, for its parent.

The writer runs inside the user's process while it fails; the reader runs in the parent, on a file with
untrusted content. Therefore:

- the writer never raises, never leaves a half-written file under the final name (temporary file and rename),
  and limits the size; a full disk or a missing directory only means that there is no error file;
- the reader never hangs (no fifo, no device), never reads more than a limit, and returns a reason instead of
  raising;
- an exception is written once: outer layers that see it again keep the first, more precise record.

Every worker imports this module before user code runs, so it imports almost nothing.

Format, as other launchers write it, plus `timestampNs`:
`{"message": {"message": "Type: text", "extraInfo": {"py_callstack": …, "timestamp": …, "timestampNs": …}}}`
"""

from __future__ import annotations

import builtins
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from phalanx.core.diagnosis.failures import ErrorRecord

VARIABLE = "TORCHELASTIC_ERROR_FILE"
STACK_SUFFIX = ".stack"
READ_LIMIT = 2 << 20
MESSAGE_CAP = 32 << 10
# At most six bytes per character (\u0000), so a written file is always smaller than READ_LIMIT.
TRACEBACK_CAP = 256 << 10
_MARK = "_phalanx_error_file"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_GROUP = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.10 has none


# ---------------------------------------------------------------- writing, in the worker


def write_exception(path: str, exc: BaseException, *, now_ns: int | None = None) -> bool:
    """Record `exc` in the error file; False if that was not possible."""
    now = time.time_ns() if now_ns is None else now_ns
    if getattr(exc, _MARK, None) == path:
        return True
    try:
        data = exception_data(exc, now)
    except Exception:  # noqa: BLE001 - a hostile exception object must not hide the failure itself
        data = message_data(type(exc).__name__, "", now)
    done = write_data(path, data)
    if done:
        mark_recorded(exc, path)
    return done


def write_exit(path: str, exc: SystemExit) -> bool:
    """Record what a program that called sys.exit tells: a text, or the exception that it was handling.

    A bare exit code tells nothing more than the exit status, and is not recorded.
    """
    if getattr(exc, _MARK, None) == path:
        return True
    try:
        data = _exit_data(exc)
    except Exception:  # noqa: BLE001 - as in write_exception
        return False
    return data is not None and write_data(path, data)


def _exit_data(exc: SystemExit) -> dict[str, Any] | None:
    now, code = time.time_ns(), exc.code
    if code is None or isinstance(code, int):
        handled = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
        complaint = _usage_error(exc.__traceback__) if code else ""
        if complaint:
            return message_data(f"usage error: {complaint}", "", now)
        if not code or not isinstance(handled, Exception):
            return None
        data = exception_data(handled, now)
        data["message"]["message"] += f" (then sys.exit({int(code)}))"
        return data
    tb = exc.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or tb.tb_frame.f_code.co_name != "_run_module_as_main":
        return exception_data(exc, now)
    # `python: No module named x.y`: what runpy makes of a module that -m does not find.
    data = message_data(f"ModuleNotFoundError: {str(code).partition(': ')[2] or code}", "", now)
    data["message"]["extraInfo"]["exceptionTypes"] = ["ModuleNotFoundError", "ImportError"]
    return data


def _usage_error(tb: TracebackType | None) -> str:
    """What argparse complained about; empty if it did not end the program."""
    while tb is not None:
        code = tb.tb_frame.f_code
        if code.co_name == "error" and code.co_filename.endswith("argparse.py"):
            return str(tb.tb_frame.f_locals.get("message", ""))
        tb = tb.tb_next
    return ""


def mark_recorded(exc: BaseException, path: str) -> None:
    """Mark `exc` as recorded in `path`, for outer layers."""
    try:
        setattr(exc, _MARK, path)
    except Exception:  # noqa: BLE001 - exceptions without a __dict__, or with a hostile one
        pass


def write_data(path: str, data: dict[str, Any]) -> bool:
    """Write `data` to `path` as JSON, completely or not at all."""
    import json

    temporary = f"{path}.{os.getpid()}.{time.monotonic_ns()}.tmp"
    try:
        body = json.dumps(data, ensure_ascii=False, default=repr).encode("utf-8", "backslashreplace")
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    try:
        try:
            while body:
                body = body[os.write(fd, body) :]
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        return False
    return True


def exception_data(exc: BaseException, now_ns: int) -> dict[str, Any]:
    """The error file's content for an exception."""
    kind = type(exc).__name__
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001 - user code may raise anything
        text = f"<str() of this {kind} failed>"
    data = message_data(f"{kind}: {text}", _traceback_text(exc), now_ns)
    # By name, with its base classes: the restart policy knows some of them.
    kinds = [one.__name__ for one in type(exc).__mro__ if one not in (Exception, BaseException, object)]
    extra = data["message"]["extraInfo"]
    extra["exceptionTypes"] = kinds[:16]
    if isinstance(exc, _GROUP):
        extra["exceptionMembers"] = [f"{type(one).__name__}: {one}"[:200] for one in _leaves(exc)[:3]]
    return data


def _leaves(group: Any) -> list[BaseException]:
    """The exceptions of a group that are not groups themselves."""
    found: list[BaseException] = []
    for one in group.exceptions:
        found += _leaves(one) if isinstance(one, _GROUP) else [one]
    return found


def message_data(
    message: str, traceback: str, now_ns: int | None = None, code: int | None = None
) -> dict[str, Any]:
    """The error file's content for any failure."""
    now = time.time_ns() if now_ns is None else now_ns
    content: dict[str, Any] = {
        "message": _clean(_cut(message, MESSAGE_CAP)),
        "extraInfo": {
            "py_callstack": _clean(_cut(traceback, TRACEBACK_CAP)),
            "timestamp": str(now // 1_000_000_000),
            # A string: JSON numbers lose digits beyond 2**53 in many readers.
            "timestampNs": str(now),
        },
    }
    if code is not None:
        content["errorCode"] = code
    return {"message": content}


def _traceback_text(exc: BaseException) -> str:
    import traceback

    tb = _user_frames(exc)
    try:
        # TracebackException honours __suppress_context__, notes and groups.
        return "".join(traceback.TracebackException(type(exc), exc, tb, compact=True).format())
    except Exception:  # noqa: BLE001 - user-defined __str__, __notes__ or loaders may raise here
        frames = "".join(traceback.format_tb(tb))
        return f"Traceback (most recent call last):\n{frames}{type(exc).__name__}\n"


def _user_frames(exc: BaseException) -> TracebackType | None:
    # The outermost frames belong to the launcher.
    tb = exc.__traceback__
    while tb is not None and is_launcher_frame(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    if tb is None and not isinstance(exc, SyntaxError):
        return exc.__traceback__
    return tb


def is_launcher_frame(filename: str) -> bool:
    """Whether a stack frame belongs to Phalanx or to runpy rather than to the user."""
    launcher = (_PACKAGE, "<frozen runpy>", "<frozen importlib")
    return filename.startswith(launcher) or filename.endswith("/runpy.py")


def _cut(text: str, cap: int) -> str:
    if len(text) <= cap:
        return text
    left = len(text) - cap
    return f"{text[: cap // 2]}\n... {left} characters omitted ...\n{text[-cap // 2 :]}"


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# ---------------------------------------------------------------- reading, in the parent


def read_with_reason(path: str) -> tuple[ErrorRecord | None, str]:
    body, reason = _read_bytes(path, READ_LIMIT)
    if reason:
        return None, reason
    import json

    try:
        data = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        return None, f"error file {path} is not valid JSON ({len(body)} bytes: {str(exc)[:100]})"
    if not isinstance(data, dict) or not isinstance(data.get("message"), (str, dict)):
        return None, f"error file {path} has no valid 'message' (a string or an object)"
    return _to_record(data), ""


def check_shape(path: str) -> None:
    """Raise, with the type that torch raises, for a file that is JSON but not an error record."""
    body, reason = _read_bytes(path, READ_LIMIT)
    if reason:
        return
    import json

    try:
        data = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        return  # broken: the failure is described by its exit status
    try:
        message = data["message"]
        if not isinstance(message, str):
            int(message["extraInfo"]["timestamp"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise type(error)(f"error file {path} is not an error record: {error}") from None


def _read_bytes(path: str, limit: int) -> tuple[bytes, str]:
    import stat

    if path in ("", os.devnull):
        return b"", "this worker has no error file"
    try:
        # Non-blocking: opening a fifo must not hang. Its type is checked after opening, so that it cannot be
        # replaced in between.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b"", f"error file {path} was not written"
    except (OSError, ValueError) as exc:
        return b"", f"error file {path!r} cannot be opened: {exc}"
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return b"", f"error file {path} is not a regular file"
        if about.st_size > limit:
            return b"", f"error file {path} is too large to read ({about.st_size} bytes, limit {limit})"
        parts: list[bytes] = []
        size = 0
        while size <= limit:
            part = os.read(fd, min(1 << 16, limit + 1 - size))
            if not part:
                return b"".join(parts), "" if size else f"error file {path} is empty"
            parts.append(part)
            size += len(part)
        return b"", f"error file {path} grew during the read (limit {limit} bytes)"
    except OSError as exc:
        return b"", f"error file {path} cannot be read: {exc}"
    finally:
        os.close(fd)


def _to_record(data: dict[str, Any]) -> ErrorRecord:
    from phalanx.core.diagnosis.failures import ErrorRecord

    content = data["message"]
    if isinstance(content, str):
        content = data
    extra = content.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    exact = _number(extra.get("timestampNs"))
    # Beside a message that is plain text, the time stands at the top.
    at = exact / 1e9 if exact is not None else _number(extra.get("timestamp", content.get("timestamp")))
    code = _number(content.get("errorCode"))
    stack = extra.get("py_callstack")
    return ErrorRecord(
        message=_clean(str(content.get("message") or "")),
        traceback=_clean(stack) if isinstance(stack, str) else "",
        at=at,
        precise=exact is not None or (at is not None and at != int(at)),
        code=int(code) if code is not None and abs(code) < 2**31 else None,
        kinds=_words(extra.get("exceptionTypes")),
        members=_words(extra.get("exceptionMembers")),
        data=data,
    )


def _words(value: Any) -> tuple[str, ...]:
    return tuple(_clean(str(word)[:200]) for word in value[:16]) if isinstance(value, list) else ()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    # The comparison also rejects NaN and the infinities.
    return number if -1e20 < number < 1e20 else None


# ---------------------------------------------------------------- faulthandler's output


def read_crash(error_file: str) -> ErrorRecord | None:
    """The stack that faulthandler wrote to `<error_file>.stack` when a signal killed the worker."""
    path = error_file if error_file.endswith(STACK_SUFFIX) else error_file + STACK_SUFFIX
    body, reason = _read_bytes(path, READ_LIMIT)
    if reason:
        return None
    parsed = parse_crash(body.decode("utf-8", "backslashreplace"))
    if parsed is None:
        return None
    from phalanx.core.diagnosis.failures import ErrorRecord

    try:
        at: float | None = os.stat(path).st_mtime
    except OSError:
        at = None
    return ErrorRecord(parsed[0], parsed[1], at, precise=at is not None)


def parse_crash(text: str) -> tuple[str, str] | None:
    """A headline and a traceback, oldest call first, from faulthandler's text."""
    start = text.rfind("Fatal Python error:")
    if start < 0:
        return None
    lines = text[start:].splitlines()
    headline, rest = lines[0].strip(), lines[1:]
    heads = ("Current thread 0x", "Stack (", "Thread 0x")
    threads = [i for i, line in enumerate(rest) if line.startswith(heads)]
    current = next((i for i in threads if rest[i].startswith(heads[:2])), None)
    frames: list[tuple[str, str, str]] = []
    if current is not None:
        for line in rest[current + 1 :]:
            frame = _parse_frame(line)
            if frame is None:
                break
            frames.append(frame)
    frames.reverse()
    while len(frames) > 1 and is_launcher_frame(frames[0][0]):
        frames.pop(0)
    body = ["Traceback (most recent call last):"] if frames else []
    for filename, number, function in frames:
        body.append(f'  File "{filename}", line {number}, in {function}')
        source = _source_line(filename, number)
        if source:
            body.append(f"    {source}")
    body.append(headline)
    others = len(threads) - (current is not None)
    if others > 0:
        body.append(f"({others} other thread{'s' if others > 1 else ''} not shown)")
    return headline, "\n".join(body) + "\n"


def _parse_frame(line: str) -> tuple[str, str, str] | None:
    # `  File "/path/x.py", line 3 in f`; split from the right, because a path may contain quotes.
    if not line.startswith('  File "'):
        return None
    place, found, function = line[8:].rpartition(" in ")
    filename, quoted, number = place.rpartition('", line ')
    return (filename, number, function) if found and quoted and number.isdigit() else None


def _source_line(filename: str, number: str) -> str:
    body, reason = _read_bytes(filename, 1 << 20)
    if reason:
        return ""
    lines = body.decode("utf-8", "replace").splitlines()
    index = int(number) - 1 if len(number) < 9 else -1
    return lines[index].strip()[:200] if 0 <= index < len(lines) else ""


def read_failure(path: str, code: int) -> tuple[ErrorRecord | None, str]:
    """A dead worker's own error record, else its crash stack; or None and the reason."""
    record, reason = read_with_reason(path)
    if record is not None:
        return record, ""
    # Only for a death by signal: a crash that a handler survived did not cause this exit.
    crash = read_crash(path) if path and code < 0 else None
    return crash, "" if crash else reason
