"""The command line: `python -m hpctrain [verb] [Hydra overrides]`. No verb means submit."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError, HpctrainError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from hpctrain.config.schema import Config

HELP = """\
hpctrain: Slurm-native training on clusters of consumer GPUs

usage: python -m hpctrain [verb] [+exp=NAME] [key=value ...]     (no verb: submit)

verbs that take a config:
  submit   plan the run, freeze it into runs/<name>/, send it to Slurm (cluster=local: run it here)
  plan     show ranks, layout and batch, or all findings together
  render   print the batch script that submit would send
  run      carry the run out here, in the foreground (inside an allocation: over its nodes)
verbs that take a run, by folder or by name:
  status RUN    what it is doing, what it did, why it ended
  logs RUN      what its ranks printed           -f follows, --rank N chooses
  cancel RUN    scancel it, for good
  resume RUN    go on from its last checkpoint   --code=now takes the present code
verbs with their own --help:
  data images SOURCE OUT         pack images into shards
  export model RUN OUT           weights for plain timm
  export embeddings RUN IMAGES OUT

  -m                sweep: every combination of a=1,2 b=3,4 becomes an element of one job array
  --json            facts as JSON (plan status logs cancel resume)
  --config-dir DIR  configs of your own; ~/.config/hpctrain is found without it
  --cfg job, --info, --hydra-help: Hydra's own

examples:
  python -m hpctrain +exp=vision_city_laptop
  python -m hpctrain +exp=vision_city data.root=/data/city cluster.account=vision
  python -m hpctrain -m +exp=vision_city optim.lr=1e-3,3e-4 seed=0,1

exit codes: 0 done · 1 failed · 2 wrong use or config · 3 refused by the plan · 4 refused by the cluster
"""

CONFIG_VERBS = ("submit", "plan", "render", "run")
RUN_VERBS = ("status", "logs", "cancel", "resume")
DEVICE_VERBS = ("data", "export")
VERBS = CONFIG_VERBS + RUN_VERBS + DEVICE_VERBS


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--help"], ["-h"], ["help"]) or not arguments:
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from hpctrain import __version__

        print(f"hpctrain {__version__}")
        return 0
    try:
        return dispatch(arguments)
    except HpctrainError as error:
        print(f"hpctrain: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def dispatch(arguments: list[str]) -> int:
    verb, rest = (arguments[0], arguments[1:]) if arguments[0] in VERBS else ("submit", arguments)
    if verb == "submit" and arguments[0].isidentifier() and arguments[0] != "submit":
        raise ConfigError(f"no verb {arguments[0]!r}", f"verbs: {', '.join(VERBS)}", "hpctrain --help")
    if verb in CONFIG_VERBS:
        return with_config(verb, rest)
    if verb == "data":
        return data(rest)
    if verb == "export":
        from hpctrain.export import main as export

        return export(rest)
    parsed = parse_run_arguments(verb, rest)
    if verb == "resume":
        return resume(parsed)
    from hpctrain.report import verbs

    return verbs.main(verb, parsed)


def resume(arguments: argparse.Namespace) -> int:
    """Send a run again from its own folder, with changes of shape if given."""
    from hpctrain.config.load import load_config
    from hpctrain.launch.submit import submit
    from hpctrain.plan.plan import make_plan
    from hpctrain.run.directory import find_run

    run = find_run(arguments.run)
    config = load_config(run.config, arguments.overrides)
    plan = make_plan(config)
    run.stop.unlink(missing_ok=True)
    done = submit(config, plan, new_code=arguments.code == "now")
    print(done.to_json() if arguments.json else done.text())
    return 0


def data(rest: list[str]) -> int:
    if rest[:1] == ["images"]:
        from hpctrain.data.prepare import main as images

        return images(rest[1:])
    raise ConfigError(
        f"data {' '.join(rest[:1])}".strip(), "data knows: images", "hpctrain data images SOURCE OUT"
    )


def with_config(verb: str, rest: list[str]) -> int:
    """Compose with Hydra, then act on the typed config."""
    as_json = "--json" in rest
    overrides = [f"+{o}" if o.startswith("exp=") else o for o in rest if o != "--json"]
    if "-h" in overrides or "--help" in overrides:
        print(HELP, end="")
        return 0
    return compose(overrides, lambda config: act(verb, config, as_json))


def act(verb: str, config: Config, as_json: bool) -> int:
    from hpctrain.launch import submit
    from hpctrain.plan.plan import make_plan

    if verb == "plan":
        plan = make_plan(config)
        submit.check_data(config)
        print(plan.to_json() if as_json else "\n".join(plan.lines()))
    elif verb == "render":
        print(submit.render(config), end="")
    elif verb == "run":
        submit.run_foreground(config)
    else:
        plan = make_plan(config)
        if not as_json:
            print("\n".join(plan.lines()), flush=True)
        done = submit.submit(config, plan)
        print(done.to_json() if as_json else done.text())
    return 0


def sweep(points: list[tuple[list[str], DictConfig]]) -> None:
    """Submit all points of a multirun as one job array (called by the launcher plug-in)."""
    from hpctrain.config.compose import resolve_config, sweep_labels
    from hpctrain.launch.sweep import submit_sweep

    labels = sweep_labels([overrides for overrides, _ in points])
    configs = []
    for (overrides, cfg), label in zip(points, labels, strict=True):
        experiment = cfg.hydra.runtime.choices.get("exp")
        config = resolve_config(_without_hydra(cfg), experiment)
        configs.append((label, overrides, config))
    print(submit_sweep(configs))


def _without_hydra(cfg: DictConfig) -> DictConfig:
    from omegaconf import flag_override

    plain = cfg.copy()
    with flag_override(plain, ["readonly", "struct"], False):
        plain.pop("hydra")
    return plain


def compose(overrides: list[str], action: Callable[[Config], int]) -> int:
    """Run Hydra on these overrides; its complaints come out as ConfigError."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from hpctrain.config.complaints import explain, explain_hydra
    from hpctrain.config.compose import register_schemas, resolve_config
    from hpctrain.config.load import conf_dir

    register_schemas()
    outcome: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def task(cfg: DictConfig) -> None:
        experiment = HydraConfig.get().runtime.choices.get("exp")
        outcome.append(action(resolve_config(cfg, experiment)))

    saved_argv, saved_full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["hpctrain", *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra would print and exit by itself
    try:
        task()
    except HpctrainError:
        raise
    except HydraException as error:
        raise explain_hydra(error) from error
    except OmegaConfBaseException as error:
        raise explain(error) from error
    finally:
        sys.argv = saved_argv
        if saved_full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
    return outcome[0] if outcome else 0


def parse_run_arguments(verb: str, rest: list[str]) -> argparse.Namespace:
    """Arguments of the verbs that take a run."""
    parser = argparse.ArgumentParser(prog=f"hpctrain {verb}")
    parser.add_argument("run", help="folder of the run, or its name under runs/")
    parser.add_argument("--json", action="store_true")
    if verb == "logs":
        parser.add_argument("-f", "--follow", action="store_true")
        parser.add_argument("--rank", type=int, default=0)
    if verb == "resume":
        parser.add_argument("--code", choices=["frozen", "now"], default="frozen")
        parser.add_argument("overrides", nargs="*", help="changes of shape: cluster.num_nodes=2 …")
    return parser.parse_args(rest)
