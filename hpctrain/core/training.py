"""A training run of one rank, put together: what the loop calls, and the order in which it is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.config.schema import Config, Precision
from hpctrain.core.build import build_parallel
from hpctrain.core.data_parallel import sync_buffers
from hpctrain.core.evaluate import evaluate
from hpctrain.core.feed import Feed
from hpctrain.core.keeper import Keeper
from hpctrain.core.loss_scale import LossScale
from hpctrain.core.mesh import Mesh
from hpctrain.core.metrics import Deferred, Meter, Reporter
from hpctrain.core.optim import Ema, build_optimizer, learning_rate
from hpctrain.core.plan_check import PlanCheck
from hpctrain.core.profile import StepTrace
from hpctrain.core.state import Kept
from hpctrain.core.step import TrainStep
from hpctrain.core.stop import AgreedStop, SignalFlag
from hpctrain.core.watchdog import Watchdog
from hpctrain.data.order import samples_after
from hpctrain.data.source import open_source
from hpctrain.models.registry import resolve_spec
from hpctrain.models.spec import make_parameter_groups
from hpctrain.plan.layout import AXES
from hpctrain.plan.plan import RunPlan
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory, write_json
from hpctrain.run.drift import drift_lines
from hpctrain.run.ledger import Ledger

PREEMPTION_TIMEOUT_S = 20.0  # how long a silent peer is waited for when grace may be short


class Training:
    """One rank's share of a run."""

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        run: RunDirectory,
        attempt: str,
        mesh: Mesh,
        flag: SignalFlag,
        leave: Callable[[CauseKind, str], None],
    ) -> None:
        self.config, self.plan, self.run, self.attempt, self.mesh = config, plan, run, attempt, mesh
        stop_timeouts_s = {
            CauseKind.preemption: PREEMPTION_TIMEOUT_S,
            CauseKind.time_limit: max(PREEMPTION_TIMEOUT_S, config.cluster.signal_lead_s / 2),
        }
        self.watchdog = Watchdog(
            flag, leave, timeout_s=config.hang_timeout_s, stop_timeouts_s=stop_timeouts_s
        )
        self.watchdog.start()
        self._build_model()
        kept = Kept(self.model, self.optimizer, self.ema, self.loss_scale)
        self.keeper = Keeper(config, run, attempt, mesh, kept)
        self.progress = self.keeper.restore()
        self._build_feed()
        self.stop = AgreedStop(
            flag,
            mesh.control if mesh.world_size > 1 else None,
            stop_file=run.stop if mesh.rank == 0 else None,
            timeout_s=config.hang_timeout_s,
            stop_timeouts_s=stop_timeouts_s,
        )
        self._build_reporting()

    # Building, in the order of calls

    def _build_model(self) -> None:
        config, mesh = self.config, self.mesh
        self.source = open_source(config)
        if mesh.rank == 0:
            write_json(self.run.data_facts, self.source.facts)
        self.spec = resolve_spec(config.model.kind)
        self.parallel = build_parallel(config, self.plan, self.spec, self.source, mesh)
        self.model = self.parallel.model
        self.optimizer = build_optimizer(
            make_parameter_groups(self.model, config.optim.weight_decay), config.optim
        )
        self.ema = Ema(self.model, config.optim.ema_decay) if config.optim.ema_decay is not None else None
        self.loss_scale = LossScale(mesh.device) if config.optim.precision is Precision.fp16 else None

    def _build_feed(self) -> None:
        config, mesh = self.config, self.mesh
        loader = self.source.train_loader(
            rank=self.parallel.dp_rank,
            world=self.parallel.dp,
            samples_consumed=self.progress.samples_consumed,
            microbatch_size=self.plan.batch.microbatch_size,
            pin_memory=mesh.device.type == "cuda",
        )
        self.steps_per_epoch = loader.steps_per_epoch
        self.num_steps = config.optim.num_epochs * self.steps_per_epoch
        self.feed = Feed(loader, mesh.device)
        if not self.finished:
            self.parallel.start(self.feed.peek)
        self.step = TrainStep(
            self.parallel,
            self.optimizer,
            ema=self.ema,
            optim=config.optim,
            steps_per_epoch=self.steps_per_epoch,
            loss_scale=self.loss_scale,
        )

    def _build_reporting(self) -> None:
        config, mesh = self.config, self.mesh
        self.reporter = None
        self.grad_norm = torch.zeros((), device=mesh.device)
        self.deferred = Deferred(mesh.device)
        peak = self.plan.peak_tflops
        flops = None
        if peak is not None and not self.finished:
            flops = self.parallel.flops_per_sample(self.feed.peek)
        self.meter = Meter(
            flops_per_sample=flops, peak_flops=peak * 1e12 if peak else None, world_size=mesh.world_size
        )
        self.meter.restart(self.feed.waited_s)
        trace = self.run.profile / f"{self.attempt}_{mesh.rank}.json.gz"
        self.trace = StepTrace(config.profile.steps, trace, mesh.device)
        if mesh.rank == 0:
            on_gpu = mesh.device.type == "cuda"
            self.plan_check = PlanCheck(self.plan, Ledger(self.run.ledger), self.attempt, on_gpu=on_gpu)
            self.reporter = Reporter(
                self.run.metrics, self.run.tensorboard, self.attempt, self.num_steps, self.progress.step
            )
            if self.progress.step:
                self.reporter.say(f"going on at step {self.progress.step} of {self.num_steps}")

    # What the loop calls

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.num_steps

    def advance(self, host_batches: list[Any], scalars: dict[str, torch.Tensor]) -> None:
        """Count the step and report it when due. Reading the numbers waits for nothing on a GPU."""
        step = self.progress.step
        self.grad_norm = scalars["grad_norm"]
        global_batch_size = self.config.optim.global_batch_size
        consumed = samples_after(step + 1, self.source.num_samples, global_batch_size)
        samples = consumed - self.progress.samples_consumed
        self.progress.advance(host_batches if self.parallel.reads_for_replica else [], samples)
        self.meter.add(samples)
        if self.progress.step % self.config.log_every_steps == 0 or self.finished:
            if self.mesh.world_size > 1:
                # Collective on every rank, though only rank 0 reports: the share becomes the whole.
                dist.all_reduce(scalars["loss"])
            if self.reporter is not None:
                self.deferred.push(self._facts(step), scalars)
        self._report()

    def _facts(self, step: int) -> dict[str, Any]:
        lr = learning_rate(step, optim=self.config.optim, steps_per_epoch=self.steps_per_epoch)
        rates = self.meter.report(self.feed.waited_s, self.mesh.device)
        return {"step": step + 1, "epoch": step // self.steps_per_epoch, "lr": lr, **rates}

    def _report(self, *, wait: bool = False) -> None:
        for record in self.deferred.ready(wait=wait):
            assert self.reporter is not None
            self.reporter.train(record)
            compared = self.plan_check.add(record)
            if compared is not None:
                self.reporter.say("plan  " + "; ".join(drift_lines(compared)))
            if not math.isfinite(record["loss"]):
                raise FloatingPointError(f"the loss is {record['loss']} at step {record['step']}")

    def evaluate_if_due(self) -> bool:
        """Evaluate at the end of every `eval_every_epochs`-th epoch and of the run, once. Collective.

        False when an agreed stop cut it short: the next start does it.
        """
        step, every = self.progress.step, self.config.eval_every_epochs
        epoch_ended = step > 0 and step % self.steps_per_epoch == 0
        due = self.finished or (every > 0 and epoch_ended and step // self.steps_per_epoch % every == 0)
        if not due or self.progress.evaluated_step == step:
            return True
        if self.source.val is None:
            return True
        result = self._evaluate()
        if result is None:
            return False
        self.progress.evaluated_step = step
        if self.reporter is not None:
            self._report(wait=True)
            self.reporter.evaluation({"step": step, "epoch": step // self.steps_per_epoch, **result})
        self.meter.restart(self.feed.waited_s)
        return True

    def _evaluate(self) -> dict[str, float] | None:
        sync_buffers(self.model, self.ema)
        batches = self.source.eval_loader(
            rank=self.parallel.dp_rank,
            world=self.parallel.dp,
            microbatch_size=self.plan.batch.microbatch_size,
            pin_memory=self.mesh.device.type == "cuda",
        )
        if self.ema is not None:
            self.ema.swap()
        try:
            return evaluate(self.parallel, batches, self.spec.evaluate, self.mesh, self.stop, self.watchdog)
        finally:
            if self.ema is not None:
                self.ema.swap()

    def save_if_due(self) -> None:
        every = self.config.checkpoint.every_steps
        if every and self.progress.step % every == 0 and not self.finished:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one. Collective."""
        step = self.progress.step
        if self.progress.saved_step == step:
            return
        # The norm is the same on all ranks, and a state that is lost must not replace one that is sound.
        if self.loss_scale is None and not torch.isfinite(self.grad_norm):
            raise FloatingPointError(
                f"the gradient norm is {float(self.grad_norm)} at step {step}: not saved"
            )
        sync_buffers(self.model, self.ema)
        with self.watchdog.paused():
            self.keeper.save(self.progress, {axis: getattr(self.plan.layout, axis) for axis in AXES})
        self.meter.restart(self.feed.waited_s)

    def close(self) -> None:
        """End reporting and the watchdog after a regular end."""
        self._report(wait=True)
        if self.reporter is not None:
            self.reporter.close()
        self.watchdog.close()  # everything is saved: workers may take their time to end
        self.trace.close()
        self.feed.close()
