"""What the ranks of `hpctrain selftest` do in place of training at once.

First checks, one after the other: layouts against one process, a whole run, changes of layout. Each rank says
what it found wrong, rank 0 keeps it in the ledger; a check that ends the ranks counts as failed at the next
start, which goes on with the others. Then the run proper: it signals itself half-way, is started again, and
must end with the weights of the run that nobody disturbed.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint import reader, store
from hpctrain.config.schema import CheckpointConfig, Config, Device, ParallelismConfig, ProfileConfig
from hpctrain.core.stop import AgreedStop, PeerLostError, SignalFlag
from hpctrain.core.train import train
from hpctrain.core.training import Training
from hpctrain.errors import PlanError
from hpctrain.plan.layout import AXES, Layout, axes_text
from hpctrain.plan.plan import make_plan
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.selftest.cells import SEQUENCES, Cell, cells_for
from hpctrain.selftest.compare import TOLERANCE, Told, compare, train_plainly
from hpctrain.selftest.table import PREEMPTED, UNDISTURBED, Row, read_rows

MEET_S = 60.0  # how long after a check the others may need to end theirs
SHOWN = 3  # differences of a check that are told

Check = Callable[[], list[str]]


def selftest(training: Training) -> CauseKind:
    """Carry out the checks that are left, then the run, which is preempted once. Collective over the world.

    Returns why it ended, as `train` does. Floats must be float64 by default, so that a lost term can be told
    from rounding.
    """
    return _Selftest(training).carry_out()


class _Selftest:
    def __init__(self, training: Training) -> None:
        self.training, self.config, self.mesh = training, training.config, training.mesh
        self.ledger = Ledger(training.run.ledger)
        self.whole = RunDirectory(training.run.path / "undisturbed")
        self.moved = RunDirectory(training.run.path / "moved")
        self.stop = AgreedStop(
            training.stop.flag,
            self.mesh.control if self.mesh.world_size > 1 else None,
            stop_file=training.stop.stop_file,
            timeout_s=MEET_S,
            stop_timeouts_s={},
        )

    def carry_out(self) -> CauseKind:
        # Groups of past layouts must stay, since DTensor remembers them by the mesh's shape. Each of their
        # connections is an open file.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        checks = self._checks()
        self._note("selftest", checks=[*checks, PREEMPTED], **self._place())
        left = [{row.check for row in read_rows(self.ledger) if row.error is None}]
        dist.broadcast_object_list(left, src=0, group=self.mesh.control)
        for name, check in checks.items():
            if name in left[0]:
                reason = self._carry_out(name, check)
                if reason is not None:
                    return reason
        return self._run_preempted()

    def _checks(self) -> dict[str, Check]:
        cells = cells_for(self.mesh.world_size, self.config.cluster.device)
        checks: dict[str, Check] = {_name(cell): partial(self._compare_cell, cell) for cell in cells}
        checks[UNDISTURBED] = self._run_undisturbed
        layouts = [self.training.plan.layout, *self._other_layouts()]
        for before, after in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
            if before != after:
                checks[f"saved in {axes_text(before)}, gone on in {axes_text(after)}"] = partial(
                    self._move, after
                )
        return checks

    def _carry_out(self, name: str, check: Check) -> CauseKind | None:
        """Do one check on all ranks. Returns the reason to stop, if there is one."""
        begun = time.monotonic()
        self._note("begun", check=name, attempt=self.training.attempt)
        failure = None
        try:
            wrong = check()
        except Exception as error:
            traceback.print_exc()
            failure, wrong = error, [f"rank {self.mesh.rank}: {type(error).__name__}: {error}"]
        try:
            self.stop.post()
            reason = self.stop.agreed()
        except PeerLostError as error:
            raise failure or error from None  # the others hang in what failed here
        self._tell(name, wrong, time.monotonic() - begun)
        self.training.watchdog.beat()
        return reason

    # The checks

    def _compare_cell(self, cell: Cell) -> list[str]:
        shape = ("layers", "family", "tied", "packed", "dropout", "lora", "clip", "optimizer", "sequences")
        plain = Cell(**{name: getattr(cell, name) for name in shape})
        return compare(cell, _reference(plain, self.mesh.device), self.mesh.device)

    def _run_undisturbed(self) -> list[str]:
        self._clear(self.whole)
        return self._train(self.whole, self.config)

    def _move(self, layout: Layout) -> list[str]:
        """Take the run one step on in this layout, and compare it with the undisturbed one."""
        if self.mesh.rank == 0 and not self.moved.path.exists():
            self.moved.create()
            first = store.find(self.whole.checkpoints)[-1].path
            shutil.copytree(first, self.moved.checkpoints / first.name)
        dist.barrier(group=self.mesh.control)
        config = replace(self.config, parallelism=_parallelism(layout, self.config.optim.global_batch_size))
        return self._train(self.moved, config, one_step=True) or self._compare_runs(self.moved, TOLERANCE)

    def _run_preempted(self) -> CauseKind:
        training, begun = self.training, time.monotonic()
        restored = training.progress.step
        if not restored:
            self._note("begun", check=PREEMPTED, attempt=training.attempt)
            self._signal_in_step(training.num_steps // 2)
        kind = train(training)
        if kind is CauseKind.done:
            bitwise = self.config.deterministic or self.config.cluster.device is Device.cpu
            wrong = self._compare_runs(training.run, 0.0 if bitwise else TOLERANCE)
            wrong += [] if restored else ["it was not preempted"]
            self._tell(PREEMPTED, wrong, time.monotonic() - begun)
        return kind

    # What they are made of

    def _train(self, run: RunDirectory, config: Config, *, one_step: bool = False) -> list[str]:
        """Train in a folder of its own, to the end or for one step, and save. It shows nothing."""
        if self.mesh.rank == 0:
            run.create()
        dist.barrier(group=self.mesh.control)
        flag = SignalFlag()
        flag.cause = CauseKind.stop_file if one_step else None
        every_step = CheckpointConfig(every_steps=1, keep_last=10_000)
        config = replace(config, checkpoint=every_step, profile=ProfileConfig(memory=False))
        with redirect_stdout(io.StringIO()):
            run_of_it = Training(
                config,
                make_plan(config),
                run,
                self.training.attempt,
                self.mesh,
                flag,
                lambda kind, text: None,
            )
            kind = train(run_of_it)
            run_of_it.close()
        wanted = CauseKind.stop_file if one_step else CauseKind.done
        return [] if kind in (wanted, CauseKind.done) else [f"it ended by {kind}"]

    def _compare_runs(self, run: RunDirectory, tolerance: float) -> list[str]:
        """Where the newest checkpoint differs from that of the undisturbed run at the same step. Rank 0."""
        if self.mesh.rank:
            return []
        newest = store.find(run.checkpoints)[0]
        same = [c for c in store.find(self.whole.checkpoints) if c.step == newest.step]
        if not same:
            return [f"the undisturbed run has no step {newest.step}"]
        keys = ("samples_consumed", "samples_hash")
        facts = [[c.manifest.facts[key] for key in keys] for c in (newest, same[0])]
        wrong = [] if facts[0] == facts[1] else [f"other samples were read: {facts[0]}, not {facts[1]}"]
        parts = [reader.load_full(c.path, ("model", "optim")) for c in (newest, same[0])]
        return wrong + _differences(f"step {newest.step}", parts[0], parts[1], tolerance)

    def _signal_in_step(self, number: int) -> None:
        """The last rank sends itself the signal of a preemption while it is in this step."""
        step = self.training.step

        def signalled(microbatches: list[Any], index: int) -> dict[str, torch.Tensor]:
            if index == number and self.mesh.rank == self.mesh.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(microbatches, index)

        self.training.step = signalled  # type: ignore[assignment]

    def _other_layouts(self) -> list[Layout]:
        """Layouts that the run can change to, as many as it has steps for."""
        world = self.mesh.world_size
        wanted = [
            Layout(pp=2, dp_replicate=1, dp_shard=world // 2, tp=1),
            Layout(pp=1, dp_replicate=1, dp_shard=world // 2, tp=2),
            Layout(pp=2, dp_replicate=1, dp_shard=world // 4, tp=2),
            Layout(pp=1, dp_replicate=world, dp_shard=1, tp=1),
        ]
        own = replace(self.training.plan.layout, filled=None)
        fits = [each for each in wanted if each.world_size == world and each != own and self._is_legal(each)]
        return fits[: self.training.num_steps - 3]

    def _is_legal(self, layout: Layout) -> bool:
        parallelism = _parallelism(layout, self.config.optim.global_batch_size)
        try:
            make_plan(replace(self.config, parallelism=parallelism))
        except PlanError:
            return False
        return True

    def _clear(self, run: RunDirectory) -> None:
        if self.mesh.rank == 0 and run.path.exists():
            shutil.rmtree(run.path)

    def _place(self) -> dict[str, Any]:
        on_gpu = self.mesh.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.mesh.device) if on_gpu else "CPU",
            "backend": f"NCCL {_nccl_version()}" if on_gpu else "Gloo",
            "ranks": self.mesh.world_size,
            "nodes": self.training.plan.num_nodes,
            "torch": torch.__version__,
        }

    def _note(self, event: str, **facts: Any) -> None:
        if self.mesh.rank == 0:
            self.ledger.append(event, **facts)

    def _tell(self, name: str, wrong: list[str], seconds: float) -> None:
        """Keep what all ranks found, and show it. Collective."""
        gathered: Any = self.mesh.gather_objects(wrong)
        if gathered is None:
            return
        found = [line for lines in gathered for line in lines]
        more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        row = Row(name, "; ".join(found[:SHOWN]) + more, round(seconds, 1))
        self.ledger.append("checked", check=name, error=row.error, seconds=row.seconds)
        assert self.training.reporter is not None
        self.training.reporter.say(row.text())


def _nccl_version() -> str:
    numbers: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, numbers))


@cache
def _reference(cell: Cell, device: torch.device) -> Told:
    return train_plainly(cell, device)


def _name(cell: Cell) -> str:
    return f"{cell.precision}  {replace(cell, sequences=SEQUENCES, precision='fp64')}"


def _parallelism(layout: Layout, global_batch_size: int) -> ParallelismConfig:
    share = global_batch_size // max(1, layout.dp)
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    return ParallelismConfig(**degrees, microbatch_size=share // 2 if share % 2 == 0 else share)


def _differences(where: str, found: Any, wanted: Any, tolerance: float) -> list[str]:
    """Tensors and values of two nested states that are further apart than that."""
    if isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            return [f"{where}: {sorted(found.keys() ^ wanted.keys())} on one side only"]
        return [
            line
            for key in wanted
            for line in _differences(f"{where} {key}", found[key], wanted[key], tolerance)
        ]
    if not isinstance(wanted, torch.Tensor):
        return [] if found == wanted else [f"{where}: {found}, not {wanted}"]
    error = float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
    return [] if error <= tolerance else [f"{where} differs by {error:.2e}"]
