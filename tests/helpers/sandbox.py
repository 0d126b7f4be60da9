"""A real Slurm cluster on one machine: 4 nodes with 8 pretended RTX 4090 each, two partitions.

Everything lives under one private folder on ports of its own (munge, MariaDB, slurmdbd, slurmctld, four
slurmd), so it does not meet another Slurm on the machine. Processes are known by an environment variable
that names the folder: what a sandbox that died has left is found, and ended, by the next start.

    python -m tests.helpers.sandbox start|stop|env|status DIR
"""

from __future__ import annotations

import atexit
import getpass
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self, TypeVar

from tests.helpers.polling import wait_until
from tests.helpers.processes import find_processes, free_ports, has_open, is_listening, kill, start_time
from tests.helpers.sandbox_config import NUM_NODES, PATH, missing_programs, slurm_files

T = TypeVar("T")
MARK = "HPCTRAIN_SANDBOX"  #: variable of the daemons; it names the folder
_OWNER = "owner"  # file: the process whose end is the sandbox's end; empty for a person's sandbox
_PREFIX = f"hpctrain-sandbox-{os.getuid()}-"


class Sandbox:
    """The cluster. `with Sandbox() as sandbox:` starts it and leaves nothing behind.

    Args:
        folder: Where it lives and stays alive after this process (a person's sandbox). None makes a
            temporary one that ends with this process, or else with the next start of such a sandbox.
        edit: changes the text of slurm.conf, to set the cluster up in another way.
    """

    def __init__(self, folder: Path | None = None, edit: Callable[[str], str] = str) -> None:
        self.is_temporary = folder is None
        folder = folder or Path(tempfile.gettempdir()) / f"{_PREFIX}{secrets.token_hex(4)}"
        self.folder = folder.resolve()
        self.conf = self.folder / "etc/slurm.conf"
        self.edit, self.owner = edit, os.getpid()
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, with any allocation it runs in taken out, pointed at the sandbox."""
        foreign = ("SLURM", "SBATCH_", "SRUN_", "SQUEUE_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return kept | {"SLURM_CONF": str(self.conf)}

    @property
    def is_up(self) -> bool:
        """Whether the controller answers."""
        return self.conf.exists() and self.run("scontrol", "ping", check=False).returncode == 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the cluster (about 6 s) after ending what an earlier one left in the folder.

        Raises:
            FileNotFoundError: programs are missing.
            FileExistsError: the folder holds something that is not a sandbox.
            RuntimeError: a daemon ended; the message has the end of its log.
        """
        if missing := missing_programs():
            raise FileNotFoundError(f"not installed: {', '.join(missing)} (packages: docs/install.md)")
        if len(str(self.folder)) > 80:  # sockets: sun_path holds 108 bytes
            raise ValueError(f"the path of a sandbox must be short, and {self.folder} is not")
        stop_dead_sandboxes()
        self.stop()
        try:
            self._start_daemons()
        except BaseException:
            self.stop()
            raise

    def _start_daemons(self) -> None:
        self._make_folder()
        ports, password, user = free_ports(NUM_NODES + 3), secrets.token_hex(16), getpass.getuser()
        files = slurm_files(self.folder, ports, password, user)
        files |= {"munge.key": secrets.token_hex(64), "slurm.conf": self.edit(files["slurm.conf"])}
        for name, text in files.items():
            path = self.folder / "etc" / name
            path.touch(0o644 if name.startswith(("slurm.", "gres", "cgroup")) else 0o600)
            path.write_text(text)
        self._start_munge()
        if "accounting_storage/slurmdbd" in files["slurm.conf"]:
            self._start_accounting(ports, user)
        self._daemon("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        self._wait_for_port("slurmctld", ports[0])
        for node in range(NUM_NODES):
            self.start_node(node)
        self._wait("every node is idle", lambda: self._idle_nodes() == NUM_NODES)

    def _start_accounting(self, ports: list[int], user: str) -> None:
        self._start_database(ports[1])
        self._daemon("slurmdbd", "slurmdbd", "-D")
        self._wait_for_port("slurmdbd", ports[2])
        for words in ("cluster sandbox", "account sandbox", f"user {user} account=sandbox"):
            self.run("sacctmgr", "-i", "-Q", "add", *words.split())

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munge wants its socket reachable
        owner = f"{self.owner} {start_time(self.owner)}" if self.is_temporary else ""
        (self.folder / _OWNER).write_text(owner)
        if self.is_temporary:
            atexit.register(self._stop_if_owner)
        for name in ("etc", "log", "run", "db", "spool/ctld"):
            (self.folder / name).mkdir(parents=True)

    def _start_munge(self) -> None:
        files = {"key-file": "etc/munge.key", "seed-file": "etc/munge.seed", "log-file": "log/munged.log"}
        files |= {"pid-file": "run/munged.pid", "socket": "run/munge.socket"}
        options = [f"--{name}={self.folder}/{path}" for name, path in files.items()]
        self._daemon("munged", "munged", "-F", "--force", *options)

    def _start_database(self, port: int) -> None:
        home = ["--no-defaults", f"--datadir={self.folder}/db", "--innodb-log-file-size=8M"]
        home += ["--user=root"] if os.getuid() == 0 else []
        offline = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
        self.run("mariadb-install-db", *home, *offline)
        files = [f"--{kind}={self.folder}/run/mariadb.{kind}" for kind in ("socket", "pid-file")]
        network = ["--bind-address=127.0.0.1", f"--port={port}", "--skip-name-resolve"]
        speed = ["--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0", "--performance-schema=0"]
        script = f"--init-file={self.folder}/etc/accounts.sql"
        self._daemon("mariadbd", "mariadbd", *home, *files, *network, *speed, script)
        self._wait_for_port("mariadbd", port)

    def _daemon(self, name: str, *argv: str) -> None:
        with open(self.folder / f"log/{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                argv,
                env=self.env | {"PATH": PATH, MARK: str(self.folder)},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_for_port(self, name: str, port: int) -> None:
        self._wait(f"{name} listens", lambda: is_listening(port))

    def _wait(self, what: str, predicate: Callable[[], bool]) -> None:
        """Waits for `predicate`, or for a daemon to die."""

        def ended() -> str | None:
            return next((name for name, daemon in self.daemons.items() if daemon.poll() is not None), None)

        wait_until(lambda: ended() or predicate(), 60, f"{what} (logs in {self.folder}/log)")
        if name := ended():
            raise RuntimeError(f"sandbox: {name} ended while starting:\n{self.log(name)}")

    def _idle_nodes(self) -> int:
        states = self.run("sinfo", "-h", "-N", "-p", "train", "-o", "%T", check=False).stdout.split()
        return states.count("idle")

    def log(self, name: str, num_lines: int = 30) -> str:
        """The last lines that the daemon `name` (a key of `daemons`) has written."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob(f"log/{name}.*"))]
        return "\n".join("".join(texts).splitlines()[-num_lines:])

    def stop(self) -> None:
        """Ends every process of the cluster and its jobs at once, and removes the folder."""
        if self.folder.exists() and not (self.folder / _OWNER).exists() and any(self.folder.iterdir()):
            raise FileExistsError(f"{self.folder} holds something that is not a sandbox")
        wait_until(lambda: not kill(self._processes()), 20, f"the processes of {self.folder} are gone")
        for daemon in self.daemons.values():
            daemon.wait()
        self.daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self._stop_if_owner)

    def _processes(self) -> set[int]:
        """The daemons, their steps, the jobs, and what these started."""
        return find_processes(lambda env: env.get(MARK) == str(self.folder) or self._is_job(env))

    def _is_job(self, env: dict[str, str]) -> bool:
        return env.get("SLURM_CONF") == str(self.conf) and "SLURM_JOB_ID" in env

    def kill_node(self, node: int) -> None:
        """The power goes off at one node: its slurmd and all that ran there are killed."""
        on_node = {"SLURM_CONF": str(self.conf), "SLURMD_NODENAME": f"node{node}"}

        def alive() -> set[int]:
            # The daemons first, so that none is left to report that a task has ended.
            daemons = find_processes(lambda env: env.get(MARK) == str(self.folder))
            writers = {pid for pid in daemons if has_open(pid, self.folder / f"log/slurmd-node{node}.log")}
            return kill(writers) | kill(find_processes(lambda env: on_node.items() <= env.items()))

        wait_until(lambda: not alive(), 20, f"what ran on node{node} is gone")
        self.daemons[f"slurmd-node{node}"].wait()

    def start_node(self, node: int) -> None:
        """The power comes back: the node's slurmd starts and registers."""
        self._daemon(f"slurmd-node{node}", "slurmd", "-D", "-N", f"node{node}", "-f", str(self.conf))

    def _stop_if_owner(self) -> None:
        if os.getpid() == self.owner:
            self.stop()

    def run(self, *argv: str, check: bool = True, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command against this cluster. A failure (with `check`) says what was printed."""
        env = self.env | {"PATH": PATH}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def sbatch(self, *argv: str) -> str:
        """Submits; returns the job id."""
        return self.run("sbatch", "--parsable", *argv).stdout.strip().split(";")[0]

    def job_state(self, job_id: str) -> str:
        """State of a job (PENDING, RUNNING, …) for the controller; "" when it has forgotten the job."""
        return self._job_field(job_id, "JobState")

    def _job_field(self, job_id: str, name: str) -> str:
        text = self.run("scontrol", "show", "job", "-o", job_id, check=False).stdout
        return text.partition(f" {name}=")[2].partition(" ")[0]

    def wait_for(self, predicate: Callable[[], T], timeout_s: float = 60, what: str = "") -> T:
        """`wait_until`, with the queue in the message of a failure."""
        try:
            return wait_until(predicate, timeout_s, what or "the cluster came to the wanted state", 0.1)
        except TimeoutError as error:
            error.add_note(self.run("squeue", "-o", "%i %T %r %N", check=False).stdout)
            raise

    def speed_up_requeue(self, job_id: str) -> None:
        """Makes a requeued job due in 2 s and waits for that; Slurm would take a credential's lifetime.

        In the second of its end it must not start: its new credential would count as revoked with the old.
        """

        def is_due() -> bool:
            if (state := self.job_state(job_id)) != "PENDING":
                return state != "COMPLETING"
            due, now = datetime.fromisoformat(self._job_field(job_id, "EligibleTime")), datetime.now()
            if due > now + timedelta(seconds=2):
                self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")
            return due <= now

        self.wait_for(is_due, 30, f"job {job_id} is due")

    def cancel_all(self) -> None:
        """Ends every job at once, takes nodes back into service, and waits until all are idle."""
        self.run("scancel", "--user", getpass.getuser())
        kill(find_processes(self._is_job))  # instead of waiting for KillWait
        self.run("scontrol", "update", f"NodeName=node[0-{NUM_NODES - 1}]", "State=RESUME", check=False)
        self.wait_for(lambda: self._idle_nodes() == NUM_NODES, 60, "every node is idle again")


def stop_dead_sandboxes() -> None:
    """Ends temporary sandboxes whose owning process is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        pid, _, started = path.read_text().partition(" ")
        if path.stat().st_uid == os.getuid() and pid and start_time(int(pid)) != started:
            Sandbox(path.parent).stop()


def main(argv: list[str]) -> int:
    """`start|stop|env|status DIR`."""
    if len(argv) != 2 or argv[0] not in ("start", "stop", "env", "status"):
        print("usage: python -m tests.helpers.sandbox start|stop|env|status DIR", file=sys.stderr)
        return 2
    verb, sandbox = argv[0], Sandbox(Path(argv[1]))
    try:
        if verb == "stop":
            sandbox.stop()
        elif verb == "start" and not sandbox.is_up:
            sandbox.start()
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if verb == "status":
        print(sandbox.run("sinfo").stdout if (is_up := sandbox.is_up) else f"none runs in {sandbox.folder}")
        return 0 if is_up else 1
    if verb != "stop":
        print(f"export SLURM_CONF={sandbox.conf}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
