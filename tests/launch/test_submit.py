"""What goes to Slurm: every option, nothing that breaks out, nothing that breaks the stop contract."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain import slurm
from hpctrain.config.compose import resolve_config
from hpctrain.config.schema import (
    ClusterConfig,
    ClusterKind,
    Config,
    Device,
    GpuRequest,
    ImageDataConfig,
    Precision,
)
from hpctrain.errors import ClusterError, ConfigError, PlanError
from hpctrain.launch import inputs, script, submit
from hpctrain.launch.snapshot import code_digest, package_root
from hpctrain.launch.supervise import supervise
from hpctrain.plan.plan import make_plan
from hpctrain.run.ledger import Ledger
from hpctrain.slurm.records import PartitionInfo


def make_config(root: Path, **cluster: Any) -> Config:
    """A run on 2 nodes of 8 GPUs; `cluster` changes its keys."""
    base = ClusterConfig(
        kind=ClusterKind.slurm,
        device=Device.cuda,
        hardware="rtx4090",
        num_nodes=2,
        ranks_per_node=8,
        cpus_per_rank=6,
        gpu_request=GpuRequest.gres,
        gpu_type="rtx4090",
    )
    config = Config(name="city", run_root=str(root / "runs"), cluster=dataclasses.replace(base, **cluster))
    config.data.root = str(root / "data")
    return config


def options(script: str) -> dict[str, str]:
    """The `#SBATCH` lines, each given once, values as sbatch unquotes them."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    pairs = [line.partition("=")[::2] for line in lines]
    assert len({name for name, _ in pairs}) == len(pairs), "an option is given twice"
    return {name: "".join(shlex.split(value)) for name, value in pairs}


def is_valid_shell(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0


GOLDEN = """\
#!/bin/bash

# Parameters
#SBATCH --cpus-per-task=6
#SBATCH --gres=gpu:rtx4090:8
#SBATCH --job-name=hpctrain-city
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=ROOT/runs/city/submitit/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@120

# setup
export PYTHONPATH=ROOT/runs/city/code/DIGEST${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u -m submitit.core._submit ROOT/runs/city/submitit
"""


def test_rendered_script_is_as_agreed(tmp_path: Path) -> None:
    script = submit.render(make_config(tmp_path))
    for text, word in (
        (str(tmp_path), "ROOT"),
        (code_digest(package_root()), "DIGEST"),
        (sys.executable, "PYTHON"),
    ):
        script = script.replace(text, word)
    assert script == GOLDEN


def test_rendering_writes_nothing_and_needs_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    submit.render(make_config(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("request_by", "gpu_type", "option", "value"),
    [
        (GpuRequest.gres, "rtx4090", "gres", "gpu:rtx4090:8"),
        (GpuRequest.gres, "nvidia_geforce_rtx_4090", "gres", "gpu:nvidia_geforce_rtx_4090:8"),
        (GpuRequest.gres, None, "gres", "gpu:8"),
        (GpuRequest.gpus_per_node, "rtx4090", "gpus-per-node", "rtx4090:8"),
        (GpuRequest.gpus_per_node, None, "gpus-per-node", "8"),
    ],
)
def test_gpus_are_asked_for_in_one_way(
    request_by: GpuRequest, gpu_type: str | None, option: str, value: str, tmp_path: Path
) -> None:
    script = submit.render(make_config(tmp_path, gpu_request=request_by, gpu_type=gpu_type))
    asked = {name: text for name, text in options(script).items() if name.startswith(("gres", "gpu"))}
    assert asked == {option: value}


def test_no_gpus_are_asked_for_where_the_site_has_no_way_to(tmp_path: Path) -> None:
    script = submit.render(make_config(tmp_path, gpu_request=GpuRequest.none, exclusive=True))
    assert not {"gres", "gpus-per-node"} & options(script).keys()


@pytest.mark.parametrize(
    ("key", "value", "option", "text"),
    [
        ("partition", "gpu", "partition", "gpu"),
        ("account", "vision", "account", "vision"),
        ("qos", "high", "qos", "high"),
        ("reservation", "city", "reservation", "city"),
        ("constraint", "ib&ssd", "constraint", "ib&ssd"),
        ("nodelist", "n[0-1]", "nodelist", "n[0-1]"),
        ("exclude", "n7,n8", "exclude", "n7,n8"),
        ("mail_user", "a@b.vn", "mail-user", "a@b.vn"),
        ("mail_type", "END,FAIL", "mail-type", "END,FAIL"),
        ("comment", "ca đêm, thử", "comment", "ca đêm, thử"),
        ("exclusive", True, "exclusive", ""),
        ("mem_gib", 100, "mem", "100G"),
        ("time_limit_min", 90, "time", "90"),
        ("signal_lead_s", 60, "signal", "USR2@60"),
        ("extra_sbatch", {"licenses": "matlab:1"}, "licenses", "matlab:1"),
        ("extra_sbatch", {"contiguous": ""}, "contiguous", ""),
        ("extra_sbatch", {"switches": "1@10"}, "switches", "1@10"),
    ],
)
def test_each_cluster_key_reaches_sbatch(
    key: str, value: Any, option: str, text: str, tmp_path: Path
) -> None:
    plain = options(submit.render(make_config(tmp_path)))
    changed = options(submit.render(make_config(tmp_path, **{key: value})))
    assert changed == {**plain, option: text}


def test_no_time_limit_leaves_it_to_the_partition(tmp_path: Path) -> None:
    assert "time" not in options(submit.render(make_config(tmp_path)))


def test_setup_lines_come_before_the_command_and_after_the_options(tmp_path: Path) -> None:
    lines = submit.render(
        make_config(tmp_path, setup=["module load cuda", "ulimit -l unlimited"])
    ).splitlines()
    positions = [lines.index("module load cuda"), lines.index("ulimit -l unlimited")]
    last_option = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    command = next(i for i, line in enumerate(lines) if line.startswith("exec "))
    assert last_option < positions[0] < positions[1] < command


HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "a; touch pwned",
    "a' ; touch pwned ; '",
    'a" ; touch pwned ; "',
    "a && touch pwned",
    "a #SBATCH --nodes=99",
    "\\",
    "$HOME",
    "-x",
    "--nodes=99",
]
TEXT_KEYS = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "comment")


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", [*TEXT_KEYS, "extra_sbatch"])
def test_values_with_shell_characters_stay_values(key: str, value: str, tmp_path: Path) -> None:
    given: Any = {"licenses": value} if key == "extra_sbatch" else value
    plain = options(submit.render(make_config(tmp_path)))
    script = submit.render(make_config(tmp_path, **{key: given}))
    assert options(script) == {**plain, "licenses" if key == "extra_sbatch" else key: value}
    assert is_valid_shell(script)
    # Without its comments, which is where sbatch's options are, the script does not hold the value at all.
    assert "pwned" not in re.sub(r"^#.*$", "", script, flags=re.M)


@pytest.mark.parametrize("value", HOSTILE)
def test_paths_with_shell_characters_stay_paths(value: str, tmp_path: Path) -> None:
    root = tmp_path / value.replace("/", "_")
    config = make_config(root, python=f"/opt/{value}/python")
    script = submit.render(config)
    assert is_valid_shell(script)
    assert options(script)["output"] == f"{root}/runs/city/submitit/%j_0_log.out"
    exports = "\n".join(line for line in script.splitlines() if line.startswith("export PYTHONPATH"))
    printed = subprocess.run(
        ["bash", "-c", f'{exports}\nprintf %s "$PYTHONPATH"'],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert printed.stdout == str(root / "runs" / "city" / "code" / code_digest(package_root()))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("break_", ["\n", "\r", "\x00", "\x1b", "\x7f"], ids=repr)
@pytest.mark.parametrize("key", [*TEXT_KEYS, "gpu_type", "python", "mail_user", "extra_sbatch"])
def test_line_breaks_are_refused(key: str, break_: str, tmp_path: Path) -> None:
    text = f"a{break_}touch pwned"
    given: Any = {"licenses": text} if key == "extra_sbatch" else text
    with pytest.raises(ConfigError, match=rf"cluster\.{key}"):
        submit.render(make_config(tmp_path, **{key: given}))


@pytest.mark.parametrize("key", ["a b", "a=b", "x\ntouch pwned", "", "a;b", "$(x)"])
def test_names_of_options_are_names(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="extra_sbatch"):
        submit.render(make_config(tmp_path, extra_sbatch={key: "1"}))


@pytest.mark.parametrize(
    "key",
    [
        "signal", "no-requeue", "no_requeue", "requeue", "output", "error", "open-mode", "nodes", "ntasks",
        "ntasks_per_node", "cpus-per-task", "gres", "gpus-per-node", "array", "wrap", "chdir", "time",
        "job_name",
        "signa", "outpu", "no-requ", "gpus", "part", "cpus-per-t",
    ],
)  # fmt: skip
def test_options_that_the_stop_contract_rests_on_are_refused_abbreviated_too(
    key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.extra_sbatch\.{key}"):
        submit.render(make_config(tmp_path, extra_sbatch={key: "1"}))


@pytest.mark.parametrize("root", ["/tmp/a\nb", "/tmp/100%", "/tmp/\x1b"], ids=repr)
def test_a_run_root_that_slurm_would_read_otherwise_is_refused(root: str) -> None:
    from omegaconf import DictConfig, OmegaConf

    cfg = OmegaConf.structured(Config(run_root=root))
    assert isinstance(cfg, DictConfig)
    cfg.data.root = "/data"
    with pytest.raises(ConfigError, match="run_root"):
        resolve_config(cfg, "x")


def test_inherited_variables_are_hidden_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    before = dict(os.environ)
    with pytest.raises(RuntimeError), script.clean_environment():
        assert "SLURM_JOB_ID" not in os.environ and "MASTER_ADDR" not in os.environ
        raise RuntimeError
    assert dict(os.environ) == before


def test_sbatch_missing_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = make_config(tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "train" / "meta.json").write_text("{}")
    with pytest.raises(ClusterError, match="sbatch is not installed"):
        submit.submit(config, make_plan(config))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("state", ["absent", "empty"])
def test_missing_data_is_refused_with_the_command_that_packs(state: str, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    if state == "empty":
        (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match=r"data\.root") as refusal:
        inputs.check_data(config)
    assert "hpctrain data images SOURCE" in refusal.value.change


def test_a_finished_run_is_not_sent_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.data.synthetic_identities = 4
    run = submit.freeze(config, make_plan(config))
    run.done.touch()
    done = submit.submit(config, make_plan(config))
    assert done.job is None and "done already" in done.message
    config.seed = 5
    with pytest.raises(ConfigError, match="another identity"):
        submit.submit(config, make_plan(config))


def test_words_of_sbatch_are_passed_on() -> None:
    class FailedError(Exception):
        stderr = (
            "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed"
        )

    said = script.refused(FailedError())
    assert said.exit_code == 4 and "invalid partition specified: nope" in said.found
    assert "sinfo" in said.change


def test_a_stopped_run_does_not_start(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.cluster = ClusterConfig()
    run = submit.freeze(config, make_plan(config))
    run.stop.touch()
    assert supervise(str(run.path)) == 0
    assert Ledger(run.ledger).attempts() == [] and not run.done.exists()


def test_a_spurious_start_of_a_finished_run_is_harmless(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.cluster = ClusterConfig()
    run = submit.freeze(config, make_plan(config))
    run.done.touch()
    assert supervise(str(run.path)) == 0
    assert Ledger(run.ledger).attempts() == []


def test_code_that_was_frozen_by_an_older_version_is_not_given_keys_that_it_refuses(tmp_path: Path) -> None:
    config = Config(name="city", run_root=str(tmp_path / "runs"))
    config.data.root = str(tmp_path / "data")
    run = submit.freeze(config, submit.planned(config))
    submit.freeze(config, submit.planned(config), new_code=False)
    old = yaml.safe_load(run.config.read_text())
    del old["plan"], old["parallelism"]["auto"]
    run.config.write_text(yaml.safe_dump(old))
    with pytest.raises(ConfigError, match=r"older than parallelism\.auto, plan") as refusal:
        submit.freeze(config, submit.planned(config), new_code=False)
    assert "--code=now" in str(refusal.value)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", '{"num_samples": 4}', "\udcff"])
def test_a_damaged_description_of_data_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "meta.json").write_bytes(text.encode(errors="surrogateescape"))
    config = Config(data=ImageDataConfig(root=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"train/meta\.json is damaged or of another version"):
        inputs.find_workload(config)


def partition(default_s: int | None, max_s: int | None) -> PartitionInfo:
    return PartitionInfo(
        name="short", is_default=True, state="UP", nodes="n[0-3]", num_nodes=4, max_time_s=max_s,
        default_time_s=default_s, grace_time_s=0, preempt_mode="OFF",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limit_min", "default_s", "max_s", "words"),
    [
        (600, None, 3600, r"time_limit_min=600, but partition short allows 60 minutes"),
        (None, 120, None, r"partition short gives 2 minutes .* come back to the same step for ever"),
        (None, None, 120, r"partition short gives 2 minutes .* come back to the same step for ever"),
        (60, 120, 3600, None),
        (None, None, None, None),
    ],
)
def test_a_partition_that_would_never_run_it_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit_min: int | None,
    default_s: int | None,
    max_s: int | None,
    words: str | None,
) -> None:
    """Slurm queues such jobs: slurm.conf(5), EnforcePartLimits."""
    monkeypatch.setattr(slurm, "partitions", lambda: [partition(default_s, max_s)])
    config = make_config(tmp_path, time_limit_min=limit_min, num_nodes=4, signal_lead_s=119)
    config.optim.global_batch_size, config.optim.precision = 4096, Precision.bf16
    plan = make_plan(config)
    assert plan.forecast is not None
    if words is None:
        submit.check_partition(config, plan)
        return
    with pytest.raises(PlanError, match=words):
        submit.check_partition(config, plan)
    config.plan.force = True
    submit.check_partition(config, plan)
