"""torch.distributed.argparse_util's names: argparse actions whose defaults come from PET_* variables."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from typing import Any

from phalanx.job.environment import pet_variable

__all__ = ["check_env", "env"]


class env(Action):  # torch's name
    """An option that takes a value: from the command line, else from PET_{DEST}, else the default.

    A required option may come from the variable. With several flags, the longest names the variable:
    `-f --foo` reads PET_FOO.
    """

    def __init__(self, dest: str, default: Any = None, required: bool = False, **kwargs: Any) -> None:
        value = pet_variable(dest)
        default = default if value is None else value
        super().__init__(dest=dest, default=default, required=required and not default, **kwargs)

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)


class check_env(Action):  # torch's name
    """A flag: true when it is on the command line, or when PET_{DEST} is a number other than 0."""

    def __init__(self, dest: str, default: Any = False, **kwargs: Any) -> None:
        value = pet_variable(dest)
        try:
            default = bool(default) if value is None else bool(int(value))
        except ValueError:
            raise ValueError(f"PET_{dest.upper()}={value}: use 1 or 0") from None
        super().__init__(dest=dest, const=True, default=default, nargs=0, **kwargs)

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, self.const)
