"""torch's import path for redirecting descriptors."""

from phalanx.logs.redirects import get_libc, redirect, redirect_stderr, redirect_stdout

__all__ = ["get_libc", "redirect", "redirect_stderr", "redirect_stdout"]
