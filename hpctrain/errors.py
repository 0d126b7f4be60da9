"""Errors that end a command. Each one knows its exit code and says three things."""

from __future__ import annotations


class HpctrainError(Exception):
    """Something the user has to hear: what was asked, what is true, what to change.

    `exit_code` is what the command line exits with: 1 the run (or check) failed,
    2 wrong use or config, 3 refused by the plan, 4 refused by the cluster.
    """

    exit_code = 1

    def __init__(self, asked: str, found: str = "", change: str = "") -> None:
        super().__init__(asked, found, change)
        self.asked, self.found, self.change = asked, found, change

    def __str__(self) -> str:
        lines = [self.asked]
        if self.found:
            lines.append(f"  found: {self.found}")
        if self.change:
            lines.append(f"  try:   {self.change}")
        return "\n".join(lines)


class RunError(HpctrainError):
    """The run, or a check of it, failed."""

    exit_code = 1


class ConfigError(HpctrainError):
    """Wrong use or wrong config."""

    exit_code = 2


class PlanError(HpctrainError):
    """The plan refuses the run."""

    exit_code = 3


class ClusterError(HpctrainError):
    """The cluster refuses the run, or cannot be reached."""

    exit_code = 4


class DataError(HpctrainError):
    """The data are not what they should be (missing, truncated, wrong format)."""

    exit_code = 1


class CheckpointError(HpctrainError):
    """A checkpoint could not be written or read."""

    exit_code = 1
