"""The config as dataclasses: one per group, a line of doc per field, units in the names.

The classes are mutable because OmegaConf needs that; what is decided from them, `RunPlan`, is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

# Member names are what users type, so they are lower case (OmegaConf matches enums by name).


class ClusterKind(Enum):
    """Where the ranks run."""

    local = "local"
    slurm = "slurm"


class Device(Enum):
    """What a rank computes on."""

    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """Number format of the forward and backward pass; parameters and reductions stay fp32."""

    fp32 = "fp32"
    bf16 = "bf16"


class GradientCompression(Enum):
    """Number format in which gradients cross the network."""

    none = "none"
    bf16 = "bf16"


class Margin(Enum):
    """Margin softmax: ArcFace adds the margin to the angle, CosFace subtracts it from the cosine."""

    arcface = "arcface"
    cosface = "cosface"


class OptimizerKind(Enum):
    """Update rule."""

    adamw = "adamw"
    sgd = "sgd"


class GpuRequest(Enum):
    """How GPUs are asked for: Slurm accepts one way per job, and sites differ in which they honour."""

    gres = "gres"
    gpus_per_node = "gpus_per_node"
    none = "none"


@dataclass(kw_only=True)
class ModelConfig:
    """What is trained. Each kind of model has a subclass; `kind` names it in the registry."""

    kind: str = "vision"


@dataclass(kw_only=True)
class VisionConfig(ModelConfig):
    """A timm backbone with an identity head (margin softmax) and a behaviour head (multi-label)."""

    kind: str = "vision"
    backbone: str = "convnext_base"  #: any timm model name
    pretrained: str | None = None  #: path of a .safetensors file with backbone weights; null starts at random
    embedding_dim: int = 512  #: size of the face embedding
    image_size: list[int] = field(default_factory=lambda: [224, 224])  #: input height and width, pixels
    margin: Margin = Margin.arcface  #: kind of margin softmax
    margin_rad: float = 0.5  #: margin m: radians for arcface, cosine units for cosface
    margin_scale: float = 64.0  #: scale s of the logits
    identity_weight: float = 1.0  #: weight of the identity loss
    behaviour_weight: float = 1.0  #: weight of the behaviour loss
    drop_rate: float = 0.0  #: dropout before the heads
    drop_path_rate: float = 0.0  #: stochastic depth of the backbone, where it has any
    sync_batchnorm: bool = False  #: BatchNorm statistics over all data-parallel ranks


@dataclass(kw_only=True)
class ParallelismConfig:
    """How the ranks share the work. At most one degree may be -1: it is filled in and printed."""

    pp: int = 1  #: pipeline stages
    dp_replicate: int = -1  #: data-parallel replicas
    dp_shard: int = 1  #: ranks that share one replica's parameters (FSDP)
    tp: int = 1  #: ranks that share each matrix
    microbatch_size: int | None = (
        None  #: samples per data-parallel rank per forward; null takes the whole share
    )
    compile: bool = False  #: torch.compile the backbone
    bucket_mib: int = 25  #: size of a gradient bucket, MiB


@dataclass(kw_only=True)
class ClusterConfig:
    """Where and under which conditions the run is started."""

    kind: ClusterKind = ClusterKind.local
    device: Device = Device.cpu
    hardware: str = "cpu"  #: entry of the hardware catalogue (plan/hardware.py): peak FLOP/s, memory
    num_nodes: int = 1
    ranks_per_node: int = 2  #: one rank per GPU
    cpus_per_rank: int = 1  #: cores per rank: the training loop and its loader workers
    mem_gib: int | None = None  #: host memory per node; null leaves it to the site
    time_limit_min: int | None = None  #: walltime of one start; null leaves it to the partition
    signal_lead_s: int = 120  #: how long before the time limit Slurm warns the ranks
    gpu_request: GpuRequest = GpuRequest.none
    gpu_type: str | None = (
        None  #: the type's name at this site (rtx4090, nvidia_geforce_rtx_4090), null for none
    )
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    comment: str | None = None
    exclusive: bool = False  #: ask for whole nodes
    array_parallelism: int | None = None  #: points of a sweep that run at once; null for all
    extra_sbatch: dict[str, str] = field(default_factory=dict)  #: further sbatch options, name to value
    extra_srun: list[str] = field(default_factory=list)  #: further srun arguments
    setup: list[str] = field(default_factory=list)  #: shell lines before anything else (module load …)
    python: str | None = None  #: interpreter on the nodes; null takes the submitting one
    network_interface: str | None = None  #: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; null lets them choose
    env: dict[str, str] = field(default_factory=dict)  #: environment of the ranks


@dataclass(kw_only=True)
class DataConfig:
    """Where samples come from and how they are read."""

    root: str = "???"  #: folder of packed shards with train/ and val/
    synthetic_identities: int = 0  #: if positive and `root` is missing, draw this many faces into it
    num_workers: int = 2  #: loader processes per rank
    prefetch: int = 4  #: batches each worker prepares ahead
    block_samples: int = 256  #: neighbouring samples that are read together
    window_blocks: int = 16  #: blocks that are mixed with each other
    random_crop_min_scale: float = 0.8  #: smallest area share of the random crop; 1 takes the whole image
    flip: bool = True  #: mirror half of the images
    color_jitter: float = 0.1  #: strength of brightness and contrast changes
    scaled_decode: bool = False  #: let the JPEG decoder skip detail that the resize would drop


@dataclass(kw_only=True)
class OptimConfig:
    """Optimisation: what decides the result, whatever the cluster."""

    kind: OptimizerKind = OptimizerKind.adamw
    lr: float = 1e-3
    weight_decay: float = 0.05
    momentum: float = 0.9  #: sgd only
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  #: adamw only
    global_batch_size: int = 64  #: samples per step over all ranks
    num_epochs: int = 10
    warmup_epochs: float = 1.0  #: linear warm-up, then cosine
    final_lr_ratio: float = 0.0  #: learning rate at the end, as a share of `lr`
    clip_norm: float | None = None  #: largest global gradient norm; null for no clipping
    ema_decay: float | None = None  #: decay of the averaged weights; null for none
    precision: Precision = Precision.fp32
    gradient_compression: GradientCompression = GradientCompression.none


@dataclass(kw_only=True)
class CheckpointConfig:
    """When the run is saved and what is kept."""

    every_steps: int = 500  #: steps between saves; 0 saves only at the end and when stopped
    keep_last: int = 2  #: newest checkpoints to keep
    keep_every_steps: int = 0  #: keep these for good as well (multiples of it); 0 for none
    timeout_s: float = 600.0  #: how long ranks wait for each other in a save or load


@dataclass(kw_only=True)
class BudgetConfig:
    """How often a run may be started again, by cause. Progress refills all of them."""

    crash: int = 2  #: a rank died or raised: relaunch in the allocation
    node_failure: int = 3  #: a node was lost: requeue
    hang: int = 2  #: ranks stopped moving
    preemption: int = 1000  #: requeues after a preemption
    time_limit: int = 1000  #: requeues after the time limit
    no_progress: int = 3  #: starts in a row that end at the step they began at


@dataclass(kw_only=True)
class Config:
    """A whole run."""

    name: str | None = None  #: folder of the run; null takes the experiment and what was swept
    run_root: str = "runs"  #: where run folders live
    seed: int = 0
    model: ModelConfig = field(default_factory=VisionConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    log_every_steps: int = 10
    eval_every_epochs: int = 1  #: 0 evaluates only at the end
    deterministic: bool = False  #: on CUDA: deterministic kernels, so that resume is bit-exact
    hang_timeout_s: float = 900.0  #: no step for this long ends the attempt as a hang
