"""The command line as its users meet it: what it says to wrong input, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from hpctrain import cli
from hpctrain.config.load import load_config
from hpctrain.plan.plan import RunPlan

LAPTOP = "+exp=vision_city_laptop"


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Calls the command line in an empty folder, with an empty home and no Slurm on PATH."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(home))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def call(*argv: str) -> Answer:
        capfd.readouterr()
        code = cli.main(argv)
        assert not GlobalHydra.instance().is_initialized(), "Hydra's state must not leak into the next call"
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return Answer(code, captured.out, captured.err)

    return call


def packed(root: Path) -> Path:
    """A folder that looks like packed shards to the checks of the login node."""
    (root / "train").mkdir(parents=True)
    (root / "train" / "meta.json").write_text("{}")
    return root


# What the user typed, the exit code, and words that the one message must hold: asked, true, to change.
REFUSALS = {
    "unknown experiment": (
        ["+exp=vison_city"],
        2,
        ["'vison_city'", "vision_city_laptop", "+exp=vision_city"],
    ),
    "unknown model": ([LAPTOP, "model=facenet"], 2, ["'facenet'", "faces_tiny", "model=faces_"]),
    "unknown cluster": ([LAPTOP, "cluster=nope"], 2, ["'nope'", "rtx4090", "cluster=local"]),
    "unknown key": ([LAPTOP, "optim.lrr=1"], 2, ["optim.lrr", "no such key", "optim.lr"]),
    "key of another group": ([LAPTOP, "lr=1"], 2, ["no key lr", "optim.lr"]),
    "added key": ([LAPTOP, "+foo=1"], 2, ["no key foo"]),
    "added key in a group": ([LAPTOP, "+optim.learning_rate=1"], 2, ["no key optim.learning_rate", "lr"]),
    "added key in a table without +": ([LAPTOP, "cluster.env.A=1"], 2, ["+cluster.env.A=VALUE"]),
    "wrong type": ([LAPTOP, "optim.lr=fast"], 2, ["optim.lr=fast", "Float", "a number", "optim.lr=0.001"]),
    "fraction": ([LAPTOP, "optim.num_epochs=1.5"], 2, ["num_epochs=1.5", "a whole number"]),
    "no value": ([LAPTOP, "optim.lr="], 2, ["optim.lr=", "a number"]),
    "unknown choice": ([LAPTOP, "optim.kind=lion"], 2, ["lion", "optim.kind=adamw or optim.kind=sgd"]),
    "list expected": ([LAPTOP, "optim.betas=3"], 2, ["optim.betas=3", "[0.9,0.999]"]),
    "null for a group": ([LAPTOP, "optim=null"], 2, ["group", "optim=adamw"]),
    "group added": ([LAPTOP, "+cluster=rtx4090"], 2, ["second cluster", "without +"]),
    "two experiments": ([LAPTOP, "+exp=vision_city"], 2, ["exp is given twice", "one +exp=NAME"]),
    "several values": ([LAPTOP, "optim.lr=1,2"], 2, ["optim.lr=1,2", "-m", "[1,2]"]),
    "no equals sign": (["plan", "vision_city_laptop"], 2, ["'vision_city_laptop'", "no =", "+exp=NAME"]),
    "unknown flag": ([LAPTOP, "--bogus"], 2, ["--bogus"]),
    "missing data": (
        ["+exp=vision_city", "data.root=/nope"],
        2,
        ["/nope", "not exist", "hpctrain data images"],
    ),
    "bad name": ([LAPTOP, "name=a/b"], 2, ["'a/b'", "letters", "name=a_b"]),
    "name that climbs": ([LAPTOP, "name=.."], 2, ["'..'", "name=run"]),
    "percent in the path": ([LAPTOP, "run_root=/tmp/100%"], 2, ["100%", "run_root=FOLDER"]),
    "unknown verb": (["frobnicate", LAPTOP], 2, ["'frobnicate'", "submit, plan", "hpctrain --help"]),
    "mistyped verb": (["submitt", LAPTOP], 2, ["'submitt'", "try:   hpctrain submit\n"]),
    "experiment as a verb": (["vision_city"], 2, ["'vision_city'", "+exp=vision_city"]),
    "ranks that do not fit": (
        [LAPTOP, "parallelism.dp_replicate=3"],
        3,
        [
            "dp_replicate 3",
            "= 3 ranks",
            "num_nodes 1 × cluster.ranks_per_node 2 = 2 ranks",
            "dp_replicate=-1",
        ],
    ),
    "batch that does not divide": (
        [LAPTOP, "optim.global_batch_size=63"],
        3,
        ["global_batch_size=63", "2 data-parallel ranks", "64"],
    ),
    "render of a local run": (["render", LAPTOP], 2, ["cluster.kind=local", "cluster=rtx4090"]),
    "sweep without Slurm": (["-m", LAPTOP, "seed=0,1"], 2, ["job array", "cluster.kind=local"]),
    "plan of a sweep": (["plan", "-m", LAPTOP, "seed=0,1"], 2, ["plan of a sweep", "without -m"]),
    "run outside an allocation": (
        ["run", LAPTOP, "cluster=sandbox"],
        2,
        ["no Slurm allocation", "cluster=local"],
    ),
    "sbatch missing": ([LAPTOP, "cluster=sandbox"], 4, ["sbatch is not installed", "cluster=local"]),
    "sweep with sbatch missing": (
        ["-m", LAPTOP, "cluster=sandbox", "seed=0,1"],
        4,
        ["sbatch is not installed"],
    ),
    "status of nothing": (["status", "nope"], 2, ["no run 'nope'", "runs here: none"]),
    "resume of nothing": (["resume", "nope"], 2, ["no run 'nope'"]),
    "logs without a run": (["logs"], 2, ["required: run"]),
    "unknown backbone": (
        [LAPTOP, "model.backbone=resnet5O"],
        2,
        ["timm has no such model", "model.backbone=resnet50"],
    ),
    "missing weights": ([LAPTOP, "model.pretrained=/nope"], 2, ["model.pretrained=/nope", "no such file"]),
    "data without a kind": (["data"], 2, ["hpctrain data images"]),
    "protected option": (
        ["render", "+exp=vision_city", "data.root=/d", "+cluster.extra_sbatch.signal=USR1@1"],
        2,
        ["cluster.extra_sbatch.signal", "stop and requeue"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_wrong_input_gets_one_message_and_its_exit_code(case: str, run: Run) -> None:
    argv, code, words = REFUSALS[case]
    if argv[0].startswith("+") and code != 4:
        argv = ["plan", *argv]  # what is wrongly let through must not train for minutes
    answer = run(*argv)
    assert answer.code == code, answer.err
    assert [word for word in words if word not in answer.err] == [], answer.err
    assert len(re.findall(r"^hpctrain( \w+)?: ", answer.err, re.M)) == 1, "one message"
    assert "Error executing job" not in answer.err
    assert not Path("runs").exists(), "a refusal leaves nothing behind"


def test_no_arguments_print_the_help_and_count_as_wrong_use(run: Run) -> None:
    answer = run()
    assert answer.code == 2 and "usage: python -m hpctrain [verb]" in answer.out


@pytest.mark.parametrize(
    "argv", [["--help"], ["-h"], ["help"], ["plan", "--help"], [LAPTOP, "--help"]], ids=str
)
def test_help_is_ours(argv: list[str], run: Run) -> None:
    answer = run(*argv)
    assert answer.code == 0 and "usage: python -m hpctrain [verb]" in answer.out
    assert [verb for verb in cli.VERBS if verb not in answer.out] == []


def test_experiment_is_understood_with_and_without_plus(run: Run) -> None:
    with_plus, without = run("plan", LAPTOP), run("plan", LAPTOP.removeprefix("+"))
    assert with_plus.code == without.code == 0
    assert with_plus.out == without.out


def test_plan_shows_ranks_layout_and_batch(run: Run) -> None:
    out = run("plan", LAPTOP).out
    assert "1 nodes × 2 ranks a node = 2" in out
    assert "dp_replicate 2" in out and "(dp_replicate filled in)" in out
    assert "64 samples a step = 2 data-parallel ranks × 1 microbatches × 32" in out


def test_plan_as_json_is_the_plan(run: Run) -> None:
    fields = json.loads(run("plan", "--json", LAPTOP).out)
    compared = {key: fields.pop(key) for key in ("sizes", "named")}
    assert compared == {"sizes": [], "named": {}}
    plan = RunPlan.from_json(json.dumps(fields))
    assert (plan.world_size, plan.batch.microbatch_size) == (2, 32)


def test_plan_shows_all_findings_together_with_missing_data(run: Run) -> None:
    answer = run(
        "plan",
        "+exp=vision_city",
        "data.root=/nope",
        "optim.global_batch_size=4097",
        "optim.ema_decay=2",
        "model.image_size=[224]",
        "cluster.time_limit_min=1",
    )
    assert answer.code == 3
    keys = (
        "optim.global_batch_size=4097",
        "optim.ema_decay=2",
        "model.image_size",
        "signal_lead_s",
        "data.root",
    )
    assert [key for key in keys if key not in answer.err] == []


def test_plan_writes_nothing(run: Run) -> None:
    run("plan", LAPTOP)
    assert list(Path.cwd().iterdir()) == []


def test_hydras_own_flags_keep_working(run: Run) -> None:
    job = run("--cfg", "job", LAPTOP)
    assert job.code == 0 and "backbone: resnet10t" in job.out
    assert run("plan", "--cfg", "job", LAPTOP).out == job.out
    info = run("--info", "searchpath", LAPTOP)
    assert info.code == 0 and "provider" in info.out.lower()
    assert run("--hydra-help").code == 0
    assert list(Path.cwd().iterdir()) == []


def test_quick_answers_say_the_version(run: Run) -> None:
    from hpctrain import __version__

    assert run("--version").out == f"hpctrain {__version__}\n"


def write_cluster(folder: Path, name: str, partition: str) -> None:
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / f"{name}.yaml").write_text(f"kind: slurm\npartition: {partition}\nhardware: cpu\n")


RENDER = ("render", LAPTOP, "cluster=mine")


def test_configs_of_the_user_are_found_without_a_flag(run: Run) -> None:
    write_cluster(Path.home() / ".config" / "hpctrain", "mine", "of_the_user")
    answer = run(*RENDER)
    assert answer.code == 0 and "#SBATCH --partition=of_the_user\n" in answer.out


@pytest.mark.parametrize("flag", [["--config-dir", "site"], ["--config-dir=site"]], ids=str)
def test_config_dir_wins_over_the_users_configs(flag: list[str], run: Run) -> None:
    write_cluster(Path.home() / ".config" / "hpctrain", "mine", "of_the_user")
    write_cluster(Path("site"), "mine", "of_the_site")
    assert "#SBATCH --partition=of_the_site\n" in run(*RENDER, *flag).out


def test_a_users_config_that_a_shipped_one_hides_is_pointed_out(run: Run) -> None:
    write_cluster(Path.home() / ".config" / "hpctrain", "rtx4090", "of_the_user")
    answer = run("render", LAPTOP, "cluster=rtx4090")
    assert "of_the_user" not in answer.out
    assert "rtx4090.yaml is not used" in answer.err and "rename it" in answer.err


def freeze(run: Run, *overrides: str) -> Path:
    """A run folder as a submission leaves it, without starting anything."""
    from hpctrain.launch import submit
    from hpctrain.plan.plan import make_plan

    (point,) = cli.compose([LAPTOP, *overrides])
    config = point.resolve()
    return submit.freeze(config, make_plan(config)).path


def test_a_name_whose_identity_differs_is_refused_with_the_difference_and_another_name(run: Run) -> None:
    freeze(run)
    answer = run(LAPTOP, "optim.lr=0.5", "seed=3")
    assert answer.code == 2
    assert "optim.lr: 0.004 → 0.5" in answer.err and "seed: 0 → 3" in answer.err
    assert "name=vision_city_laptop-" in answer.err
    proposed = answer.err.partition("name=")[2].split(",")[0]
    assert run("plan", LAPTOP, "optim.lr=0.5", "seed=3", f"name={proposed}").code == 0


def test_resume_takes_changes_of_shape_before_and_after_its_flags(run: Run) -> None:
    path = freeze(run)
    answer = run("resume", "vision_city_laptop", "--json", "cluster.ranks_per_node=3")
    assert answer.code == 3 and "64 does not divide by 3" in answer.err
    answer = run("resume", "cluster.ranks_per_node=3", str(path))
    assert answer.code == 2, "the run comes first"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=0.5", ["optim.lr: 0.004 → 0.5"]),
        ("optim.lrr=1", ["optim.lrr"]),
        ("optim.lr=fast", ["optim.lr", "a number"]),
        ("cluster=sandbox", ["cluster"]),
        ("foo", ["'foo'", "key=value"]),
        ("name=other", ["name"]),
        ("run_root=elsewhere", ["run_root"]),
    ],
)
def test_resume_refuses_what_is_no_change_of_shape(override: str, words: list[str], run: Run) -> None:
    path = freeze(run)
    before = path.joinpath("config.yaml").read_text()
    answer = run("resume", "vision_city_laptop", override)
    assert answer.code == 2, (answer.out, answer.err)
    assert [word for word in words if word not in answer.err] == [], answer.err
    assert path.joinpath("config.yaml").read_text() == before


def test_a_run_that_is_held_by_a_supervisor_is_refused(run: Run) -> None:
    from hpctrain.run.directory import RunDirectory

    path = freeze(run)
    reader, writer = os.pipe()
    ready, signal = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(writer)
        with RunDirectory(path).lock():
            os.write(signal, b"x")
            os.read(reader, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        answer = run(LAPTOP)
    finally:
        os.close(writer)
        os.waitpid(holder, 0)
        for descriptor in (reader, ready, signal):
            os.close(descriptor)
    assert answer.code == 2 and "is running" in answer.err and "hpctrain status" in answer.err


def test_status_logs_and_cancel_answer_in_json(run: Run) -> None:
    path = freeze(run)
    assert json.loads(run("status", str(path), "--json").out)["state"] == "NEW"
    assert json.loads(run("logs", str(path), "--json").out) == {"logs": []}
    answer = run("cancel", str(path), "--json")
    assert answer.code == 1 and "nothing to cancel" in answer.err


def test_render_prints_a_script_where_no_slurm_is_installed(run: Run) -> None:
    answer = run("render", "+exp=vision_city", "data.root=/data")
    assert answer.code == 0 and answer.out.startswith("#!/bin/bash\n")
    assert not Path("runs").exists()


def test_frozen_config_is_the_composed_one(run: Run) -> None:
    path = freeze(run, "cluster.ranks_per_node=1", "+cluster.env.A=1", "name=x")
    config = load_config(path / "config.yaml")
    assert (config.cluster.ranks_per_node, config.cluster.env, config.name) == (1, {"A": "1"}, "x")
    assert Path(config.run_root).is_absolute() and Path(config.data.root).is_absolute()


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([LAPTOP, "optim.lr=fast"], 2)], ids=str)
def test_module_and_exit_code_of_a_real_process(argv: list[str], code: int, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", *argv],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_status_without_a_name_lists_the_runs(run: Run, tmp_path: Path) -> None:
    assert run("status").out == "no runs under runs/\n"
    folder = Path("runs") / "city"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    (listed,) = run("status").out.splitlines()
    assert listed.split()[0] == "NEW" and "city" in listed


def test_the_plan_says_what_the_data_mean_for_it(run: Run, tmp_path: Path) -> None:
    root = packed(tmp_path / "photos")
    (root / "train" / "meta.json").write_text(
        json.dumps({"num_samples": 80, "identities": ["a", "b", "c"], "shards": []})
    )
    options = (LAPTOP, f"data.root={root}", "data.synthetic_identities=0", "optim.num_epochs=5")
    said = run("plan", *options, "optim.global_batch_size=64").out
    assert "80 images of 3 people, 2 steps an epoch, 10 in all" in said
    assert "38% of each epoch is filler" in said  # 48 of 128
    assert "filler" not in run("plan", *options, "optim.global_batch_size=20").out
