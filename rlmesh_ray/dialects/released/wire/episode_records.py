"""Records of episodes to ``rlmesh_wire.env.v1.EpisodeMetadata`` and back."""

from collections.abc import Iterable

from rlmesh_ray.protocol.messages import EpisodeRecord
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1.meta import MetaBudget, decode_meta, encode_meta


def records_to_proto(
    records: Iterable[EpisodeRecord], *, tag_arrays: bool, budget: MetaBudget | None = None
) -> list[pb.EpisodeMetadata]:
    """Return the messages of ``records``.

    Args:
        records: To encode.
        tag_arrays: Whether the peer decodes arrays in infos.
        budget: Shared with the other infos of the frame; default: a new one for these.
    """
    budget = budget or MetaBudget()
    return [
        pb.EpisodeMetadata(
            episode_id=record.episode_id,
            seed=record.seed,
            env_index=record.env_index,
            step_count=record.step_count,
            cumulative_reward=record.cumulative_reward,
            terminated=record.terminated,
            truncated=record.truncated,
            start_timestamp_ns=record.start_timestamp_ns,
            end_timestamp_ns=record.end_timestamp_ns,
            final_info=encode_meta(record.final_info, tag_arrays=tag_arrays, budget=budget),
        )
        for record in records
    ]


def records_from_proto(messages: Iterable[pb.EpisodeMetadata]) -> tuple[EpisodeRecord, ...]:
    """Return the records in ``messages``. Raises CodecError if an array in an info is malformed."""
    return tuple(
        EpisodeRecord(
            episode_id=message.episode_id,
            env_index=message.env_index,
            step_count=message.step_count,
            cumulative_reward=message.cumulative_reward,
            terminated=message.terminated,
            truncated=message.truncated,
            start_timestamp_ns=message.start_timestamp_ns,
            end_timestamp_ns=message.end_timestamp_ns,
            seed=message.seed if message.HasField("seed") else None,
            final_info=decode_meta(message.final_info),
        )
        for message in messages
    )
