from rlmesh_ray.rllib.quota import Quota


def test_timesteps_that_are_on_their_way_are_not_asked_for_again() -> None:
    quota = Quota(num_timesteps=10, num_episodes=None)

    quota.asked = 8
    assert quota.is_open
    quota.asked = 10
    assert not quota.is_open
    assert not quota.is_full


def test_nothing_is_on_its_way_when_the_timesteps_are_there() -> None:
    quota = Quota(num_timesteps=10, num_episodes=None, timesteps=10, asked=1)

    assert not quota.is_full
    quota.asked = 0
    assert quota.is_full


def test_what_was_lost_on_its_way_is_asked_for_again() -> None:
    quota = Quota(num_timesteps=10, num_episodes=None, timesteps=6, asked=4)

    quota.asked -= 4

    assert quota.is_open


def test_no_timesteps_are_no_work() -> None:
    quota = Quota(num_timesteps=0, num_episodes=None)

    assert quota.is_full
    assert not quota.is_open


def test_episodes_are_asked_for_until_they_are_there() -> None:
    quota = Quota(num_timesteps=None, num_episodes=2, episodes=1, asked=50)

    assert quota.is_open
    quota.episodes = 2
    assert quota.is_full
    assert not quota.is_open
