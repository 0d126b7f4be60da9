"""Texts of scontrol and sacctmgr of three sites, written by their documented format, as `Site`s.

`lab`: eight 4090 a node, Slurm 24.05, preemption by partition. `centre`: QOS preempt, GPUs without a type,
memory is counted and billed, 23.02. `small`: no accounting, nobody is preempted, 25.11.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpctrain.slurm.records import parse_nodes, parse_partitions, parse_records
from hpctrain.slurm.site import Site, parse_associations, parse_qos, parse_settings

LAB_CONFIG = """\
Configuration data as of 2026-09-01T10:00:00
AccountingStorageEnforce = associations,limits,qos
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,gres/gpu,gres/gpu:nvidia_geforce_rtx_4090
AccountingStorageType   = accounting_storage/slurmdbd
AuthInfo                = (null)
ClusterName             = lab
EnforcePartLimits       = ALL
JobRequeue              = 1
KillWait                = 30 sec
MaxArraySize            = 1001
MaxBatchRequeue         = 5
MinJobAge               = 300 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PreemptParameters       = (null)
PriorityDecayHalfLife   = 7-00:00:00
PriorityFlags           =
PriorityType            = priority/multifactor
PriorityWeightFairShare = 10000
RequeueExit             = (null)
RequeueExitHold         = (null)
SchedulerParameters     = bf_continue
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldParameters     = (null)
SlurmdTimeout           = 300 sec

Slurmctld(primary) at head is UP
"""
LAB_PARTITIONS = """\
PartitionName=gpu
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   DefaultTime=04:00:00 DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=120 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED
   Nodes=gpu[01-04]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=REQUEUE
   State=UP TotalCPUs=256 TotalNodes=4 SelectTypeParameters=NONE
   JobDefaults=(null)
   DefMemPerCPU=4000 MaxMemPerNode=UNLIMITED
   TRES=cpu=256,mem=2000G,node=4,billing=256,gres/gpu=32,gres/gpu:nvidia_geforce_rtx_4090=32
   TRESBillingWeights=CPU=1.0,Mem=0.25G,GRES/gpu=8.0

PartitionName=day
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=NO QoS=N/A
   DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=12:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED
   Nodes=gpu[01-04]
   PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=OFF
   State=UP TotalCPUs=256 TotalNodes=4 SelectTypeParameters=NONE
   TRES=cpu=256,mem=2000G,node=4,billing=256,gres/gpu=32
"""
_NODE = """\
NodeName={name} Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=64 CPUTot={cpus} CPULoad=0.10
   AvailableFeatures=avx2,ib
   ActiveFeatures=avx2,ib
   Gres={gres}
   NodeAddr={name} NodeHostName={name} Version=24.05.2
   OS=Linux 5.14.0 #1 SMP PREEMPT_DYNAMIC Mon Jan 1 00:00:00 UTC 2026
   RealMemory=512000 AllocMem=0 FreeMem=500000 Sockets=2 Boards=1
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions={partitions}
   BootTime=2026-08-01T00:00:00 SlurmdStartTime=2026-08-01T00:00:00
   Reason={reason}
"""
LAB_QOS = """\
Name|Priority|GraceTime|Preempt|PreemptExemptTime|PreemptMode|Flags|MaxWall|MaxTRESPU|MaxJobsPU|MaxSubmitPU
normal|0|00:00:00|||cluster|||||200
"""
LAB_ASSOC = """\
Cluster|Account|User|Partition|Share|MaxJobs|MaxSubmit|MaxWall|QOS|Def QOS
lab|vision||||||||normal|
lab|vision|an||1||||normal|normal
lab|speech|binh||1||||normal|
"""
CENTRE_QOS = """\
Name|Priority|GraceTime|Preempt|PreemptMode|Flags|MaxWall|MaxTRESPU|MaxSubmitPU
normal|10|00:00:00|scavenge|cluster||1-00:00:00|gres/gpu=64|50
scavenge|0|00:02:00||requeue||||
"""
CENTRE_ASSOC = """\
Cluster|Account|User|Partition|Share|MaxJobs|MaxSubmit|MaxWall|QOS|Def QOS
centre|a1|an||1||||normal,scavenge|normal
centre|a2|an||1||||normal|normal
"""


def node_text(
    name: str,
    gres: str = "gpu:nvidia_geforce_rtx_4090:8(S:0-1)",
    state: str = "IDLE",
    reason: str = "(null)",
    cpus: int = 64,
    partitions: str = "gpu,day",
) -> str:
    return _NODE.format(name=name, gres=gres, state=state, reason=reason, cpus=cpus, partitions=partitions)


def make_site(
    config: str = LAB_CONFIG,
    partitions: str = LAB_PARTITIONS,
    nodes: str | None = None,
    qos: str | None = LAB_QOS,
    associations: str = LAB_ASSOC,
    version: tuple[int, int] = (24, 5),
    **settings: str,
) -> Site:
    """The lab, with other texts or other settings."""
    node_texts = nodes or "\n".join(node_text(f"gpu0{n}") for n in (1, 2, 3, 4))
    return Site(
        user="an",
        version=version,
        settings={**parse_settings(config), **settings},
        partitions={each.name: each for each in parse_partitions(partitions)},
        fields={each["PartitionName"]: each for each in parse_records(partitions)},
        nodes=tuple(parse_nodes(node_texts)),
        qos=None if qos is None else parse_qos(qos),
        associations=None if qos is None else tuple(parse_associations(associations, "an")),
    )


def lab(**settings: str) -> Site:
    return make_site(**settings)


def centre(**changes: Any) -> Site:
    """Preemption by QOS, GPUs without types."""
    config = LAB_CONFIG.replace("preempt/partition_prio", "preempt/qos")
    nodes = "\n".join(node_text(f"n{n}", gres="gpu:8", partitions="gpu,day") for n in range(4))
    site = make_site(config, nodes=nodes, qos=CENTRE_QOS, associations=CENTRE_ASSOC, version=(23, 2))
    return replace(site, **changes)


def small() -> Site:
    """No accounting, no preemption, every setting as Slurm has it by default."""
    config = LAB_CONFIG.replace("accounting_storage/slurmdbd", "(null)").replace(
        "preempt/partition_prio", "preempt/none"
    )
    config = config.replace("associations,limits,qos", "none").replace("multifactor", "basic")
    return make_site(config.replace("= REQUEUE", "= OFF"), qos=None, version=(25, 11))
