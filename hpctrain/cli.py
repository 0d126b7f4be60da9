"""The command line: `python -m hpctrain [verb] [Hydra overrides]`. No verb means submit."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.usage import CONFIG_VERBS, HELP, VERBS, config_flags, parse_run_arguments

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from hpctrain.config.schema import Config
    from hpctrain.launch.submit import Submitted
    from hpctrain.run.directory import RunDirectory


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
    except SystemExit as stop:  # argparse, ours and Hydra's
        return stop.code if isinstance(stop.code, int) else 2


def dispatch(arguments: list[str]) -> int:
    verb, rest = (arguments[0], arguments[1:]) if arguments[0] in VERBS else ("submit", arguments)
    if arguments[0] not in VERBS and re.fullmatch(r"\w[\w-]*", arguments[0]):
        raise no_verb(arguments[0])
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


def no_verb(word: str) -> ConfigError:
    from hpctrain.config.load import conf_dir

    near = difflib.get_close_matches(word, VERBS, n=1)
    change = f"hpctrain {near[0]}" if near else "hpctrain --help"
    if (conf_dir() / "exp" / f"{word}.yaml").exists():
        change = f"hpctrain +exp={word}"
    return ConfigError(f"no verb {word!r}", f"verbs: {', '.join(VERBS)}", change)


def resume(arguments: argparse.Namespace) -> int:
    """Send a run again from its own folder, with changes of shape if given."""
    from hpctrain.config.load import load_config
    from hpctrain.launch.submit import check_not_live, checked_plan, done_already, submit
    from hpctrain.run.directory import find_run

    run = find_run(arguments.run)
    moved = [o for o in arguments.overrides if o.partition("=")[0] in ("name", "run_root")]
    if moved:
        raise ConfigError(
            f"resume with {moved[0]}", f"a run stays in its folder, {run.path}", "submit it anew"
        )
    config = load_config(run.config, arguments.overrides)
    config.name, config.run_root = run.name, str(run.path.parent)  # the folder may have been moved
    if done := done_already(config):
        return tell(done, arguments.json)
    plan = checked_plan(config)
    check_not_live(run)
    run.stop.unlink(missing_ok=True)
    return tell(submit(config, plan, new_code=arguments.code == "now"), arguments.json)


def tell(done: Submitted, as_json: bool) -> int:
    """Say what became of a submission; 1 for a run that was started here and is not done."""
    print(done.to_json() if as_json else done.text())
    if done.has_trained and not as_json:
        show_sample(done.run)
    return 0 if done.job is not None or done.run.done.exists() else 1


def show_sample(run: RunDirectory) -> None:
    """Of a decoder that was trained here: what it says. Large ones are left alone."""
    from hpctrain.config.load import load_config

    if load_config(run.config).model.kind != "decoder":
        return
    from hpctrain.export.sample import make_sample

    try:
        print(make_sample(run.path).text())
    except HpctrainError as error:
        print(f"hpctrain: no sample: {error}", file=sys.stderr)


def data(rest: list[str]) -> int:
    if rest[:1] == ["images"]:
        from hpctrain.data.prepare import main as images

        return images(rest[1:])
    if rest[:1] == ["tokens"]:
        from hpctrain.data.prepare_tokens import main as tokens

        return tokens(rest[1:])
    raise ConfigError(
        f"data {' '.join(rest[:1])}".strip(), "data knows: images, tokens", "hpctrain data images SOURCE OUT"
    )


def with_config(verb: str, rest: list[str]) -> int:
    """Compose with Hydra, then act on the typed config."""
    if "-h" in rest or "--help" in rest:
        print(HELP, end="")
        return 0
    flags, left = config_flags(verb).parse_known_args(rest)
    overrides = [f"+{o}" if o.startswith("exp=") else o for o in left]
    if verb in ("selftest", "calibrate"):
        overrides = [f"+exp={verb}", *overrides]
    points = compose(overrides)
    if any(point.is_swept for point in points):
        return sweep(verb, points)
    code = 0
    for point in points:  # none after --cfg, --info and the like, which have printed what was asked
        code = act(verb, point, flags)
    return code


def act(verb: str, point: Composed, flags: argparse.Namespace) -> int:
    from hpctrain.launch import inputs, submit

    if verb == "plan":
        return plan(point, flags)
    if verb == "doctor":
        from hpctrain.doctor import doctor

        if flags.write_cluster is not None:
            return doctor.write_cluster(flags.write_cluster, point.resolve(without_data=True))
        return doctor.doctor(point.resolve(without_data=True), flags.json)
    if verb == "preflight":
        from hpctrain.doctor import preflight

        return preflight.preflight(point.resolve(without_data=True), flags.json)
    config = point.resolve()
    if verb == "calibrate":
        from hpctrain.launch import calibrate

        return calibrate.calibrate(config, flags.name, flags.json)
    if verb == "render":
        print(submit.render(config), end="")
        return 0
    if verb == "selftest":
        return selftest(config, flags.json)
    if verb == "run":
        return tell(submit.run_foreground(config), flags.json)
    if done := submit.done_already(config):
        return tell(done, flags.json)
    found = submit.checked_plan(config)
    if not flags.json:
        print("\n".join(found.lines() + inputs.data_lines(config)), flush=True)
    return tell(submit.submit(config, found), flags.json)


def plan(point: Composed, flags: argparse.Namespace) -> int:
    from hpctrain.planning import plan_verb

    def with_parallelism(name: str) -> Config:
        (other,) = compose([*point.overrides, f"parallelism={name}"])
        return other.resolve(without_data=True)

    return plan_verb(point.resolve(without_data=True), flags, with_parallelism)


def selftest(config: Config, as_json: bool) -> int:
    from hpctrain.launch import selftest
    from hpctrain.run.directory import free_name

    if config.name == "selftest":  # as its experiment is called: no name was given
        config.name = free_name(config.run_root, "selftest")
    return selftest.selftest(config, as_json=as_json)


def sweep(verb: str, points: list[Composed]) -> int:
    """Submit all points of a multirun as one job array."""
    from hpctrain.config.compose import sweep_labels
    from hpctrain.launch.sweep import submit_sweep

    if verb != "submit":
        raise ConfigError(f"{verb} of a sweep", f"{verb} takes one run", f"{verb} one point, without -m")
    labels = sweep_labels([point.overrides for point in points])
    configs = [(label, p.overrides, p.resolve()) for label, p in zip(labels, points, strict=True)]
    print(submit_sweep(configs))
    return 0


@dataclass(frozen=True)
class Composed:
    """What Hydra made of the command line: a run, or a point of a sweep."""

    cfg: DictConfig
    experiment: str | None
    overrides: list[str]
    is_swept: bool

    def resolve(self, *, without_data: bool = False) -> Config:
        """The typed config; without data, `data.root` may be missing. Raises ConfigError."""
        from hpctrain.config.compose import resolve_config

        return resolve_config(self.cfg, self.experiment, without_data=without_data)


def compose(overrides: list[str]) -> list[Composed]:
    """Run Hydra on these overrides; its complaints come out as ConfigError.

    Hydra only collects: what is done with the configs happens outside it, with errors and output as ours.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from hpctrain.config.complaints import explain, explain_hydra
    from hpctrain.config.compose import register_schemas
    from hpctrain.config.load import conf_dir

    register_schemas()
    points: list[Composed] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def task(cfg: DictConfig) -> None:
        facts = HydraConfig.get()
        experiment = facts.runtime.choices.get("exp")
        points.append(Composed(cfg, experiment, list(facts.overrides.task), facts.mode is RunMode.MULTIRUN))

    saved_argv, saved_full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # A multirun leaves a file in hydra.sweep.dir; ours are described by sweep.json.
    litter = tempfile.TemporaryDirectory()
    first = next((i for i, o in enumerate(overrides) if "=" in o and not o.startswith("-")), len(overrides))
    sys.argv = ["hpctrain", *overrides[:first], f"hydra.sweep.dir={litter.name}", *overrides[first:]]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra would print and exit by itself
    try:
        task()
    except OmegaConfBaseException as error:
        raise explain(error) from error
    except (HydraException, ValueError) as error:  # ValueError: a group set to null or to a list
        raise explain_hydra(error) from error
    finally:
        sys.argv = saved_argv
        litter.cleanup()
        if saved_full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
    return points
