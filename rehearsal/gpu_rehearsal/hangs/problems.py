"""What a replay of NCCL's calls has found, in a few lines."""

from gpu_rehearsal.formatting import count_of
from gpu_rehearsal.hangs.replay import Replay


def problems_in(replay: Replay) -> list[str]:
    """Return the ranks that wait for calls that no rank makes, for each communicator; if there are none, a deadlock."""
    found, stuck = list[str](), {each.call.rank for each in replay.waiting}
    for call, others in replay.waiting:
        group = call.lane[0]
        names = " and ".join(replay.members(group))
        size = replay.recordings[call.rank].places[group][1]
        calls = dict(sorted({call.side: call, **{each.side: each.call for each in others}}.items()))
        if any(not each.rank for each in others):
            found.append(f"only {names} create a communicator of {count_of(size, 'rank')}")
        elif any(each.call.what != call.what if each.call else each.rank not in stuck for each in others):
            texts = "; ".join(f"{side}: {each or 'nothing'}" for side, each in calls.items())
            found.append(f"communicator of {names}, call {call.position}: {texts}")
    deadlock = "; ".join(
        f"{each.call.side} waits in call {each.call.position} of {' and '.join(replay.members(each.call.lane[0]))}: "
        f"{each.call}"
        for each in replay.waiting
    )
    return [*dict.fromkeys(found)] or [f"deadlock: {deadlock}"] * bool(deadlock)
