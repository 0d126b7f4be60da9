"""The config as dataclasses: one per group, a line of doc per field, units in the names.

The classes are mutable because OmegaConf needs that; what is decided from them, `RunPlan`, is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

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
    fp16 = "fp16"  #: with loss scaling


class Checkpointing(Enum):
    """Which activations of a block are kept for backward; the others are computed again."""

    none = "none"  #: all are kept
    selective = "selective"  #: the results of matrix products are kept
    full = "full"  #: only the input of a block is kept


class DecoderFamily(Enum):
    """Hugging Face's `model_type` of the decoders that are known here."""

    llama = "llama"
    mistral = "mistral"
    qwen2 = "qwen2"
    qwen3 = "qwen3"


# Its members are written as the field writes them; `1f1b` is no Python name.
Schedule = Enum("Schedule", ["gpipe", "1f1b", "interleaved_1f1b"])


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
    class_parallel: bool = False  #: the identities are shared out over the data-parallel ranks
    sample_rate: float = 1.0  #: class_parallel: share of the identities in the softmax of a step (Partial FC)
    identity_weight: float = 1.0  #: weight of the identity loss
    behaviour_weight: float = 1.0  #: weight of the behaviour loss
    drop_rate: float = 0.0  #: dropout before the heads
    drop_path_rate: float = 0.0  #: stochastic depth of the backbone, where it has any
    sync_batchnorm: bool = False  #: BatchNorm statistics over all data-parallel ranks


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): W x + (alpha / rank) · B A x, where only A and B are trained."""

    rank: int = 0  #: 0 trains the whole model
    alpha: float = 16.0
    dropout: float = 0.0  #: of the adapter's input
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@dataclass(kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder of the Llama, Mistral, Qwen2 or Qwen3 family; fields are named as in its config.json."""

    kind: str = "decoder"
    family: DecoderFamily = DecoderFamily.llama
    pretrained: str | None = None  #: Hugging Face folder with weights and tokenizer; null starts at random
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int | None = None  #: null takes hidden_size / num_attention_heads
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  #: as in config.json: rope_type linear, dynamic, yarn, llama3
    attention_bias: bool = False  #: bias of q, k and v (always on in qwen2)
    sliding_window: int | None = None  #: tokens that attention looks back; null for all
    max_window_layers: int = 0  #: qwen2 and qwen3: layers from this one on use the sliding window
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02  #: standard deviation of random weights
    residual_dropout: float = 0.0  #: of what each attention and MLP adds to the residual stream
    loss_chunk_tokens: int = 0  #: tokens whose logits exist at once, made twice; 0 keeps all of a microbatch
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(kw_only=True)
class ParallelismConfig:
    """How the ranks share the work. At most one degree may be -1: it is filled in and printed."""

    auto: bool = False  #: the planner chooses what of this group belongs to the layout
    pp: int = 1  #: pipeline stages
    dp_replicate: int = -1  #: data-parallel replicas
    dp_shard: int = 1  #: ranks that share one replica's parameters (FSDP)
    tp: int = 1  #: ranks that share each matrix
    microbatch_size: int | None = (
        None  #: samples per data-parallel rank per forward; null takes the whole share that fits
    )
    schedule: Schedule = Schedule["1f1b"]  #: order of microbatches in the pipeline
    stages_per_rank: int = 1  #: pipeline stages on each rank; more than 1 with interleaved_1f1b only
    layers_per_stage: list[int] | None = None  #: layers of each stage, first to last; null cuts by cost
    sequence_parallel: bool = False  #: tp ranks also share the tokens between the matrices
    reshard_after_forward: bool = True  #: dp_shard: drop gathered weights after forward (ZeRO-3), else keep
    checkpointing: Checkpointing = Checkpointing.none
    offload_optimizer: bool = False  #: weights, gradients and optimizer states live in host memory
    compile: bool = False  #: torch.compile the backbone, or each block of a decoder
    bucket_mib: int = 25  #: size of a gradient bucket, MiB (dp_replicate only)


@dataclass(kw_only=True)
class ClusterConfig:
    """Where and under which conditions the run is started."""

    kind: ClusterKind = ClusterKind.local
    device: Device = Device.cpu
    hardware: str = "cpu"  #: file of figures: your own from `hpctrain calibrate`, or conf/cluster/hardware/
    figures: dict[str, float] = field(default_factory=dict)  #: figures that replace that file's
    num_nodes: int = 1
    ranks_per_node: int = 2  #: one rank per GPU
    cpus_per_rank: int = 1  #: cores per rank: the training loop and its loader workers
    pcie_roots: list[list[int]] = field(default_factory=list)  #: a node's GPUs by PCIe root
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
    """Where samples come from and how they are read. Each kind of data has a subclass."""

    kind: str = "images"
    root: str = "???"  #: folder of packed shards with train/ and val/
    num_workers: int = 2  #: loader processes per rank
    prefetch: int = 4  #: batches each worker prepares ahead
    block_samples: int = 256  #: neighbouring samples that are read together
    window_blocks: int = 16  #: blocks that are mixed with each other


@dataclass(kw_only=True)
class ImageDataConfig(DataConfig):
    """Images packed by `hpctrain data images`."""

    kind: str = "images"
    synthetic_identities: int = 0  #: if positive and `root` is missing, draw this many faces into it
    random_crop_min_scale: float = 0.8  #: smallest area share of the random crop; 1 takes the whole image
    flip: bool = True  #: mirror half of the images
    color_jitter: float = 0.1  #: strength of brightness and contrast changes
    scaled_decode: bool = False  #: let the JPEG decoder skip detail that the resize would drop


@dataclass(kw_only=True)
class TokenDataConfig(DataConfig):
    """Tokens packed by `hpctrain data tokens`; a sample is a sequence of whole documents and padding."""

    kind: str = "tokens"
    sequence_length: int = 4096  #: tokens of a sample
    synthetic_documents: int = 0  #: if positive and `root` is missing, write this many made-up calls into it


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
    fp16_accumulation: bool = False  #: precision fp16: sum products in fp16 too, twice as fast on GeForce
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
class ProfileConfig:
    """Looking inside a run."""

    #: record from when the first many steps are done until the second many are, [10, 13]; empty for off
    steps: list[int] = field(default_factory=list)
    memory: bool = True  #: on CUDA: keep the last allocations, to write them down when memory runs out


@dataclass(kw_only=True)
class PlanConfig:
    """What the planner is told beyond the run itself."""

    force: bool = False  #: submit what the plan refuses for memory, deadline or time limit
    price_per_gpu_hour: float | None = None  #: null for no costs
    currency: str = "USD"  #: a label
    hours_per_day: float = 24.0  #: that the nodes are ours
    interruptions_per_day: float = 1.0  #: preemptions and failures, while it runs
    max_nodes: int = 16  #: largest cluster that the planner looks at when it has a deadline
    num_samples: int | None = None  #: images of an epoch, where they are not packed yet
    num_identities: int | None = None  #: people on those images
    num_tokens: int | None = None  #: tokens of an epoch, where they are not packed yet
    image_megapixels: float = 0.25  #: of a stored image, where they are not packed yet
    image_bytes: float | None = None  #: of a stored image; null reckons 0.15 bytes a pixel


@dataclass(kw_only=True)
class Config:
    """A whole run."""

    name: str | None = None  #: folder of the run; null takes the experiment and what was swept
    run_root: str = "runs"  #: where run folders live
    seed: int = 0
    model: ModelConfig = field(default_factory=VisionConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    data: DataConfig = field(default_factory=ImageDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    deadline: str | None = None  #: 36h, 5d, 90m: the run has to be done within it; null for no deadline
    log_every_steps: int = 10
    eval_every_epochs: int = 1  #: 0 evaluates only at the end
    deterministic: bool = False  #: on CUDA: deterministic kernels, so that resume is bit-exact
    hang_timeout_s: float = 900.0  #: no step for this long ends the attempt as a hang
    selftest: bool = False  #: what `hpctrain selftest` sends: the ranks check the cluster, then themselves
    calibrate: bool = False  #: what `hpctrain calibrate` sends: the ranks measure and do not train
