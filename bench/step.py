"""What a training step costs: our loop against a hand-written one, Lightning Fabric and Accelerate.

All train the same model on the same decoded batches in memory, on two ranks (Gloo, CPU), with DDP, fused
AdamW, clipping and schedule set alike; rounds of steps are interleaved in one pair of processes. Ours is
`core.train.train` itself, with everything it does between steps: agreeing on a stop, hashing sample ids, the
watchdog, and loss and rates to metrics.jsonl and TensorBoard every ten steps. The others report nothing.

    python bench/step.py [--rounds 8] [--steps 20] [--only resnet10t]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import lightning
import torch
import torch.distributed as dist
from loops import (
    ACCELERATE,
    BUILDERS,
    CLIP_NORM,
    EPOCHS,
    FABRIC,
    LR,
    PLAIN,
    WARMUP_EPOCHS,
    WEIGHT_DECAY,
    WORLD,
    Step,
    global_loss,
    make_schedule,
)
from torch import nn

from hpctrain.config import schema
from hpctrain.core.feed import Feed
from hpctrain.core.mesh import build_mesh
from hpctrain.core.stop import SignalFlag
from hpctrain.core.train import train
from hpctrain.core.training import Training
from hpctrain.data.synthetic import make_faces
from hpctrain.models.registry import resolve_spec
from hpctrain.models.spec import DataFacts, make_parameter_groups
from hpctrain.plan.plan import make_plan
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory

NUM_BATCHES = 8  # in memory, taken in turn
OURS = "hpctrain"
AIMS = {PLAIN: 0.98, FABRIC: 1.0, ACCELERATE: 1.0}


@dataclass(frozen=True)
class Case:
    """A model and the batch of each rank."""

    backbone: str
    image_size: tuple[int, int]
    per_rank: int


CASES = [Case("resnet10t", (64, 56), 16), Case("resnet18", (112, 112), 8)]


def make_config(case: Case, root: Path) -> schema.Config:
    optim: dict[str, Any] = {
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "clip_norm": CLIP_NORM,
        "num_epochs": EPOCHS,
    }
    size = list(case.image_size)
    return schema.Config(
        model=schema.VisionConfig(backbone=case.backbone, embedding_dim=128, image_size=size),
        cluster=schema.ClusterConfig(ranks_per_node=WORLD),
        data=schema.ImageDataConfig(root=str(root), num_workers=0),
        optim=schema.OptimConfig(
            warmup_epochs=WARMUP_EPOCHS, global_batch_size=case.per_rank * WORLD, **optim
        ),
        checkpoint=schema.CheckpointConfig(every_steps=0),
        eval_every_epochs=0,
    )


def build_others(training: Training) -> tuple[dict[str, Step], dict[str, nn.Module]]:
    """The other loops, each with a model of its own that starts from the weights of ours."""
    shards = training.train_shards
    facts = DataFacts(shards.num_identities, list(shards.behaviours))
    share = make_schedule(training.steps_per_epoch)
    steps: dict[str, Step] = {}
    models: dict[str, nn.Module] = {}
    for name, build in BUILDERS.items():
        model = resolve_spec("vision").build(training.config.model, facts)
        model.load_state_dict(training.model.state_dict())
        steps[name] = build(model, make_parameter_groups(model, WEIGHT_DECAY), share)
        models[name] = model
    return steps, models


class Rounds:
    """The batches of our loop. Between two of its rounds, while it waits for a batch, the others train."""

    def __init__(self, batches: list[Any], others: dict[str, Step], flag: SignalFlag) -> None:
        self.batches, self.others, self.flag = batches, others, flag
        #: seconds a step, and seconds of this rank's CPU a step, of each round
        self.times_s: dict[str, list[tuple[float, float]]] = {name: [] for name in (OURS, *others)}

    def run(self, num_rounds: int, num_steps: int) -> Iterator[list[Any]]:
        """One round to warm up, then `num_rounds`, forwards and backwards in turn; then a last step."""
        names = list(self.times_s)
        for round_ in range(num_rounds + 1):
            numbers = range(round_ * num_steps, (round_ + 1) * num_steps)
            for name in names if round_ % 2 else names[::-1]:
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
                for number in numbers:
                    if name == OURS:
                        yield [self.batch(number)]
                    else:
                        self.others[name](self.batch(number), number)
                wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
                self.times_s[name].append((wall_s / num_steps, cpu_s / num_steps))
        last = (num_rounds + 1) * num_steps
        for step in self.others.values():
            step(self.batch(last), last)
        self.flag.cause = CauseKind.stop_file
        yield [self.batch(last)]

    def batch(self, number: int) -> Any:
        return self.batches[number % len(self.batches)]


def evaluated_loss(model: nn.Module, batch: Any) -> float:
    with torch.no_grad():
        return float(global_loss(model.eval()(batch), batch))


def are_equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def run_rank(rank: int, case: Case, folder: Path, port: int, num_rounds: int, num_steps: int) -> None:
    """What one of the two processes does; rank 0 leaves its times in `result.json`."""
    torch.set_num_threads(1)
    # As torchrun would have it; Fabric and Accelerate then take the process group that is there.
    facts = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={WORLD} LOCAL_WORLD_SIZE={WORLD} GROUP_RANK=0 "
    facts += f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} TORCHELASTIC_RUN_ID=bench "
    facts += "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo"
    os.environ.update(dict(fact.split("=") for fact in facts.split()))
    mesh = build_mesh(rank, rank, WORLD, schema.Device.cpu, "127.0.0.1", port, 120)
    config, flag = make_config(case, folder / "faces"), SignalFlag()
    run = RunDirectory(folder / f"run_{case.backbone}")
    with open(folder / f"{case.backbone}_{rank}.log", "w", buffering=1) as log, redirect_stdout(log):
        if rank == 0:
            run.create()
        dist.barrier()
        training = Training(config, make_plan(config), run, "1_0_0", mesh, flag, lambda kind, text: None)
        batches = [next(training.feed)[0][0] for _ in range(NUM_BATCHES)]
        training.feed.close()
        others, models = build_others(training)
        rounds = Rounds(batches, others, flag)
        training.feed = Feed(rounds.run(num_rounds, num_steps), mesh.device)
        train(training)
        training.close()
    if rank == 0:
        result = {
            "times_s": {name: times[1:] for name, times in rounds.times_s.items()},
            "equal": {name: are_equal(training.model, model) for name, model in models.items()},
            "loss": {n: evaluated_loss(m, batches[0]) for n, m in {OURS: training.model, **models}.items()},
        }
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def run_ranks(*arguments: Any) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(WORLD)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
        if each.exitcode:
            raise SystemExit("a rank failed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, lightning {lightning.__version__}, accelerate {accelerate.__version__}"
    )


def report(case: Case, result: dict[str, Any]) -> None:
    times_s = {name: [wall for wall, _ in times] for name, times in result["times_s"].items()}
    cpu_s = {name: [cpu for _, cpu in times] for name, times in result["times_s"].items()}
    height_width = "×".join(map(str, case.image_size))
    print(f"\n{case.backbone}, {height_width}, {case.per_rank} images a rank\n")
    print("| loop | ms a step | lowest … highest | CPU ms a step of a rank |\n|---|---|---|---|")
    for name, values in times_s.items():
        ms = [1000 * value for value in values]
        cpu_ms = 1000 * statistics.median(cpu_s[name])
        print(f"| {name} | {statistics.median(ms):.1f} | {min(ms):.1f} … {max(ms):.1f} | {cpu_ms:.1f} |")
    losses = ", ".join(f"{name} {loss:.6f}" for name, loss in result["loss"].items())
    equal = [name for name, is_equal in result["equal"].items() if is_equal]
    print(f"\nloss after the same steps: {losses}")
    print(f"same weights as {OURS}, bit for bit: {', '.join(equal) or 'none'}")
    # Fabric adds the norms up in the order of the optimizer's groups, and rounding grows from step to step.
    assert {PLAIN, ACCELERATE} <= set(equal), "these loops train something else"
    for name, aim in AIMS.items():
        ratios = [theirs / ours for theirs, ours in zip(times_s[name], times_s[OURS], strict=True)]
        spread = f"{min(ratios):.3f} … {max(ratios):.3f}"
        print(f"speed of {OURS} / {name}: {statistics.median(ratios):.3f} ({spread}; aim {aim})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", help="backbone of the one case to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"medians of {options.rounds} interleaved rounds of {options.steps} steps, {WORLD} ranks")
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as name:
        folder = Path(name)
        make_faces(folder / "faces", num_identities=32, images_per_identity=20)
        for case in CASES:
            if options.only in (None, case.backbone):
                run_ranks(case, folder, free_port(), options.rounds, options.steps)
                report(case, json.loads((folder / "result.json").read_text()))


if __name__ == "__main__":
    main()
