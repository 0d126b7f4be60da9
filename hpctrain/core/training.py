"""A training run of one rank, put together: what the loop calls, and the order in which it is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.config.schema import Config, ImageDataConfig, Precision, VisionConfig
from hpctrain.core import rng
from hpctrain.core.data_parallel import apply_data_parallel, settle_buckets, sync_buffers
from hpctrain.core.evaluate import evaluate
from hpctrain.core.feed import Feed
from hpctrain.core.flops import count_training_flops
from hpctrain.core.keeper import Keeper
from hpctrain.core.mesh import Mesh
from hpctrain.core.metrics import Deferred, Meter, Reporter
from hpctrain.core.optim import Ema, build_optimizer, learning_rate
from hpctrain.core.replicated import Replicated
from hpctrain.core.step import TrainStep
from hpctrain.core.stop import AgreedStop, SignalFlag
from hpctrain.core.sync_batchnorm import apply_sync_batchnorm
from hpctrain.core.watchdog import Watchdog
from hpctrain.data.loader import build_eval_loader, build_train_loader
from hpctrain.data.order import samples_after
from hpctrain.data.shards import ShardSet
from hpctrain.models.registry import resolve_spec
from hpctrain.models.spec import DataFacts, make_parameter_groups
from hpctrain.plan.hardware import find_hardware
from hpctrain.plan.plan import RunPlan
from hpctrain.run.causes import CauseKind
from hpctrain.run.directory import RunDirectory, write_json

PREEMPTION_TIMEOUT_S = 20.0  # how long a silent peer is waited for when grace may be short
EVAL_BATCH_SIZE = 64


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
        self.keeper = Keeper(config, run, attempt, mesh, self.model, self.optimizer, self.ema)
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
        self.train_shards = ShardSet(Path(config.data.root) / "train")
        facts = DataFacts(self.train_shards.num_identities, list(self.train_shards.behaviours))
        self.spec = resolve_spec(config.model.kind)
        rng.seed_weights(config.seed)
        self.model = self.spec.build(config.model, facts).to(mesh.device)
        if mesh.device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # what tensor cores want of convolutions
        if isinstance(config.model, VisionConfig) and config.model.sync_batchnorm:
            apply_sync_batchnorm(self.model)
        if mesh.rank == 0:
            write_json(
                self.run.data_facts,
                {
                    "num_identities": facts.num_identities,
                    "behaviours": facts.behaviours,
                    "identities": self.train_shards.meta.identities,
                },
            )
        if config.parallelism.compile:
            for name in self.spec.compiled_modules:
                self.model.get_submodule(name).compile()
        self.optimizer = build_optimizer(
            make_parameter_groups(self.model, config.optim.weight_decay), config.optim
        )
        self.ema = Ema(self.model, config.optim.ema_decay) if config.optim.ema_decay is not None else None

    def _build_feed(self) -> None:
        config, mesh = self.config, self.mesh
        on_gpu = mesh.device.type == "cuda"
        assert isinstance(config.data, ImageDataConfig)
        loader = build_train_loader(
            self.train_shards,
            image_size=self.image_size,
            data=config.data,
            seed=config.seed,
            global_batch_size=config.optim.global_batch_size,
            rank=mesh.rank,
            world=mesh.world_size,
            samples_consumed=self.progress.samples_consumed,
            num_epochs=config.optim.num_epochs,
            microbatch_size=self.plan.batch.microbatch_size,
            pin_memory=on_gpu,
        )
        self.steps_per_epoch = loader.steps_per_epoch
        self.num_steps = config.optim.num_epochs * self.steps_per_epoch
        self.feed = Feed(loader, mesh.device)
        replica: torch.nn.Module = self.model
        if mesh.world_size > 1:
            replica = apply_data_parallel(
                self.model,
                bucket_mib=config.parallelism.bucket_mib,
                compression=config.optim.gradient_compression,
            )
        self.parallel = Replicated(self.model, replica, config.optim, mesh.world_size, mesh.device)
        self.step = TrainStep(
            self.parallel,
            self.optimizer,
            ema=self.ema,
            optim=config.optim,
            steps_per_epoch=self.steps_per_epoch,
        )
        if mesh.world_size > 1 and not self.finished:
            settle_buckets(replica, self.parallel.loss, self.feed.peek()[0])  # type: ignore[arg-type]

    def _build_reporting(self) -> None:
        config, mesh = self.config, self.mesh
        self.reporter = None
        self.grad_norm = torch.zeros((), device=mesh.device)
        self.deferred = Deferred(mesh.device)
        hardware = find_hardware(config.cluster.hardware)
        peak = hardware.bf16_tflops if config.optim.precision is Precision.bf16 else hardware.fp32_tflops
        flops = None
        if peak is not None and not self.finished:
            flops = count_training_flops(self.model, self.feed.peek()[0])
        self.meter = Meter(
            flops_per_sample=flops, peak_flops=peak * 1e12 if peak else None, world_size=mesh.world_size
        )
        self.meter.restart(self.feed.waited_s)
        if mesh.rank == 0:
            self.reporter = Reporter(
                self.run.metrics, self.run.tensorboard, self.attempt, self.num_steps, self.progress.step
            )
            if self.progress.step:
                self.reporter.say(f"going on at step {self.progress.step} of {self.num_steps}")

    # What the loop calls

    @property
    def image_size(self) -> list[int]:
        assert isinstance(self.config.model, VisionConfig)
        return self.config.model.image_size

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.num_steps

    def advance(self, host_batches: list[Any], scalars: dict[str, torch.Tensor]) -> None:
        """Count the step and report it when due. Reading the numbers waits for nothing on a GPU."""
        step = self.progress.step
        self.grad_norm = scalars["grad_norm"]
        global_batch_size = self.config.optim.global_batch_size
        consumed = samples_after(step + 1, self.train_shards.num_samples, global_batch_size)
        samples = consumed - self.progress.samples_consumed
        self.progress.advance(host_batches, samples)
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
        folder = Path(self.config.data.root) / "val"
        if not (folder / "meta.json").exists():
            return True
        result = self._evaluate(folder)
        if result is None:
            return False
        self.progress.evaluated_step = step
        if self.reporter is not None:
            self._report(wait=True)
            self.reporter.evaluation({"step": step, "epoch": step // self.steps_per_epoch, **result})
        self.meter.restart(self.feed.waited_s)
        return True

    def _evaluate(self, folder: Path) -> dict[str, float] | None:
        sync_buffers(self.model, self.ema)
        assert isinstance(self.config.data, ImageDataConfig)
        batches = build_eval_loader(
            ShardSet(folder),
            image_size=self.image_size,
            batch_size=EVAL_BATCH_SIZE,
            rank=self.mesh.rank,
            world=self.mesh.world_size,
            num_workers=self.config.data.num_workers,
            scaled_decode=self.config.data.scaled_decode,
            pin_memory=self.mesh.device.type == "cuda",
        )
        if self.ema is not None:
            self.ema.swap()
        try:
            with self.parallel.autocast():
                return evaluate(self.model, batches, self.spec.evaluate, self.mesh, self.stop, self.watchdog)
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
        if not torch.isfinite(self.grad_norm):
            raise FloatingPointError(
                f"the gradient norm is {float(self.grad_norm)} at step {step}: not saved"
            )
        sync_buffers(self.model, self.ema)
        with self.watchdog.paused():
            self.keeper.save(self.progress, {"dp_replicate": self.plan.layout.dp_replicate})
        self.meter.restart(self.feed.waited_s)

    def close(self) -> None:
        """End reporting and the watchdog after a regular end."""
        self._report(wait=True)
        if self.reporter is not None:
            self.reporter.close()
        self.watchdog.close()  # everything is saved: workers may take their time to end
        self.feed.close()
