"""Time and memory of sampling and training on a GPU, by a roofline model (Williams et al., CACM 2009).

An operation takes the longer of the time for its arithmetic and the time to read its data. The peak
values are those of data sheets; the shares of them that software reaches are measured for training,
and assumed for sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: its name.
        flops: dense bfloat16 operations per second.
        bandwidth: bytes per second from its memory.
        memory: bytes of memory.
        host: bytes per second from the memory of the host, in each direction.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    host: float


H100 = Device("H100 SXM", flops=989e12, bandwidth=3350 * GB, memory=80 * GB, host=50 * GB)


@dataclass(frozen=True)
class Base:
    """A base model in bfloat16 with grouped-query attention.

    Attributes:
        name: its name.
        parameters: the number of parameters.
        layers: the number of layers.
        heads: the number of heads of keys and values.
        width: the number of values of a head.
    """

    name: str
    parameters: float
    layers: int
    heads: int
    width: int

    @property
    def weights(self) -> float:
        """Bytes of the weights."""
        return 2 * self.parameters

    @property
    def cache(self) -> float:
        """Bytes of the keys and values of a token.

        >>> BASES["8B"].cache
        147456.0
        """
        return float(2 * 2 * self.layers * self.heads * self.width)


BASES = {
    "0.6B": Base("0.6B", 0.6e9, layers=28, heads=8, width=128),
    "8B": Base("8B", 8.2e9, layers=36, heads=8, width=128),
    "32B": Base("32B", 32.8e9, layers=64, heads=8, width=128),
}  # shapes of the dense models of Qwen3


@dataclass(frozen=True)
class Efficiency:
    """Shares of a GPU's peak values that software reaches.

    Attributes:
        prefill: of the operations, when a prompt is read.
        decoding: of the bandwidth, when tokens are sampled.
        training: of the operations, in a training step of a large base.
        launch: minimum seconds of a layer in each micro-batch of training, for launching kernels.
        overhead: seconds of a decoding step in addition, for launching kernels and scheduling.
    """

    prefill: float = 0.5
    decoding: float = 0.6
    training: float = 0.35
    launch: float = 0.0
    overhead: float = 0.004


@dataclass(frozen=True)
class Costs:
    """Costs of a base model on GPUs.

    Attributes:
        base: the model.
        device: each GPU.
        reached: the shares of its peak values.
        micro: tokens of a micro-batch of training.
    """

    base: Base
    device: Device = H100
    reached: Efficiency = Efficiency()
    micro: int = 8192

    @property
    def group(self) -> int:
        """GPUs of a replica, a power of two: the weights take at most 60 % of their memory."""
        return 1 << max(0, math.ceil(math.log2(self.base.weights / (0.6 * self.device.memory))))

    def capacity(self, context: float) -> int:
        """Return the most requests of a context length, in tokens, whose cache a replica holds."""
        left = 0.9 * self.device.memory * self.group - self.base.weights
        return max(1, int(left / (self.base.cache * context)))

    def prefill(self, tokens: float) -> float:
        """Return the seconds in which a replica reads a prompt."""
        flops = self.device.flops * self.group * self.reached.prefill
        return 2 * self.base.parameters * tokens / flops

    def decoding(self, requests: int, context: float) -> float:
        """Return the seconds in which a replica samples one token of each request."""
        read = self.base.weights + requests * context * self.base.cache
        reading = read / (self.device.bandwidth * self.group * self.reached.decoding)
        flops = self.device.flops * self.group * self.reached.prefill
        return max(reading, 2 * self.base.parameters * requests / flops) + self.reached.overhead

    def training(self, tokens: float, gpus: int) -> float:
        """Return the seconds of a training step on some GPUs, with checkpointed activations.

        The base is frozen: a forward pass, the same again for the backward pass, and the gradients
        of the activations take two operations per parameter and token each.
        """
        flops = self.device.flops * self.reached.training * gpus
        batches = math.ceil(tokens / gpus / self.micro)
        launching = batches * self.base.layers * self.reached.launch
        return max(6 * self.base.parameters * tokens / flops, launching)

    def switch(self) -> float:
        """Return the seconds in which GPUs change between sampling and training.

        One copy of the weights is written to the memory of the host, and the other one is read from
        it.
        """
        return 2 * self.base.weights / (self.group * self.device.host)
