"""How long a pipeline takes for a step, in closed form: `schedule.simulate` without simulating.

The longest way through the graph of a schedule decides. Every way begins and ends on the first stage; it goes
down to some stage, works off microbatches there, and comes back up. While it works it may leave for an
excursion: down to the last stage and back with one microbatch, which takes as long as the others wait.
GPipe's is exact, 1F1B's within 3 %. Interleaved stages that differ by a tenth are within 3 % too; where some
have two blocks and some three, up to 9 % is missing, because ways that change ranks midway are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hpctrain.config.schema import Schedule


def pipeline_s(
    schedule: Schedule,
    pp: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: float = 0.0,
) -> float:
    """Seconds from the first forward to the last backward.

    Args:
        forward_s: of each stage, for a microbatch. Stage `s` is on rank `s % pp`.
        send_s: of a message between neighbouring stages.
    """
    stages_per_rank = len(forward_s) // pp
    if pp == 1:
        return num_microbatches * (sum(forward_s) + sum(backward_s))
    if schedule is Schedule["gpipe"]:
        return _gpipe(num_microbatches, forward_s, backward_s, send_s)
    if stages_per_rank == 1:
        return _one_forward_one_backward(num_microbatches, forward_s, backward_s, send_s)
    return _interleaved(pp, num_microbatches, forward_s, backward_s, send_s)


def _gpipe(m: int, forward_s: Sequence[float], backward_s: Sequence[float], send_s: float) -> float:
    """Two flow shops, one after the other: every microbatch through the slowest stage, the last one through
    all others."""
    sends = 2 * (len(forward_s) - 1) * send_s
    return sum(forward_s) + (m - 1) * max(forward_s) + sum(backward_s) + (m - 1) * max(backward_s) + sends


def _one_forward_one_backward(
    m: int, forward_s: Sequence[float], backward_s: Sequence[float], send_s: float
) -> float:
    """Stage j has p - j microbatches in flight, so that an excursion takes the place of p - j of them."""
    p = len(forward_s)
    both = [forward + backward for forward, backward in zip(forward_s, backward_s, strict=True)]
    before = [0.0, *accumulate(work + 2 * send_s for work in both)]  # down to a stage and up from it
    whole = before[p] - 2 * send_s
    longest = 0.0
    for j, work in enumerate(both):
        excursion = whole - before[j]  # F and B of this stage and all below, with the sends between
        in_flight = p - j
        times = (m - 1) // in_flight + 1
        once = max(
            (m - 1) * forward_s[j] + max(0, m - in_flight) * backward_s[j],
            max(0, m - in_flight) * forward_s[j] + (m - 1) * backward_s[j],
        )
        longest = max(longest, before[j] + max(m * work, excursion + once))
        for count in {times, min(2, times)} - {1}:
            rest = m - 1 - (count - 1) * in_flight
            longest = max(longest, before[j] + count * excursion + rest * work)
    return longest


def _interleaved(
    pp: int, m: int, forward_s: Sequence[float], backward_s: Sequence[float], send_s: float
) -> float:
    """Rank r runs 2 (p - r - 1) + (v - 1) p forwards ahead, which fill the time of an excursion. Up to then,
    and mirrored at the end, it takes groups of p microbatches through its stages in turn."""
    begins, ends = _first_begins(forward_s, pp, send_s), _first_begins(backward_s, pp, send_s)
    num_stages, longest = len(forward_s), 0.0
    both = [0.0, *accumulate(f + b + 2 * send_s for f, b in zip(forward_s, backward_s, strict=True))]
    for rank in range(pp):
        own = range(rank, num_stages, pp)
        forward, backward = sum(forward_s[s] for s in own), sum(backward_s[s] for s in own)
        before = _lateness(begins, forward_s, own, pp) + _lateness(ends, backward_s, own, pp)
        beyond = own[-1] + 1
        excursion = both[-1] - both[beyond] if beyond < num_stages else 0.0
        ahead = min(2 * (pp - rank - 1), (m - pp) * len(own) + pp - 1) / len(own)
        waits = max(
            0.0,
            excursion - ahead * forward,
            excursion - ahead * backward,
            2 * excursion - ahead * (forward + backward),
        )
        longest = max(longest, before + waits + m * (forward + backward))
    return longest


def _first_begins(work_s: Sequence[float], pp: int, send_s: float) -> list[float]:
    """When the first microbatch begins on each stage; each rank first works off groups of p microbatches."""
    begins = [0.0]
    for stage in range(1, len(work_s)):
        begin = begins[stage - 1] + work_s[stage - 1] + send_s
        if stage >= pp:
            begin = max(begin, begins[stage - pp] + pp * work_s[stage - pp])
        begins.append(begin)
    return begins


def _lateness(begins: Sequence[float], work_s: Sequence[float], own: range, pp: int) -> float:
    """How long a rank waits for the first microbatch of a stage, beyond its work on earlier stages."""
    done, latest = 0.0, 0.0
    for stage in own:
        latest = max(latest, begins[stage] - done)
        done += pp * work_s[stage]
    return latest
