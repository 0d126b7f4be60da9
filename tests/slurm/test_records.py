import time

import pytest

from hpctrain.errors import ClusterError
from hpctrain.slurm.records import (
    parse_accounting,
    parse_duration_s,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_queue,
    parse_version,
)

# Recorded from Slurm 22.05.8; the user's texts are made up to mislead.
PREEMPTED_JOB = """\
JobId=10 JobName=my job=x JobState=FAILED
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=1 Nice=0 Account=root QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:05 TimeLimit=1-02:04:00 TimeMin=N/A
   SubmitTime=2026-11-30T11:03:24 EligibleTime=2026-11-30T11:03:24
   AccrueTime=2026-11-30T11:03:24
   StartTime=2026-11-30T11:03:24 EndTime=2026-11-30T11:03:47 Deadline=N/A
   PreemptEligibleTime=2026-11-30T11:03:24 PreemptTime=2026-11-30T11:03:27
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-30T11:03:24 Scheduler=Backfill
   Partition=train AllocNode:Sid=localhost:3086
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=node[0-3]
   BatchHost=node0
   NumNodes=4 NumCPUs=32 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=32,node=4,billing=32,gres/gpu=32,gres/gpu:rtx4090=32
   Command=/home/an/trap.sh JobState=FAILED
   WorkDir=/home/an/my runs
   Comment=a=b Partition=c
   Power=

"""
# Recorded likewise, shortened; an array of which two tasks wait and one has failed.
ARRAY = """\
JobId=2 ArrayJobId=2 ArrayTaskId=2-3%2 ArrayTaskThrottle=2 JobName=sweep
   JobState=PENDING Reason=JobArrayTaskLimit Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A
   StartTime=Unknown EndTime=Unknown Deadline=N/A
   Partition=train AllocNode:Sid=localhost:3086
   NodeList=

JobId=4 ArrayJobId=2 ArrayTaskId=1 ArrayTaskThrottle=2 JobName=sweep
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=1:9
   RunTime=00:00:02 TimeLimit=00:01:00 TimeMin=N/A
   StartTime=2026-11-30T10:58:29 EndTime=2026-11-30T10:58:31 Deadline=N/A
   PreemptEligibleTime=2026-11-30T10:58:29 PreemptTime=None
   Partition=train AllocNode:Sid=localhost:3086
   NodeList=node0
   BatchHost=node0
"""
# Written after the documentation of 24.11 and 25.05: new fields, split TRES, SubmitLine.
NEWER_JOB = """\
JobId=77 JobName=vision_city
   UserId=an(1000) GroupId=an(1000) MCS_label=N/A
   JobState=COMPLETING Reason=None Dependency=(null)
   Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:15
   RunTime=00:10:00 TimeLimit=1-00:00:00 TimeMin=N/A
   StartTime=2026-11-30T10:00:00 EndTime=2026-11-30T10:10:00 Deadline=N/A
   PreemptEligibleTime=2026-11-30T10:00:00 PreemptTime=None
   Partition=gpu AllocNode:Sid=login:1
   NodeList=gpu[01-02]
   BatchHost=gpu01
   ReqTRES=cpu=16,mem=64G,node=2,billing=16,gres/gpu=16
   AllocTRES=cpu=16,mem=64G,node=2,billing=16,gres/gpu=16,gres/gpu:rtx4090=16
   SubmitLine=sbatch --job-name=vision_city Restarts=9 submit.sbatch
   WorkDir=/home/an
   TresPerNode=gres/gpu:rtx4090:8
   TresPerTask=cpu=8
"""
NODES = """\
NodeName=node1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=5.32
   AvailableFeatures=(null)
   ActiveFeatures=(null)
   Gres=gpu:rtx4090:8
   NodeAddr=10.0.0.1 NodeHostName=h1 Port=28928 Version=22.05.8
   OS=Linux 6.1.0 #1 SMP PREEMPT_DYNAMIC State=odd
   RealMemory=5000 AllocMem=0 FreeMem=19714 Sockets=8 Boards=1
   State=IDLE+COMPLETING+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=train,urgent
   Reason=fan = broken, see ticket [root@2026-11-30T11:00:43]

NodeName=node2 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=8 CPUTot=16 CPULoad=N/A
   Gres=(null)
   NodeAddr=node2 NodeHostName=node2 Port=21291 Version=22.05.8
   RealMemory=5000 AllocMem=0 FreeMem=N/A Sockets=8 Boards=1
   State=DOWN* ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A

"""
PARTITIONS = """\
PartitionName=train
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=20 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=1-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=node[0-3]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=REQUEUE
   State=UP TotalCPUs=32 TotalNodes=4 SelectTypeParameters=NONE
   TRES=cpu=32,mem=20000M,node=4,billing=32,gres/gpu=32,gres/gpu:rtx4090=32

"""


def local_s(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def test_a_job_in_the_grace_of_a_preemption_shows_when_it_must_be_over() -> None:
    (job,) = parse_jobs(PREEMPTED_JOB)
    assert (job.job_id, job.raw_id, job.state, job.reason, job.restarts) == ("10", "10", "RUNNING", "", 2)
    assert (job.nodes, job.batch_host, job.partition) == ("node[0-3]", "node0", "train")
    assert job.time_limit_s == 93_840  # 26 h 4 min
    assert job.end_time_s == local_s("2026-11-30T11:03:47")
    assert job.preempt_time_s == local_s("2026-11-30T11:03:27")


def test_free_text_of_the_user_cannot_pass_for_a_field() -> None:
    (job,) = parse_jobs(PREEMPTED_JOB)
    assert (job.name, job.state, job.partition) == ("my job=x JobState=FAILED", "RUNNING", "train")
    assert job.work_dir == "/home/an/my runs"
    assert parse_jobs(NEWER_JOB)[0].restarts == 1


def test_elements_of_an_array_are_named_by_array_and_task() -> None:
    waiting, failed = parse_jobs(ARRAY)
    assert (waiting.job_id, failed.job_id, failed.raw_id) == ("2_[2-3%2]", "2_1", "4")
    assert (waiting.time_limit_s, waiting.start_time_s, waiting.nodes) == (None, None, "")
    assert (failed.exit_code, failed.signal, failed.can_requeue) == (1, 9, False)


@pytest.mark.parametrize(
    ("state", "restarts_now", "ended"),
    [
        ("RUNNING", 1, False),
        ("COMPLETING", 1, True),  # scancel, time limit
        ("COMPLETING", 2, False),  # Slurm requeues it and has counted that
        ("PENDING", 2, False),
        ("CANCELLED", 1, True),
    ],
)
def test_a_start_was_ended_unless_slurm_has_counted_a_restart(
    state: str, restarts_now: int, ended: bool
) -> None:
    text = NEWER_JOB.replace("COMPLETING", state).replace("Restarts=1", f"Restarts={restarts_now}")
    assert parse_jobs(text)[0].was_ended(restarts=1) is ended


def test_nodes_keep_their_flags_and_their_reason() -> None:
    drained, down = parse_nodes(NODES)
    assert (drained.name, drained.state, drained.num_cpus) == ("node1", "IDLE+COMPLETING+DRAIN", 8)
    assert (drained.address, drained.hostname, drained.gres) == ("10.0.0.1", "h1", "gpu:rtx4090:8")
    assert drained.reason == "fan = broken, see ticket [root@2026-11-30T11:00:43]"
    assert (down.state, down.gres, down.reason, down.memory_mib) == ("DOWN*", "", "", 5000)


def test_partitions_tell_grace_and_limits() -> None:
    (train,) = parse_partitions(PARTITIONS)
    assert (train.name, train.is_default, train.num_nodes, train.state) == ("train", True, 4, "UP")
    assert (train.max_time_s, train.default_time_s) == (86_400, None)
    assert (train.grace_time_s, train.preempt_mode) == (20, "REQUEUE")


def test_a_job_name_with_the_separator_stays_whole_in_the_queue() -> None:
    text = "2_1|RUNNING|train|node0|None|2026-11-30T10:58:29|an|a|b\n9|PENDING|train||Priority|N/A|an|x\n"
    first, second = parse_queue(text)
    assert (first.job_id, first.name, first.nodes) == ("2_1", "a|b", "node0")
    assert (second.state, second.start_time_s, second.reason) == ("PENDING", None, "Priority")


def test_accounting_lists_each_start_and_drops_who_cancelled() -> None:
    text = (
        "6|PREEMPTED|0:0|node[0-3]|2026-11-30T10:58:29|2026-11-30T10:59:29|60\n"
        "6|CANCELLED by 1000|0:15|None assigned|Unknown|Unknown|0\n"
    )
    first, second = parse_accounting(text)
    assert (first.state, first.elapsed_s, first.end_time_s) == (
        "PREEMPTED",
        60,
        local_s("2026-11-30T10:59:29"),
    )
    assert (second.state, second.signal, second.nodes, second.start_time_s) == ("CANCELLED", 15, "", None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:30", 30),
        ("02:03", 123),
        ("1-02:03:04", 93_784),
        ("UNLIMITED", None),
        ("NONE", None),
        ("Partition_Limit", None),
    ],
)
def test_durations_are_read_in_every_form(text: str, seconds: int | None) -> None:
    assert parse_duration_s(text) == seconds


def test_versions_are_read_with_and_without_the_distribution_name() -> None:
    assert parse_version("slurm-wlm 22.05.8\n") == (22, 5)
    assert parse_version("slurm 25.11.0-0rc1") == (25, 11)
    with pytest.raises(ClusterError):
        parse_version("command not found")
