from rlmesh_ray.rllib.runner.sampling_path import SampleCall


def test_timesteps_that_are_on_their_way_are_not_asked_for_again() -> None:
    call = SampleCall(num_timesteps=10, num_episodes=None)

    call.in_flight = 8
    assert call.is_open
    call.in_flight = 10
    assert not call.is_open
    assert not call.is_full


def test_nothing_is_on_its_way_when_the_timesteps_are_there() -> None:
    call = SampleCall(num_timesteps=10, num_episodes=None, timesteps=10, in_flight=1)

    assert not call.is_full
    call.in_flight = 0
    assert call.is_full


def test_what_was_lost_on_its_way_is_asked_for_again() -> None:
    call = SampleCall(num_timesteps=10, num_episodes=None, timesteps=6, in_flight=4)

    call.in_flight -= 4

    assert call.is_open


def test_no_timesteps_are_no_work() -> None:
    call = SampleCall(num_timesteps=0, num_episodes=None)

    assert call.is_full
    assert not call.is_open


def test_episodes_are_asked_for_until_they_are_there() -> None:
    call = SampleCall(num_timesteps=None, num_episodes=2, episodes=1, in_flight=50)

    assert call.is_open
    call.episodes = 2
    assert call.is_full
    assert not call.is_open
