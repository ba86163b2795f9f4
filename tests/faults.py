"""Planted faults, which tests of the public surface must find: ``python -m tests.faults``.

Each fault is a mistake that a rebuilt room could make. A fault is found where the one test that is
named for it fails with the fault and passes without it. The test is one of those in ``FOLDERS``,
which look at the product from outside: so it stays when the classes behind it change. The faults
are planted in copies of the repository, never in the checkout.

``old`` stands once in ``file``. When code moves, ``tests/test_faults.py`` says which faults have
lost their place. Plant them again, in the new code, by what ``says`` describes. None is given up.

``NAME ...`` and ``--room ROOM`` choose faults. Exits with 1 where a fault is not found, or has no
place.
"""

import argparse
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = (
    *("server", "client", "transport", "envs", "wire", "protocol", "spaces", "auth"),
    *("evaluation", "compliance", "rllib", "models", "cli", "recording", "watch", "actors"),
    *("dm_env_rpc", "rllink", "released", "openpi"),
)
FOLDERS = (
    *("tests/loopback/", "tests/compliance/", "tests/peers/", "tests/ray/"),
    "tests/test_shown_blocks.py",
)
"""Tests of the public surface."""
_LEFT_OUT = (".git", ".venv", ".venvs", "mutants", "runs", "node_modules", "__pycache__")
_FAILED = 1
"""Exit code of pytest where a test has failed; other codes say that none has run."""
_TEST_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake in the product, and the test that finds it."""

    name: str
    room: str
    says: str
    """What the product does wrong, in one sentence."""
    file: str
    old: str
    """Text that stands once in the file."""
    new: str
    """Text to put in its place."""
    test: str
    """Id of the test, as pytest takes it."""

    @property
    def num_places(self) -> int:
        """How often the old text stands in the file."""
        path = ROOT / self.file
        return path.read_text().count(self.old) if path.exists() else 0

    @contextlib.contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        """Plant the fault in a copy of the repository, for a while."""
        path = root / self.file
        text, status = path.read_text(), path.stat()
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)
            # Python takes the fault's bytecode for that of a file with the same time and size.
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


FAULTS = (
    Fault(
        "a-drain-admits-sessions",
        "server",
        "A draining endpoint still admits new clients.",
        "rlmesh_ray/server/endpoint/gate.py",
        "if self.is_closed and method",
        "if False and method",
        "tests/loopback/test_health.py::"
        "test_a_draining_env_endpoint_finishes_its_sessions_and_admits_no_other",
    ),
    Fault(
        "episodes-count-twice",
        "server",
        "The statistics count each ended episode of an open session twice.",
        "rlmesh_ray/transport/exactly_once.py",
        "            fields[_NUM_ENDED] += num_ended\n",
        "            fields[_NUM_ENDED] += 2 * num_ended\n",
        "tests/loopback/test_statistics.py::"
        "test_steps_count_the_same_over_the_stream_and_past_the_endpoint[grpc]",
    ),
    Fault(
        "worker-restarts-are-not-counted",
        "server",
        "A worker that takes the place of a dead one is not counted.",
        "rlmesh_ray/server/env/worker_pool.py",
        "            self.counts.worker_restarts += 1\n",
        "",
        "tests/loopback/test_statistics.py::"
        "test_a_crash_counts_as_an_error_costs_a_worker_and_is_logged_with_its_session",
    ),
    Fault(
        "a-reset-of-some-lanes-hides-a-crash",
        "server",
        "A reset of some lanes succeeds on a new worker, although the other lanes "
        "died with the old one.",
        "rlmesh_ray/server/env/lane_session.py",
        "if is_another and are_some and self._session.state is SessionState.READY:",
        "if False:",
        "tests/loopback/test_env_endpoint.py::"
        "test_a_partial_reset_does_not_hide_that_the_other_lanes_have_died",
    ),
    Fault(
        "a-batch-is-a-row-too-large",
        "server",
        "A batch of predictions may have one row more than the limit.",
        "rlmesh_ray/server/model/batcher.py",
        "if num_rows > self._max_rows:",
        "if num_rows > self._max_rows + 1:",
        "tests/loopback/test_serving.py::test_each_route_s_answers_keep_its_order_in_all_batches",
    ),
    Fault(
        "a-session-has-a-route-too-many",
        "server",
        "A session may open one route more than the limit.",
        "rlmesh_ray/server/model/model_stream.py",
        "if num_routes > MAX_ROUTES:",
        "if num_routes > MAX_ROUTES + 1:",
        "tests/loopback/test_serving.py::test_a_client_may_not_open_routes_without_end",
    ),
    Fault(
        "a-busy-session-counts-as-idle",
        "server",
        "A session that steps over its direct connection ends for being idle.",
        "rlmesh_ray/server/endpoint/calls.py",
        "if self._reader is None or self._is_active():",
        "if self._reader is None:",
        "tests/loopback/test_access_limits.py::"
        "test_a_session_that_is_used_or_waits_for_its_environment_is_not_silent",
    ),
    Fault(
        "a-late-step-has-its-limit-twice",
        "client",
        "A direct step without an answer waits as long again on the stream.",
        "rlmesh_ray/client/env/env_client.py",
        "return max(end_s - time.monotonic(), (1 - _DIRECT_TIMEOUT_SHARE) * limit_s)",
        "return limit_s",
        "tests/loopback/test_direct_connection.py::"
        "test_a_step_without_an_answer_takes_its_timeout_and_a_second_at_most[shared_memory]",
    ),
    Fault(
        "a-masked-reset-takes-other-seeds",
        "client",
        "A reset of some lanes sends the seeds of the first lanes, not those of the chosen ones.",
        "rlmesh_ray/client/env/remote_env.py",
        "seeds = [seeds[lane] for lane in lanes] if seeds else []",
        "seeds = seeds[: len(lanes)]",
        "tests/loopback/test_gymnasium_interface.py::"
        "test_the_seeds_of_lanes_are_those_that_they_were_reset_with",
    ),
    Fault(
        "a-lane-is-reset-twice",
        "client",
        "A single lane that was reset after its end is reset once more by the next step.",
        "rlmesh_ray/client/env/remote_env.py",
        "        self._begun.update(lanes or range(self.num_envs))\n"
        "        self._has_ended = False\n",
        "        self._begun.update(lanes or range(self.num_envs))\n",
        "tests/loopback/test_gymnasium_interface.py::"
        "test_one_lane_that_was_reset_after_its_end_is_not_reset_once_more",
    ),
    Fault(
        "a-step-that-resets-has-little-time",
        "client",
        "A step that resets lanes has the time limit of a plain step.",
        "rlmesh_ray/client/env/env_client.py",
        "if may_reset:",
        "if False:",
        "tests/loopback/test_deadlines.py::"
        "test_a_step_that_contains_resets_has_the_limit_of_a_reset[grpc]",
    ),
    Fault(
        "a-call-shows-no-token",
        "client",
        "A call into an environment does not send the token.",
        "rlmesh_ray/client/channel.py",
        "metadata=self.metadata + (session or ()),",
        "metadata=session or self.metadata,",
        "tests/loopback/test_lane_calls.py::test_a_call_wants_the_token",
    ),
    Fault(
        "direct-flags-are-swapped",
        "transport",
        "Over a direct connection, terminated and truncated are mixed up.",
        "rlmesh_ray/transport/direct_connection.py",
        "StepArrays(results.rewards.copy(), terminated, truncated)",
        "StepArrays(results.rewards.copy(), truncated, terminated)",
        "tests/loopback/test_env_endpoint.py::"
        "test_terminated_and_truncated_stay_apart[rlmesh.protocol.v1-shared_memory]",
    ),
    Fault(
        "a-repeated-step-is-executed-again",
        "transport",
        "A step that is sent again on the stream, after its answer was lost, is executed twice.",
        "rlmesh_ray/transport/exactly_once.py",
        "return ExecutionDecision.RESEND_ANSWER if number == last",
        "return ExecutionDecision.EXECUTE if number == last",
        "tests/loopback/test_direct_connection.py::"
        "test_a_step_that_was_executed_is_answered_again_for_who_repeats_it[shared_memory]",
    ),
    Fault(
        "a-ticket-opens-twice",
        "transport",
        "A ticket for a direct TCP connection can be used twice.",
        "rlmesh_ray/transport/tcp.py",
        "issued = self._issued.pop(ticket_id, None)",
        "issued = self._issued.get(ticket_id)",
        "tests/loopback/test_direct_tcp.py::test_strangers_are_hung_up_on_and_cost_nothing",
    ),
    Fault(
        "direct-observations-are-views",
        "transport",
        "Observations of a direct step are views, which the next step overwrites.",
        "rlmesh_ray/transport/direct_connection.py",
        "column if isinstance(column, tuple) else np.array(column)",
        "column if isinstance(column, tuple) else np.asarray(column)",
        "tests/loopback/test_direct_connection.py::"
        "test_what_arrives_is_the_caller_s_own[shared_memory]",
    ),
    Fault(
        "a-truncation-terminates",
        "envs",
        "A lane that ends is reported as both terminated and truncated, whichever it was.",
        "rlmesh_ray/envs/lane_vector_env.py",
        "terminated[lane], truncated[lane] = is_terminated, is_truncated\n"
        "                    self._has",
        "terminated[lane] = truncated[lane] = is_terminated or is_truncated\n"
        "                    self._has",
        "tests/loopback/test_env_endpoint.py::"
        "test_terminated_and_truncated_stay_apart[rlmesh.protocol.v1-grpc]",
    ),
    Fault(
        "a-resetting-step-has-a-reward",
        "envs",
        "A step that only resets a lane has a reward.",
        "rlmesh_ray/envs/lane_vector_env.py",
        "                reward = 0.0\n",
        "                reward = 1.0\n",
        "tests/loopback/test_released_clients.py::"
        "test_lanes_are_the_same_in_both_generations[next_step]",
    ),
    Fault(
        "seeds-do-not-arrive",
        "envs",
        "The seeds of a reset do not reach the environments.",
        "rlmesh_ray/envs/lane_vector_env.py",
        'lane: {"seed": seed, "options"',
        'lane: {"seed": None, "options"',
        "tests/loopback/test_env_endpoint.py::test_sessions_have_lanes_of_their_own",
    ),
    Fault(
        "a-step-past-the-end-ends-again",
        "envs",
        "A step past the end of an episode counts as the end of another one.",
        "rlmesh_ray/envs/vector_host.py",
        "            infos = {lane: info for lane, info in infos.items() if lane not "
        "in self._over}\n",
        "",
        "tests/loopback/test_statistics.py::"
        "test_a_step_past_an_episode_s_end_ends_no_other_one[grpc]",
    ),
    Fault(
        "reset-options-are-dropped",
        "wire",
        "The endpoint drops the options of a reset.",
        "rlmesh_ray/wire/rlmesh_v1/env.py",
        "options=decode_peer_meta(body.options),",
        "options={},",
        "tests/loopback/test_env_endpoint.py::test_reset_options_reach_the_environment",
    ),
    Fault(
        "errors-are-all-final",
        "wire",
        "An error that leaves the session usable arrives as one that ends it.",
        "rlmesh_ray/wire/rlmesh_v1/env.py",
        "    body.is_recoverable = response.is_recoverable\n",
        "",
        "tests/loopback/test_env_endpoint.py::test_a_step_after_an_error_needs_a_reset",
    ),
    Fault(
        "actions-for-too-many-lanes-pass",
        "wire",
        "A nested action for more lanes than there are is accepted.",
        "rlmesh_ray/wire/rlmesh_v1/values.py",
        "if len(batch.items) != num_lanes:",
        "if len(batch.items) < num_lanes:",
        "tests/loopback/test_raw_streams.py::test_a_nested_action_of_another_width_is_refused[3]",
    ),
    Fault(
        "a-record-swaps-its-flags",
        "protocol",
        "An episode's record calls a truncation a termination, and the other way round.",
        "rlmesh_ray/protocol/env_session.py",
        "        terminated, truncated = flags\n",
        "        truncated, terminated = flags\n",
        "tests/loopback/test_env_endpoint.py::"
        "test_terminated_and_truncated_stay_apart[rlmesh.protocol.v1-grpc]",
    ),
    Fault(
        "one-seed-is-that-of-all-lanes",
        "protocol",
        "One seed for a whole vector seeds all its lanes alike, instead of counting up.",
        "rlmesh_ray/protocol/env_session.py",
        "seeds=tuple(reset.seeds[0] + lane for lane in self._all_lanes)",
        "seeds=tuple(reset.seeds[0] for lane in self._all_lanes)",
        "tests/loopback/test_released_env_server.py::"
        "test_one_seed_counts_up_over_the_lanes_of_a_vector",
    ),
    Fault(
        "a-close-overtakes-predictions",
        "protocol",
        "Close is answered before the predictions that came before it.",
        "rlmesh_ray/protocol/model_session.py",
        "if self._closing is not None and not self._outstanding:",
        "if self._closing is not None:",
        "tests/loopback/test_released_model_server.py::"
        "test_close_is_answered_after_all_others_and_ends_the_stream",
    ),
    Fault(
        "any-edition-text-is-accepted",
        "protocol",
        "A client with another text of the provisional edition is served without the "
        "operator's consent.",
        "rlmesh_ray/protocol/handshake.py",
        "if _pin_differs(offer.spec_sha256) and offer.spec_sha256 not in accept_texts:",
        "if False:",
        "tests/loopback/test_raw_streams.py::"
        "test_a_client_of_another_edition_text_is_served_where_the_operator_accepts_it",
    ),
    Fault(
        "a-step-after-an-error-is-taken",
        "protocol",
        "After an error a step is executed without a reset.",
        "rlmesh_ray/protocol/env_session.py",
        "        self.begun_lanes.difference_update(lanes)\n",
        "",
        "tests/loopback/test_env_endpoint.py::test_a_step_after_an_error_needs_a_reset",
    ),
    Fault(
        "nan-is-an-action",
        "spaces",
        "An action with NaN is sent.",
        "rlmesh_ray/spaces/validation.py",
        "if is_bounded else has_nan)",
        "if is_bounded else lambda _: False)",
        "tests/loopback/test_gymnasium_interface.py::"
        "test_an_action_that_the_endpoint_would_refuse_costs_no_session",
    ),
    Fault(
        "an-infinite-reward-is-no-deviation",
        "spaces",
        "An infinite reward is delivered without a warning, and is not counted.",
        "rlmesh_ray/spaces/validation.py",
        "is_finite = np.isfinite(rewards)\n    if validation",
        "is_finite = ~np.isnan(rewards)\n    if validation",
        "tests/loopback/test_statistics.py::"
        "test_values_out_of_range_count_each_time_and_a_session_goes_on"
        "[Fault.INFINITE_REWARD--inf-grpc]",
    ),
    Fault(
        "pictures-are-transposed",
        "spaces",
        "A resized picture has the height of its width, so that its rows are broken up.",
        "rlmesh_ray/spaces/images.py",
        ".resize(size[::-1], ",
        ".resize(size, ",
        "tests/loopback/test_image_sessions.py::test_a_resized_picture_shows_what_it_has_shown",
    ),
    Fault(
        "infos-of-other-lanes-get-lost",
        "spaces",
        "Of two resets of different lanes, the masks of the infos are those of the second.",
        "rlmesh_ray/spaces/vector_infos.py",
        'merged[f"_{key}"] = masks[0] | masks[1]',
        'merged[f"_{key}"] = masks[1]',
        "tests/loopback/test_gymnasium_interface.py::"
        "test_the_infos_of_lanes_with_a_seed_and_of_those_without_come_together",
    ),
    Fault(
        "a-probe-opens-sessions",
        "auth",
        "The token of a probe opens sessions.",
        "rlmesh_ray/auth/token_file.py",
        'return _OWN_ROLES.get(method.rpartition("/")[2], TokenRole.CLIENT)',
        'return _OWN_ROLES.get(method.rpartition("/")[2], TokenRole.PROBE)',
        "tests/loopback/test_access.py::"
        "test_each_role_may_do_what_it_is_for_and_nothing_more[env_server]",
    ),
    Fault(
        "a-token-is-not-compared",
        "auth",
        "Any token is accepted where there is one.",
        "rlmesh_ray/auth/token_file.py",
        "found = max(found, role * hmac.compare_digest(known, digest))",
        "found = max(found, role * bool(digest))",
        "tests/loopback/test_access.py::"
        "test_no_call_of_any_protocol_is_answered_to_strangers[env_server]",
    ),
    Fault(
        "a-new-token-file-is-not-read",
        "auth",
        "A server keeps the tokens of its file although that has changed.",
        "rlmesh_ray/auth/token_file.py",
        "if self._file.stamp() == self._stamp:",
        "if self._file.stamp() == self._stamp or self._stamp is not None:",
        "tests/loopback/test_access.py::test_a_session_outlives_its_token",
    ),
    Fault(
        "one-token-opens-all-endpoints",
        "auth",
        "All endpoints of a fleet or a pool have the same token.",
        "rlmesh_ray/auth/token_file.py",
        '"\\0".join((_PURPOSE, endpoint_id, role))',
        '"\\0".join((_PURPOSE, role))',
        "tests/loopback/test_registration.py::test_the_token_of_one_endpoint_opens_no_other",
    ),
    Fault(
        "episodes-are-a-step-too-long",
        "evaluation",
        "The length of an episode counts one step too many.",
        "rlmesh_ray/evaluation/run.py",
        "self._lengths[chosen] = 0\n",
        "self._lengths[chosen] = 1\n",
        "tests/loopback/test_evaluation.py::test_an_episode_is_what_it_is_in_process",
    ),
    Fault(
        "returns-run-on",
        "evaluation",
        "The return of an episode begins with that of the lane's last one.",
        "rlmesh_ray/evaluation/run.py",
        "        self._returns[chosen] = 0.0\n",
        "",
        "tests/loopback/test_evaluation.py::"
        "test_the_result_does_not_depend_on_the_width_or_the_side_of_the_policy",
    ),
    Fault(
        "silent-episodes-do-not-count",
        "evaluation",
        "The success rate leaves out episodes that report nothing.",
        "rlmesh_ray/evaluation/result.py",
        "return sum(episode.success is True for episode in self.episodes) / len(self.episodes)",
        "return sum(episode.success is True for episode in self.episodes) / self.success_reports",
        "tests/loopback/test_evaluation_losses.py::"
        "test_episodes_that_report_nothing_count_and_are_named_once",
    ),
    Fault(
        "results-swap-their-flags",
        "evaluation",
        "The result of an episode mixes up terminated and truncated.",
        "rlmesh_ray/evaluation/run.py",
        "terminated=bool(terminated[lane]),\n                    truncated=bool(truncated[lane]),",
        "terminated=bool(truncated[lane]),\n                    truncated=bool(terminated[lane]),",
        "tests/loopback/test_evaluation.py::test_an_episode_is_what_it_is_in_process",
    ),
    Fault(
        "interruptions-are-not-counted",
        "evaluation",
        "An endpoint that was lost in the middle of an episode has no interruption in the report.",
        "rlmesh_ray/evaluation/result.py",
        "[1] += bool(each.episodes)",
        "[1] += 0",
        "tests/loopback/test_evaluation_losses.py::"
        "test_an_environment_that_dies_costs_no_episode[1]",
    ),
    Fault(
        "a-broken-clause-exits-with-0",
        "cli",
        "The check command exits with 0 although a clause is broken.",
        "rlmesh_ray/cli/commands/check.py",
        "        return BROKEN\n    return 0",
        "        return 0\n    return 0",
        "tests/compliance/test_check_command.py::test_a_broken_clause_is_named_with_what_was_seen",
    ),
    Fault(
        "wrong-usage-exits-with-1",
        "cli",
        "Wrong usage, such as an option with an impossible value, exits with 1 as a failure does.",
        "rlmesh_ray/cli/error_reporting.py",
        "type(own) in {ConfigurationError, AddressError}",
        "type(own) in {AddressError}",
        "tests/loopback/test_cli.py::test_wrong_usage_names_cause_and_remedy",
    ),
    Fault(
        "errors-exit-with-0",
        "cli",
        "A command that has failed exits with 0.",
        "rlmesh_ray/cli/error_reporting.py",
        'getattr(own, "is_wrong_usage", False) else 1',
        'getattr(own, "is_wrong_usage", False) else 0',
        "tests/loopback/test_cli.py::test_an_error_names_cause_and_remedy",
    ),
    Fault(
        "an-interrupted-check-exits-with-0",
        "cli",
        "A check that was interrupted exits as one that has finished.",
        "rlmesh_ray/cli/commands/check.py",
        "return INTERRUPTED if is_interrupted else _exit_code(report)",
        "return _exit_code(report)",
        "tests/compliance/test_check_command.py::"
        "test_what_was_found_before_an_interruption_is_shown",
    ),
    Fault(
        "seeds-of-lanes-are-not-checked",
        "compliance",
        "The check of seeds does not look at which lane gets which.",
        "rlmesh_ray/compliance/env_checks.py",
        "is_mirrored = is_same(start, [column[::-1] for column in mirrored])",
        "is_mirrored = bool(start) or bool(mirrored)",
        "tests/compliance/test_saboteurs.py::"
        "test_an_env_server_that_breaks_a_clause_is_found_out[reset.seeds-SeedsAllLanesAlike]",
    ),
    Fault(
        "step-counts-are-not-checked",
        "compliance",
        "The check of episodes does not look at their counts of steps.",
        "rlmesh_ray/compliance/env_checks.py",
        '_require_equal(record, "step_count", record.step_count, count)',
        '_require_equal(record, "step_count", count, count)',
        "tests/compliance/test_saboteurs.py::"
        "test_an_env_server_that_breaks_a_clause_is_found_out"
        "[episodes.begin-CountsOnAfterAnEnd]",
    ),
    Fault(
        "silent-refusals-pass",
        "compliance",
        "The check of refusals accepts one without a reason.",
        "rlmesh_ray/compliance/handshake_and_shutdown_checks.py",
        '        require(bool(answer.error_message), f"the refusal of {changes} has '
        'no error_message")\n',
        "",
        "tests/compliance/test_saboteurs.py::"
        "test_an_env_server_that_breaks_a_clause_is_found_out"
        "[session.refusal-RefusesWithoutAReason]",
    ),
    Fault(
        "records-at-close-are-not-checked",
        "compliance",
        "The check that a record comes once does not look at those that Close returns.",
        "rlmesh_ray/compliance/env_checks.py",
        "        records += session.close().final_episodes\n    ids = [",
        "        session.close()\n    ids = [",
        "tests/compliance/test_saboteurs.py::"
        "test_an_env_server_that_breaks_a_clause_is_found_out"
        "[episodes.once-TellsAllEpisodesAtClose]",
    ),
    Fault(
        "recordings-are-mixed",
        "recording",
        "Episodes of an environment are recorded into the folder of another one.",
        "rlmesh_ray/recording/store.py",
        "if replace(own, fps=0.0) != replace(info, fps=0.0):",
        "if False:",
        "tests/loopback/test_recording.py::"
        "test_a_folder_that_cannot_be_used_is_refused_before_the_first_step",
    ),
    Fault(
        "videos-are-left-out",
        "recording",
        "No frame that the environment renders is recorded.",
        "rlmesh_ray/recording/recorder.py",
        "for frame in render() or ()]",
        "for frame in ()]",
        "tests/loopback/test_recording.py::"
        "test_an_endpoint_records_each_session_over_any_transport[shared_memory]",
    ),
    Fault(
        "a-page-skips-an-episode",
        "watch",
        "A page of episodes begins one episode too late.",
        "rlmesh_ray/watch/runs.py",
        "page = ordered[max(first, 0) :][:PAGE_EPISODES]",
        "page = ordered[max(first, 0) + 1 :][:PAGE_EPISODES]",
        "tests/loopback/test_watch.py::"
        "test_runs_and_recordings_are_shown_from_where_a_browser_asks",
    ),
    Fault(
        "a-curve-loses-its-end",
        "watch",
        "A long learning curve does not show its last point.",
        "rlmesh_ray/watch/runs.py",
        "return points[::-1][::step][::-1]",
        "return points[::step][:-1]",
        "tests/loopback/test_watch.py::"
        "test_runs_and_recordings_are_shown_from_where_a_browser_asks",
    ),
    Fault(
        "sessions-of-the-dead-are-shown",
        "watch",
        "The sessions of an endpoint that has gone are still shown.",
        "rlmesh_ray/watch/live.py",
        "sessions = [] if answer.problem else answer.value or []",
        "sessions = answer.value or []",
        "tests/loopback/test_watch.py::"
        "test_an_endpoint_that_goes_is_stale_and_one_that_comes_back_has_restarted",
    ),
    Fault(
        "dm-truncations-terminate",
        "dm_env_rpc",
        "A sequence of a dm_env_rpc server that was cut is reported as terminated.",
        "rlmesh_ray/dialects/dm_env_rpc/client/lane_steps.py",
        "return reward, now is SequenceState.TERMINATED and not is_cut, is_cut",
        "return reward, now is not SequenceState.RUNNING, False",
        "tests/loopback/test_dm_env_rpc_client.py::"
        "test_ends_are_distinguished_from_cuts[conduct1-settings1-True]",
    ),
    Fault(
        "dm-time-limit-is-a-step-late",
        "dm_env_rpc",
        "An episode that ends with its time limit is no truncation, but one a step later is.",
        "rlmesh_ray/dialects/dm_env_rpc/client/lane_steps.py",
        "self._num_steps >= limit",
        "self._num_steps > limit",
        "tests/loopback/test_dm_env_rpc_client.py::"
        "test_ends_are_distinguished_from_cuts[conduct3-settings3-True]",
    ),
    Fault(
        "dm-worlds-end-under-agents",
        "dm_env_rpc",
        "A world is destroyed while agents are joined to it.",
        "rlmesh_ray/dialects/dm_env_rpc/server/worlds.py",
        "        if not self.find(name).is_empty:\n            raise WorldError(",
        "        if False:\n            raise WorldError(",
        "tests/loopback/test_dm_env_rpc_server.py::test_a_world_is_not_destroyed_under_its_agents",
    ),
    Fault(
        "dm-first-step-has-a-reward",
        "dm_env_rpc",
        "The step that begins a sequence has the reward that the server sent with it.",
        "rlmesh_ray/dialects/dm_env_rpc/client/lane_steps.py",
        "return 0.0, False, False",
        "return reward, False, False",
        "tests/loopback/test_dm_env_rpc_client.py::"
        "test_lanes_step_as_a_vector_environment_of_gymnasium",
    ),
    Fault(
        "rllink-takes-any-token",
        "rllink",
        "An RLlink port lets in a client that shows a wrong token.",
        "rlmesh_ray/dialects/rllink/server/connection.py",
        "    if role is None:\n        raise RemoteProtocolError(",
        "    if role is None and shown:\n"
        "        return\n"
        "    if role is None:\n"
        "        raise _RefusedClient(",
        "tests/loopback/test_rllink.py::"
        "test_a_client_without_a_token_gets_the_reason_and_is_cut_off",
    ),
    Fault(
        "rllink-parts-forget-their-place",
        "rllink",
        "The parts of an episode all say that they begin at its first step.",
        "rlmesh_ray/dialects/rllink/runner/env_runner.py",
        "t_started=received.first_step - progress.rllib_began,",
        "t_started=0,",
        "tests/ray/test_rllink_runner.py::"
        "test_the_parts_of_an_episode_are_what_its_simulator_saw[False]",
    ),
    Fault(
        "rllink-flags-are-swapped",
        "rllink",
        "Episodes of simulators mix up terminated and truncated.",
        "rlmesh_ray/dialects/rllink/runner/env_runner.py",
        "episode.is_terminated, episode.is_truncated = chunk.is_terminated, chunk.is_truncated",
        "episode.is_truncated, episode.is_terminated = chunk.is_terminated, chunk.is_truncated",
        "tests/ray/test_rllink_runner.py::"
        "test_the_parts_of_an_episode_are_what_its_simulator_saw[False]",
    ),
    Fault(
        "rllink-timeouts-are-losses",
        "rllink",
        "A client that has waited in vain says that the connection was lost.",
        "rlmesh_ray/dialects/rllink/client.py",
        "        if isinstance(error, TimeoutError):\n            return EndpointTimeoutError",
        "        if False:\n            return EndpointTimeoutError",
        "tests/loopback/test_rllink.py::"
        "test_the_client_does_not_wait_for_a_server_that_accepts_and_sends_nothing",
    ),
    Fault(
        "released-episodes-begin-at-each-step",
        "released",
        "Each prediction of a runtime counts as the first one of its episode.",
        "rlmesh_ray/dialects/released/server/model_dialect.py",
        "is_first, episode_lane.has_begun = not episode_lane.has_begun, True",
        "is_first, episode_lane.has_begun = not episode_lane.has_begun, False",
        "tests/loopback/test_released_model_server.py::"
        "test_an_endpoint_may_keep_chunks_for_a_runtime_that_takes_one_action",
    ),
    Fault(
        "released-episodes-stay-counted",
        "released",
        "Episodes that have ended still count towards the limit of a session.",
        "rlmesh_ray/dialects/released/server/model_dialect.py",
        "        self._held.count -= len(known)\n",
        "",
        "tests/loopback/test_released_model_server.py::"
        "test_ten_thousand_episodes_leave_nothing_behind",
    ),
    Fault(
        "released-truncations-are-terminations",
        "released",
        "The mask of truncated lanes is that of the terminated ones.",
        "rlmesh_ray/dialects/released/wire/env.py",
        "        truncated_mask=response.truncated,\n        env_indices",
        "        truncated_mask=response.terminated,\n        env_indices",
        "tests/loopback/test_env_endpoint.py::"
        "test_terminated_and_truncated_stay_apart[rlmesh-wire-v1-auto]",
    ),
    Fault(
        "released-times-are-swapped",
        "released",
        "The time of the environment is that of the encoding.",
        "rlmesh_ray/dialects/released/wire/env.py",
        "user_ns=timings.user_ns,",
        "user_ns=timings.encode_ns,",
        "tests/loopback/test_released_env_server.py::test_answers_tell_what_they_took",
    ),
    Fault(
        "openpi-lets-probes-in",
        "openpi",
        "The token of a probe opens sessions of openpi clients.",
        "rlmesh_ray/dialects/openpi/server.py",
        "            if role < TokenRole.CLIENT:",
        "            if False:",
        "tests/loopback/test_openpi_server.py::test_a_token_travels_as_api_key",
    ),
    Fault(
        "openpi-takes-the-last-actions",
        "openpi",
        "Of a longer chunk the last actions are taken, not the first.",
        "rlmesh_ray/dialects/openpi/client.py",
        "np.stack([chunk[:horizon] for chunk in own], 1)",
        "np.stack([chunk[-horizon:] for chunk in own], 1)",
        "tests/loopback/test_openpi_client.py::test_a_prediction_is_the_first_action_of_the_chunk",
    ),
    Fault(
        "openpi-asks-twice-on-one-line",
        "openpi",
        "A batch that names a lane twice is sent over one connection at the same time.",
        "rlmesh_ray/dialects/openpi/client.py",
        "if len({row.env_index for row in rows}) < len(rows):",
        "if False:",
        "tests/loopback/test_openpi_client.py::"
        "test_a_lane_that_is_named_twice_is_refused_and_the_session_goes_on",
    ),
    Fault(
        "openpi-answers-web-pages",
        "openpi",
        "Without a token, any web page may use the policy.",
        "rlmesh_ray/dialects/openpi/server.py",
        'if "Origin" in request.headers:',
        "if False:",
        "tests/loopback/test_openpi_server.py::test_without_a_token_web_pages_are_refused",
    ),
    Fault(
        "kept-chunks-repeat-their-first-action",
        "models",
        "A client of single actions gets the first action of a kept chunk again and again.",
        "rlmesh_ray/models/wrappers.py",
        "np.roll(column, -chunk.num_used, axis=0)",
        "np.roll(column, 0, axis=0)",
        "tests/loopback/test_action_chunks.py::"
        "test_an_endpoint_may_keep_chunks_for_clients_that_take_one_action",
    ),
    Fault(
        "kept-chunks-end-an-action-early",
        "models",
        "The last action of a kept chunk is never used.",
        "rlmesh_ray/models/wrappers.py",
        "self.num_used == len(self.columns[0])",
        "self.num_used + 1 == len(self.columns[0])",
        "tests/loopback/test_action_chunks.py::test_kept_chunks_of_a_module_survive_new_weights",
    ),
    Fault(
        "a-recurrent-module-forgets",
        "models",
        "The new states of a recurrent module are dropped after each batch.",
        "rlmesh_ray/models/torch/policy.py",
        "            self._table.keep(index, states, is_refused[part.rows])",
        "            pass",
        "tests/loopback/test_released_model_server.py::"
        "test_a_recurrent_module_goes_on_where_each_episode_was",
    ),
    Fault(
        "another-horizon-is-ignored",
        "models",
        "An option that contradicts the policy's own horizon is ignored.",
        "rlmesh_ray/models/policy.py",
        "if given not in (None, horizon):",
        "if False:",
        "tests/loopback/test_action_chunks.py::"
        "test_options_that_cannot_be_are_refused_by_the_server[options1-says 3 itself]",
    ),
    Fault(
        "runners-seed-other-lanes",
        "rllib",
        "A runner seeds its lanes alike, instead of counting up.",
        "rlmesh_ray/rllib/runner/env_runner.py",
        "[seed + lane for lane in slot.lanes]",
        "[seed for lane in slot.lanes]",
        "tests/ray/test_parity.py::test_episodes_are_rllibs_own[defaults, whole episodes]",
    ),
    Fault(
        "interrupted-episodes-count-twice",
        "rllib",
        "The metric of interrupted episodes counts each of them twice.",
        "rlmesh_ray/rllib/runner/session_recovery.py",
        'runner.metrics.log_value(key, num_truncated, reduce="lifetime_sum")',
        'runner.metrics.log_value(key, 2 * num_truncated, reduce="lifetime_sum")',
        "tests/ray/test_lost_sessions.py::"
        "test_an_endpoint_s_death_costs_no_transition_that_has_arrived",
    ),
    Fault(
        "metrics-miss-their-0",
        "rllib",
        "Results have no metrics of failures before the first failure.",
        "rlmesh_ray/rllib/runner/env_runner.py",
        'self.metrics.log_value(name, 0, reduce="lifetime_sum")',
        "pass",
        "tests/ray/test_lost_sessions.py::"
        "test_metrics_of_failures_are_0_before_the_first_one[fast]",
    ),
    Fault(
        "new-sessions-miss-their-settings",
        "rllib",
        "A setting that was made by a call is not repeated in a session that replaces a lost one.",
        "rlmesh_ray/rllib/runner/slot.py",
        "        self._set_up(group)\n        return group.reset()",
        "        return group.reset()",
        "tests/ray/test_lost_sessions.py::test_a_call_reaches_every_lane_and_new_sessions_too",
    ),
    Fault(
        "a-broken-environment-is-tried-for-ever",
        "rllib",
        "A runner never gives up an environment that finishes no episode.",
        "rlmesh_ray/rllib/runner/session_recovery.py",
        "            runner.broken_environment = _broken(error, num_raised)\n"
        "            raise runner.broken_environment from error",
        "            return",
        "tests/ray/test_broken_environments.py::"
        "test_a_runner_gives_up_an_environment_that_finishes_no_episode",
    ),
    Fault(
        "last-observations-are-first-ones",
        "rllib",
        "In SAME_STEP mode, an episode ends with the first observation of the next one.",
        "rlmesh_ray/rllib/runner/autoreset_emulation.py",
        "observation = self._with_final_observations(observation, infos)",
        "pass",
        "tests/ray/test_env_runner.py::"
        "test_no_transition_is_lost_doubled_or_stitched_in_any_autoreset_mode[SAME_STEP]",
    ),
    Fault(
        "weights-keep-their-version",
        "actors",
        "A fleet takes weights of the version that it has already.",
        "actors/model_actor.py",
        "if version <= floor:",
        "if version < floor:",
        "tests/ray/test_model_fleet.py::test_versions_only_grow",
    ),
    Fault(
        "a-drained-replica-is-named",
        "actors",
        "Clients are still led to a replica that drains.",
        "actors/model_actor.py",
        '_leaves_by = "suspend"',
        '_leaves_by = "retire"',
        "tests/ray/test_model_fleet.py::test_a_drained_replica_is_named_no_more_until_it_restarts",
    ),
    Fault(
        "restarted-replicas-have-old-weights",
        "actors",
        "A replica that restarts serves the policy's original weights.",
        "actors/model_actor.py",
        "self._accepted, self._offered = self._offered, None",
        "self._offered = None",
        "tests/ray/test_model_fleet.py::test_a_killed_replica_comes_back_with_the_last_weights",
    ),
    Fault(
        "endpoints-that-go-get-sessions",
        "actors",
        "New sessions are still opened at an endpoint that is about to end.",
        "actors/registry/registry_actor.py",
        "if entry.record.fleet == fleet and not entry.is_retiring and entry.is_live(now_s)",
        "if entry.record.fleet == fleet and entry.is_live(now_s)",
        "tests/ray/test_fleet_scaling.py::"
        "test_sessions_are_asked_to_move_to_new_endpoints_and_away_from_those_that_go",
    ),
)


class Copies:
    """Copies of the repository, one for each test that runs at a time.

    Args:
        folder: Where they are made.
        count: How many.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            root = folder / str(number)
            # Links stay links: rlmesh_ray/actors is one, within the copy.
            ignore = shutil.ignore_patterns(*_LEFT_OUT)
            shutil.copytree(ROOT, root, symlinks=True, ignore=ignore)
            for name in (".venv", ".venvs"):
                if (ROOT / name).exists():
                    (root / name).symlink_to((ROOT / name).resolve())
            self._free.put(root)

    def run(self, tests: Iterable[str], fault: Fault | None = None) -> tuple[int, str]:
        """Run tests in a copy, with or without a fault; return pytest's exit code and its output.

        Args:
            tests: Ids.
            fault: To plant; None: none.
        """
        root = self._free.get()
        options = ("-q", "-x", "-p", "no:cacheprovider", f"--timeout={_TEST_TIMEOUT_S}")
        with contextlib.nullcontext() if fault is None else fault.planted(root):
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=root,
                # Before what is installed: the checkout, perhaps.
                env={**os.environ, "PYTHONPATH": str(root)},
                capture_output=True,
                text=True,
                check=False,
            )
        self._free.put(root)
        return done.returncode, done.stdout + done.stderr


def verdict(copies: Copies, fault: Fault) -> str:
    """Plant a fault; return whether its test has found it, in a few words."""
    if fault.num_places != 1:
        return f"NO PLACE: its old text stands {fault.num_places} times in {fault.file}"
    code, output = copies.run([fault.test], fault)
    if code == _FAILED:
        return "found"
    return "NOT FOUND" if code == 0 else f"DOES NOT RUN\n{output}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults; print a table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("name", nargs="*", help="of a fault; default: all")
    parser.add_argument("--room", choices=ROOMS)
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    args = parser.parse_args(arguments)
    if unknown := set(args.name) - {fault.name for fault in FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    chosen = [
        fault
        for fault in FAULTS
        if args.room in (None, fault.room) and (not args.name or fault.name in args.name)
    ]
    began_s = time.monotonic()
    num_missed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = Copies(Path(folder), args.jobs)
        whole = pool.submit(copies.run, sorted({fault.test for fault in chosen}))
        running = {pool.submit(verdict, copies, fault): fault for fault in chosen}
        for done in as_completed(running):
            fault = running[done]
            num_missed += done.result() != "found"
            sys.stdout.write(f"{fault.room:11} {fault.name:40} {done.result()}\n")
            sys.stdout.flush()
        code, output = whole.result()
    if code:
        sys.stdout.write(f"{output}\nTests of faults do not pass without a fault.\n")
    took_s = time.monotonic() - began_s
    sys.stdout.write(f"{len(chosen) - num_missed} of {len(chosen)} found in {took_s:.0f} s\n")
    return int(bool(num_missed or code))


if __name__ == "__main__":
    sys.exit(main())
