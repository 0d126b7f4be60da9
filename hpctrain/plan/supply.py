"""How fast samples can be had: decoding on the nodes' cores, reading from storage, and what memory caches."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.hardware import Hardware
from hpctrain.config.schema import ClusterConfig, DataConfig, ImageDataConfig

TOKEN_BYTES = 4  # of a packed token, with its share of the index
JPEG_BYTES_PER_PIXEL = 0.15  # 1080p at quality 90: 0.3 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What an epoch reads."""

    num_samples: int  #: images, or packed sequences at the least
    sample_bytes: float
    megapixels: float = 0.0  #: of a stored image
    num_identities: int | None = None  #: of the images; None where nobody knows
    is_packed: bool = True  #: counted in packed data, and not only assumed by `plan.num_samples`


def known_identities(data: DataConfig, counted: int | None) -> int | None:
    """Identities of the training images: as counted, or as many as the run will draw."""
    drawn = data.synthetic_identities if isinstance(data, ImageDataConfig) else 0
    return counted if counted is not None else drawn or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """Samples a second of all nodes together; None where nothing limits or nothing is known."""

    decode: float | None  #: by the loader's workers
    storage: float | None
    cached: float  #: share of the data that stays in the nodes' memory
    num_workers: int  #: of all nodes
    sample_bytes: float
    megapixels: float

    @property
    def rate(self) -> float | None:
        known = [rate for rate in (self.decode, self.storage) if rate is not None]
        return min(known) if known else None

    @property
    def limit(self) -> str:
        """What is slowest."""
        if self.storage is not None and (self.decode is None or self.storage < self.decode):
            return "storage"
        return "decoding"


def data_supply(
    cluster: ClusterConfig, data: DataConfig, workload: Workload, hardware: Hardware
) -> Supply | None:
    """What the nodes can read and decode; None without figures.

    Workers that are more than the cores beside the training loops share them; without workers each training
    loop decodes. The order of samples is drawn
    anew every epoch, so a node's cache holds a sample with the share of the data that fits into half of its
    memory.
    """
    nodes, per_node = cluster.num_nodes, cluster.ranks_per_node
    workers = max(1, min(data.num_workers, cluster.cpus_per_rank - 1)) * per_node * nodes
    decode = storage = None
    if isinstance(data, ImageDataConfig) and "decode_ms" in hardware:
        seconds = hardware["decode_ms"] + workload.megapixels * hardware["decode_ms_per_megapixel"]
        decode = workers * 1000 / seconds
    cached = 0.0
    if "storage_gbps" in hardware:
        bandwidth = min(nodes * hardware["storage_gbps"], hardware["storage_total_gbps"]) * 1e9
        dataset = workload.num_samples * workload.sample_bytes
        cached = min(1.0, hardware["host_memory_gib"] / 2 * 2**30 / max(1.0, dataset))
        storage = None if cached == 1.0 else bandwidth / workload.sample_bytes / (1 - cached)
    if decode is None and storage is None:
        return None
    return Supply(
        decode=decode,
        storage=storage,
        cached=cached,
        num_workers=workers,
        sample_bytes=workload.sample_bytes,
        megapixels=workload.megapixels,
    )
