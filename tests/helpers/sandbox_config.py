"""What a sandbox cluster needs of the machine, and the files it is configured with."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

NUM_NODES = 4
CPUS_PER_NODE = 8
GPUS_PER_NODE = 8

PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
_PROGRAMS = ["munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacctmgr"]

_SLURM_CONF = """\
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire=10
StateSaveLocation={folder}/spool/ctld
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=30
BatchStartTimeout=60
MinJobAge=300
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting_port}
AccountingStoragePass={folder}/run/munge.socket
AccountingStorageTRES=gres/gpu,gres/gpu:rtx4090
PriorityType=priority/multifactor
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=10
SchedulerParameters=bf_interval=1,sched_min_interval=200000,batch_sched_delay=0
GresTypes=gpu
{nodes}
PartitionName=train  Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1  PreemptMode=REQUEUE GraceTime=20
PartitionName=urgent Nodes=ALL             MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire=10
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={accounting_port}
SlurmUser={user}
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""

_ACCOUNTS_SQL = """\
CREATE DATABASE slurm;
CREATE USER slurm@127.0.0.1 IDENTIFIED BY '{password}';
GRANT ALL ON slurm.* TO slurm@127.0.0.1;
"""


def missing_programs() -> list[str]:
    """Programs of Slurm, munge and MariaDB that are not on this machine."""
    return [name for name in _PROGRAMS if shutil.which(name, path=PATH) is None]


def slurm_files(folder: Path, ports: list[int], password: str, user: str) -> dict[str, str]:
    """File name under `etc/` to text.

    Args:
        ports: Of the controller, the database, the accounting daemon, then of each node.
    """
    host = socket.gethostname().partition(".")[0]
    nodes = "\n".join(
        f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} "
        f"RealMemory=5000 Gres=gpu:rtx4090:{GPUS_PER_NODE} State=UNKNOWN"
        for i, port in enumerate(ports[3:])
    )
    values = {
        "folder": folder,
        "host": host,
        "user": user,
        "password": password,
        "nodes": nodes,
        "controller_port": ports[0],
        "database_port": ports[1],
        "accounting_port": ports[2],
    }
    files = {
        "slurm.conf": _SLURM_CONF.format_map(values),
        "slurmdbd.conf": _SLURMDBD_CONF.format_map(values),
        "accounts.sql": _ACCOUNTS_SQL.format_map(values),
        # A gres without File= is refused; any character device stands for a GPU.
        "gres.conf": f"NodeName=node[0-{NUM_NODES - 1}] Name=gpu Type=rtx4090 "
        f"File=/dev/tty[0-{GPUS_PER_NODE - 1}]\n",
    }
    if _version() >= (23, 11):  # older ones know no such plugin, and do not look for cgroups unasked
        files["cgroup.conf"] = "CgroupPlugin=disabled\n"
    return files


def _version() -> tuple[int, int]:
    env = {**os.environ, "PATH": PATH}
    text = subprocess.run(["slurmd", "-V"], env=env, capture_output=True, text=True, check=True).stdout
    year, month = text.split()[-1].split(".")[:2]
    return int(year), int(month)
