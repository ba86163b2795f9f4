"""Recording of samples: ``config.offline_data(output=...)`` for runners of this package."""

import logging
from typing import Any

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner
from ray.rllib.utils import force_list

_LOG = logging.getLogger(__name__)


class RecordingEnvRunner(OfflineSingleAgentEnvRunner):
    """An EnvRunner that records its samples to ``config.output``, if that is set.

    Options, rows and paths are those of RLlib's own recording runner, so that RLlib's offline
    algorithms can read them: ``OUTPUT/endpoints/run-WORKER-NUMBER``, one file in each directory.
    Every row is written once; RLlib's runner in Ray 2.60 writes all earlier rows again each time,
    and with ``output_max_rows_per_file`` drops all but the last file of a sample. Rows that could
    not be written are kept and written after the next sample; the failure is logged.

    As in RLlib, evaluation runners record, too, unless ``evaluation_config`` sets
    ``{"output": None}``.
    """

    _samples: list[Any]
    """Rows that have not been written."""

    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any) -> None:
        if not config.output:
            super(OfflineSingleAgentEnvRunner, self).__init__(config=config, **kwargs)
            return
        # RLlib limits this whole process to the CPUs of a runner: in the driver, an algorithm that
        # reads recorded data would wait without end. No CPUs are needed here; see _write.
        options = ray.data.DataContext.get_current().execution_options
        limits = options.resource_limits
        super().__init__(config=config, **kwargs)
        options.resource_limits = limits
        # Rows are the same either way, and learners want arrays.
        self.episodes_to_numpy = config.episodes_to_numpy

    def _get_subdir_path(self) -> str:
        return "endpoints"

    def sample(self, **kwargs: Any) -> list[SingleAgentEpisode]:
        """Sample as RLlib's runner does, and record the episodes."""
        episodes: list[SingleAgentEpisode] = super(OfflineSingleAgentEnvRunner, self).sample(
            **kwargs
        )
        if self.config.output:
            self._record(episodes)
        return episodes

    def stop(self) -> None:
        """Write the remaining rows, if the config asks for it, and close the environment.

        Callbacks on samples that have a method ``close`` are closed, too.
        """
        try:
            # Without a number of rows per file, rows are left only if they could not be written.
            wants_rest = self.config.output and (
                self.write_remaining_data or not self.output_max_rows_per_file
            )
            if wants_rest and self._samples:
                self._write(len(self._samples))
            for callback in force_list(self.config.callbacks_on_sample_end):
                if hasattr(callback, "close"):
                    callback.close()
        finally:
            super(OfflineSingleAgentEnvRunner, self).stop()

    def _record(self, episodes: list[SingleAgentEpisode]) -> None:
        if self.output_write_episodes:
            self._samples += map(_packed, episodes)
        else:
            self._map_episodes_to_data(episodes)
        num_rows = self.output_max_rows_per_file or len(self._samples)
        while self._samples and len(self._samples) >= num_rows:
            if not self._write(num_rows):
                break
        self.metrics.log_value("recording_buffer_size", len(self._samples))

    def _write(self, num_rows: int) -> bool:
        """Write the oldest rows into a file; False: that failed, and they are kept."""
        self._sample_counter += 1
        run = f"{self.worker_path}-{self._sample_counter:05d}"
        path = f"{str(self.output_path).rstrip('/')}/{self.subdir_path}/{run}"
        # The runner waits meanwhile, so its own CPU is free: in a cluster whose CPUs are all taken,
        # a task that asks for one would wait without end.
        settings = {"ray_remote_args": {"num_cpus": 0}, **self.output_write_method_kwargs}
        try:
            rows = ray.data.from_items(self._samples[:num_rows], override_num_blocks=1)
            getattr(rows, self.output_write_method)(path, **settings)
        except Exception:  # noqa: BLE001  # an error of any storage must not lose samples
            _LOG.exception(
                "worker %s cannot write %d rows to %s; they are kept, and tried again after the "
                "next sample",
                self.worker_index,
                num_rows,
                path,
            )
            return False
        del self._samples[:num_rows]
        return True


def _packed(episode: SingleAgentEpisode) -> bytes:
    import msgpack
    import msgpack_numpy

    return bytes(msgpack.packb(episode.get_state(), default=msgpack_numpy.encode))
