"""What may be typed: the help text, the verbs and their flags."""

from __future__ import annotations

import argparse

HELP = """\
hpctrain: Slurm-native training on clusters of consumer GPUs

usage: python -m hpctrain [verb] [+exp=NAME] [key=value ...]     (no verb: submit)

verbs that take a config:
  submit   plan the run, freeze it into runs/<name>/, send it to Slurm (cluster=local: run it here)
  plan     does it fit, when is it done, which layout is best; or all findings together
           --html FILE   a page with pictures       --compare pp8,auto   layouts side by side
           --trace       a step of the real code on pretended ranks; with --slurm as a small job
  render   print the batch script that submit would send
  run      carry the run out here, in the foreground (inside an allocation: over its nodes)
  selftest check your cluster and its GPUs in a few minutes: layouts, changes of layout, a preemption
  doctor   is the cluster set up for this run      --write-cluster NAME makes its config
  preflight check every node with a small job, before a long one
  calibrate measure devices, links and storage for the planner   --name NAME of the file it writes
verbs that take a run, by folder or by name:
  status [RUN]  what it is doing, what it did, why it ended; without RUN a line per run
  logs RUN      what its ranks printed           -f follows, --rank N chooses
  cancel RUN    scancel it, for good
  resume RUN    go on from its last checkpoint   --code=now takes the present code
verbs with their own --help:
  data images SOURCE OUT         pack images into shards
  data tokens SOURCE OUT         pack texts and calls into token shards
  export model RUN OUT           weights for plain timm
  export embeddings RUN IMAGES OUT
  export hf RUN OUT              a decoder as a Hugging Face folder   --adapter for PEFT
  export sample RUN              what a small decoder answers         --prompt TEXT

  -m                sweep: every combination of a=1,2 b=3,4 becomes an element of one job array
  --json            facts as JSON
  --config-dir DIR  configs of your own; ~/.config/hpctrain is found without it
  --cfg job, --info, --hydra-help: Hydra's own

examples:
  python -m hpctrain +exp=vision_city_laptop
  python -m hpctrain +exp=vision_city data.root=/data/city cluster.account=vision
  python -m hpctrain -m +exp=vision_city optim.lr=1e-3,3e-4 seed=0,1
  python -m hpctrain plan +exp=finance_callbot parallelism=auto
  python -m hpctrain selftest cluster=rtx4090 cluster.partition=gpu

exit codes: 0 done · 1 failed · 2 wrong use or config · 3 refused by the plan · 4 refused by the cluster
"""

CONFIG_VERBS = ("submit", "plan", "render", "run", "selftest", "doctor", "preflight", "calibrate")
RUN_VERBS = ("status", "logs", "cancel", "resume")
DEVICE_VERBS = ("data", "export")
VERBS = CONFIG_VERBS + RUN_VERBS + DEVICE_VERBS


def config_flags(verb: str) -> argparse.ArgumentParser:
    """Flags of our own among Hydra's and the overrides."""
    parser = argparse.ArgumentParser(prog=f"hpctrain {verb}", allow_abbrev=False, add_help=False)
    parser.add_argument("--json", action="store_true")
    if verb == "plan":
        parser.add_argument("--html", metavar="FILE")
        parser.add_argument("--trace", action="store_true")
        parser.add_argument("--slurm", action="store_true")
        parser.add_argument(
            "--compare",
            type=lambda text: [name for name in text.split(",") if name],
            default=[],
            metavar="A,B",
        )
    if verb == "doctor":
        parser.add_argument("--write-cluster", metavar="NAME")
    if verb == "calibrate":
        parser.add_argument("--name")
    return parser


def parse_run_arguments(verb: str, rest: list[str]) -> argparse.Namespace:
    """Arguments of the verbs that take a run."""
    parser = argparse.ArgumentParser(prog=f"hpctrain {verb}")
    some = "?" if verb == "status" else None
    parser.add_argument("run", nargs=some, help="folder of the run, or its name under runs/")
    parser.add_argument("--json", action="store_true")
    if verb == "logs":
        parser.add_argument("-f", "--follow", action="store_true")
        parser.add_argument("--rank", type=int, default=0)
    if verb == "resume":
        parser.add_argument("--code", choices=["frozen", "now"], default="frozen")
        parser.add_argument("overrides", nargs="*", help="changes of shape: cluster.num_nodes=2 …")
    return parser.parse_intermixed_args(rest)
