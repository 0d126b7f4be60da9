"""One rank: joins the others, trains, and leaves word why it ended. A door into torch."""

from __future__ import annotations

import ctypes
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from hpctrain.core.stop import PeerLostError, SignalFlag
from hpctrain.run.causes import CauseKind, leave_cause
from hpctrain.run.directory import RunDirectory

PR_SET_PDEATHSIG = 1  # prctl(2)

# What Gloo and NCCL say when a peer's process has ended.
_PEER_WORDS = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out|connection refused|remote process exited|went away"
    r"|NCCL error|ncclRemoteError|recvBytes|sendBytes",
    re.IGNORECASE,
)


def classify_error(error: BaseException) -> CauseKind:
    """Whether an exception is this rank's own fault, its memory's, or a lost peer's."""
    kinds = {base.__name__ for base in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"}:
        return CauseKind.out_of_memory
    if isinstance(error, PeerLostError) or "DistError" in kinds:
        return CauseKind.peer_lost
    if isinstance(error, RuntimeError | ConnectionError) or "CheckpointError" in kinds:
        return CauseKind.peer_lost if _PEER_WORDS.search(str(error)) else CauseKind.crash
    return CauseKind.crash


class Tee(io.TextIOBase):
    """A terminal whose output also goes into a log: rank 0 of a local run shares the user's terminal."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal, self._log = terminal, log

    def write(self, text: str) -> int:
        with suppress(OSError):  # a terminal that was closed must not keep the run from saving
            self._terminal.write(text)
        return self._log.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._terminal.flush()
        self._log.flush()

    def isatty(self) -> bool:
        return self._terminal.isatty()

    def fileno(self) -> int:
        return self._terminal.fileno()


class Rank:
    """The life of a rank, as far as its cause file goes."""

    def __init__(self, run: RunDirectory, attempt: str, rank: int) -> None:
        self.run, self.attempt, self.rank = run, attempt, rank
        self.training: object | None = None
        self.hint: Callable[[BaseException], str] = lambda error: ""  #: what an error's message should add

    def leave(self, kind: CauseKind, message: str, error: BaseException | None = None) -> None:
        progress = getattr(self.training, "progress", None)
        leave_cause(
            self.run.causes,
            self.attempt,
            self.rank,
            kind,
            message=message,
            step=progress.step if progress else None,
            saved_step=progress.saved_step if progress else None,
            error=error,
        )

    def leave_error(self, error: BaseException) -> None:
        message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"[:2000]
        self.leave(classify_error(error), message + self.hint(error), error)

    def work(self, flag: SignalFlag) -> None:
        """Build the training and run it."""
        import torch

        from hpctrain.config.load import load_config
        from hpctrain.config.schema import Device
        from hpctrain.core.calibrate import calibrate
        from hpctrain.core.mesh import build_mesh, device_index
        from hpctrain.core.profile import MemoryHistory
        from hpctrain.core.train import train
        from hpctrain.core.training import Training
        from hpctrain.launch.binding import bind_to_gpu
        from hpctrain.launch.environment import rank_facts
        from hpctrain.plan.placement import gpu_number
        from hpctrain.plan.plan import RunPlan
        from hpctrain.selftest.job import selftest

        facts = rank_facts()
        config = load_config(self.run.config)
        plan = RunPlan.from_json(self.run.plan.read_text())
        if facts.world_size != plan.world_size:
            raise RuntimeError(f"{facts.world_size} ranks were started, the plan has {plan.world_size}")
        torch.set_num_threads(config.cluster.cpus_per_rank)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        if config.selftest:
            torch.set_default_dtype(torch.float64)  # tells a lost term from rounding
        gpu = gpu_number(config.cluster, facts.local_rank)
        if config.cluster.device is Device.cuda:
            bind_to_gpu(device_index(gpu, torch.cuda.device_count()))
        where, timeout_s = (facts.master_addr, facts.master_port), config.hang_timeout_s + 60
        mesh = build_mesh(facts.rank, gpu, facts.world_size, config.cluster.device, *where, timeout_s)
        if config.calibrate:
            self.leave(calibrate(config, self.run, self.attempt, mesh, flag), "")
            torch.distributed.destroy_process_group()
            return
        snapshot = self.run.profile / f"{self.attempt}_{facts.rank}.pickle"
        self.hint = MemoryHistory(snapshot, mesh.device, is_wanted=config.profile.memory).write_if_full
        training = Training(config, plan, self.run, self.attempt, mesh, flag, self.leave)
        self.training = training
        kind = selftest(training) if config.selftest else train(training)
        self.leave(kind, "")
        training.close()
        torch.distributed.destroy_process_group()


def main() -> NoReturn:
    """`python -m hpctrain.launch.rank RUN ATTEMPT`, started by the supervisor."""
    from hpctrain.launch.environment import rank_facts
    from hpctrain.launch.network import interface_towards

    flag = SignalFlag()
    flag.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    facts = rank_facts()
    if facts.is_child:
        # Without Slurm nobody else would end the ranks of a supervisor that was killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(facts.master_addr)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": eth1 is not eth10
    rank = Rank(RunDirectory(Path(sys.argv[1])), sys.argv[2], facts.rank)
    if facts.is_child and facts.rank == 0:
        log = (rank.run.logs / f"{rank.attempt}_0.log").open("a", buffering=1)
        sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
    try:
        rank.work(flag)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        code = 1
        with suppress(OSError):  # a full disk must not keep this rank alive
            rank.leave_error(error)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # a lost peer would block the orderly way out, and grace is short


if __name__ == "__main__":
    main()
