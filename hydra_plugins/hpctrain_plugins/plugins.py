"""What Hydra needs from us: a launcher for sweeps, and the user's own configs on the search path."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, flag_override

from hpctrain.config.load import conf_dir, user_conf_dir


class HpctrainLauncher(Launcher):
    """Composes every point and hands it to the command line, which sends all of them at once."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        for overrides in job_overrides:
            point = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with flag_override(point, ["readonly", "struct"], False):
                point.hydra.mode = RunMode.MULTIRUN
                HydraConfig.instance().set_config(point)
                point.pop("hydra")
            self.task_function(point)
        return [
            JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED, _return_value=None)
            for overrides in job_overrides
        ]


class UserConfigPath(SearchPathPlugin):
    """Finds `~/.config/hpctrain` without a flag, after the shipped configs and `--config-dir`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = user_conf_dir()
        if not folder.is_dir():
            return
        # Hydra adds --config-dir only after the plug-ins; named here first, it wins over the user's folder.
        given = _config_dir_argument(sys.argv)
        if given is not None:
            search_path.append("hpctrain-config-dir", f"file://{given}")
        search_path.append("hpctrain-user", f"file://{folder}")
        for path in sorted(folder.glob("*/*.yaml")):
            if (conf_dir() / path.relative_to(folder)).exists():
                print(
                    f"hpctrain: {path} is not used: a shipped option has that name; rename it",
                    file=sys.stderr,
                )


def _config_dir_argument(argv: Sequence[str]) -> Path | None:
    for position, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            value = value if equals else "".join(argv[position + 1 : position + 2])
            return Path(value).resolve() if value else None
    return None


def _register() -> None:
    node: dict[str, Any] = {"_target_": f"{__name__}.{HpctrainLauncher.__name__}"}
    ConfigStore.instance().store(group="hydra/launcher", name="hpctrain", node=node, provider="hpctrain")


_register()
