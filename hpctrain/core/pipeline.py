"""Runs a rank's actions of a pipeline schedule: forwards, backwards, and what travels between stages.

Activations go down and gradients up, each direction (and the way round from the last rank to the first) on a
communicator of its own, so that no transfer queues behind one of the other direction. A receiver takes
messages in the order in which its neighbour's schedule sends them, which NCCL demands, and asks for the next
one while it computes. One pipeline rank is the plain loop over microbatches: forward, backward, forward, …
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpctrain.plan.schedule import Action, Actions, Pass


@dataclass(frozen=True)
class Neighbours:
    """The pipeline this rank is part of: global ranks in pipeline order, and a group for each direction."""

    ranks: tuple[int, ...]
    position: int
    down: Sequence[dist.ProcessGroup]  #: for activations: between ranks, and from the last to the first
    up: Sequence[dist.ProcessGroup]  #: for gradients, likewise


def build_neighbours(
    ranks: Sequence[Sequence[int]], rank: int, *, goes_round: bool, timeout: timedelta
) -> Neighbours:
    """Make the groups of all pipelines and return this rank's. Collective over the world.

    Args:
        ranks: The global ranks of every pipeline, first stage first.
        goes_round: Ranks have several stages, so that the last rank sends to the first.
        timeout: Of each transfer.
    """
    found: Neighbours | None = None
    for pipeline in ranks:
        count = 0 if len(pipeline) == 1 else 4 if goes_round else 2
        groups: list[Any] = [dist.new_group(list(pipeline), timeout=timeout) for _ in range(count)]
        if rank in pipeline:
            down, up = groups[: count // 2], groups[count // 2 :]
            found = Neighbours(tuple(pipeline), pipeline.index(rank), down, up)
    assert found is not None
    return found


class _Channel:
    """Messages from one rank to its neighbour, in one direction."""

    def __init__(self, peer: int, groups: Sequence[dist.ProcessGroup]) -> None:
        self.peer, self.groups = peer, groups
        self._sent: dict[Action, tuple[Any, Tensor]] = {}
        self._expected: deque[tuple[Action, bool]] = deque()
        self._posted: dict[Action, tuple[Any, Tensor]] = {}

    def send(self, action: Action, tensor: Tensor, wraps: bool) -> None:
        """Send the result of an action. Its memory stays ours until it has left."""
        for key in [key for key, (work, _) in self._sent.items() if work.is_completed()]:
            del self._sent[key]
        self._sent[action] = dist.isend(tensor, self.peer, group=self.groups[wraps]), tensor

    def has_left(self, action: Action) -> None:
        """An answer has come to what an action sent: it needs no memory here any more."""
        if action in self._sent:
            self._sent.pop(action)[0].wait()

    def expect(self, messages: Iterable[tuple[Action, bool]]) -> None:
        self._expected = deque(messages)

    def receive(self, wanted: Action, buffer: Callable[[], Tensor]) -> Tensor:
        while wanted not in self._posted:
            self._post(buffer)
        work, tensor = self._posted.pop(wanted)
        work.wait()
        if self._expected and not self._posted:
            self._post(buffer)  # the next one travels during this one's computation
        return tensor

    def _post(self, buffer: Callable[[], Tensor]) -> None:
        action, wraps = self._expected.popleft()
        tensor = buffer()
        self._posted[action] = (dist.irecv(tensor, self.peer, group=self.groups[wraps]), tensor)

    def finish(self) -> None:
        """Wait for what is under way. A step leaves nothing behind."""
        assert not self._expected and not self._posted, "the schedule has unread messages"
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()


class Pipeline:
    """This rank's stages and its channels to the neighbours.

    Args:
        stages: This rank's stages by number. Each takes (tokens or hidden states, **inputs) and returns
            hidden states, the last one a tensor of losses.
        hidden: Makes an empty tensor for what travels between stages; all microbatches have one shape.
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        num_stages: int,
        neighbours: Neighbours,
        hidden: Callable[[], Tensor],
        device: torch.device,
    ) -> None:
        self.stages, self.num_stages, self.hidden, self.device = stages, num_stages, hidden, device
        self.position, self.pp = neighbours.position, len(neighbours.ranks)
        before = neighbours.ranks[self.position - 1]
        after = neighbours.ranks[(self.position + 1) % self.pp]
        self._from_before, self._to_after = (
            _Channel(before, neighbours.down),
            _Channel(after, neighbours.down),
        )
        self._from_after, self._to_before = _Channel(after, neighbours.up), _Channel(before, neighbours.up)

    def connect(self) -> None:
        """Open every connection, so that a broken link is found before the first step and NCCL makes none in
        the middle of a schedule. Collective over the pipeline."""
        boundaries = range(self.num_stages - 1) if self.pp > 1 else range(0)
        for kind in Pass:
            down = kind is Pass.forward
            out, into = (self._to_after, self._from_before) if down else (self._to_before, self._from_after)
            for stage in boundaries if down else reversed(boundaries):
                sender, receiver = (stage, stage + 1) if down else (stage + 1, stage)
                message = Action(kind, receiver, 0), self._wraps(stage)
                if sender % self.pp == self.position:
                    out.send(message[0], torch.zeros(1, device=self.device), message[1])
                if receiver % self.pp == self.position:
                    into.expect([message])
                    into.receive(message[0], lambda: torch.empty(1, device=self.device))
        self._finish()

    def run(
        self,
        schedule: Sequence[Actions],
        microbatches: Sequence[Any],
        inputs: Callable[[Any], dict[str, Tensor | None]],
        loss: Callable[[Tensor], Tensor],
        before_backward: Callable[[nn.Module, bool], None] = lambda stage, is_last: None,
    ) -> list[Tensor]:
        """Carry out this rank's part. Collective over the pipeline: all ranks with the same schedule.

        Args:
            schedule: The actions of every pipeline rank.
            inputs: The keyword arguments of a stage for a microbatch, beside its `token_BL`.
            loss: From the last stage's output to the scalar whose gradient is taken.
            before_backward: Told of each backward: its stage, and whether it is that stage's last.

        Returns:
            The last stage's outputs, detached, by microbatch; on other ranks nothing.
        """
        self._from_before.expect(self._messages(schedule, self.position - 1, Pass.forward))
        self._from_after.expect(self._messages(schedule, self.position + 1, Pass.backward))
        flying: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        outputs: dict[int, Tensor] = {}
        trains = any(action.kind is Pass.backward for action in schedule[self.position])
        left = dict.fromkeys(self.stages, len(microbatches))
        for action in schedule[self.position]:
            _, stage, number = action
            if action.kind is Pass.forward:
                x = self._input(action, microbatches[number], trains)
                y = self.stages[stage](x, **inputs(microbatches[number]))
                if stage == self.num_stages - 1:
                    outputs[number] = y.detach()
                    y = loss(y) if trains else y
                else:
                    self._to_after.send(action, y.detach().contiguous(), self._wraps(stage))
                if trains:  # the graph is kept, not what came out of it
                    flying[stage, number] = x, get_gradient_edge(y)
                del x, y
            else:
                left[stage] -= 1
                before_backward(self.stages[stage], left[stage] == 0)
                self._backward(action, *flying.pop((stage, number)))
        self._finish()
        return [outputs[number] for number in sorted(outputs)]

    def _finish(self) -> None:
        for channel in (self._from_before, self._from_after, self._to_before, self._to_after):
            channel.finish()

    def _input(self, action: Action, microbatch: Any, trains: bool) -> Tensor:
        if action.stage == 0:
            token_BL: Tensor = microbatch.token_BL
            return token_BL
        return self._from_before.receive(action, self.hidden).requires_grad_(trains)

    def _backward(self, action: Action, x: Tensor, y: GradientEdge) -> None:
        if action.stage == self.num_stages - 1:
            torch.autograd.backward(y)
        else:
            gradient = self._from_after.receive(action, self.hidden)
            self._to_after.has_left(Action(Pass.forward, action.stage, action.microbatch))
            torch.autograd.backward(y, gradient)
        if action.stage:
            assert x.grad is not None
            self._to_before.send(action, x.grad.contiguous(), self._wraps(action.stage - 1))

    def _messages(
        self, schedule: Sequence[Actions], neighbour: int, kind: Pass
    ) -> Iterable[tuple[Action, bool]]:
        """What a neighbour will send, in its order: by the action here that waits for it."""
        step = 1 if kind is Pass.forward else -1
        for _, stage, number in (a for a in schedule[neighbour % self.pp] if a.kind is kind):
            target = stage + step
            if self.pp > 1 and 0 <= target < self.num_stages:
                yield Action(kind, target, number), self._wraps(min(stage, target))

    def _wraps(self, stage: int) -> bool:
        """Whether the boundary after a stage leads from the last pipeline rank round to the first."""
        return (stage + 1) % self.pp == 0
