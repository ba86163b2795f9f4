from rlmesh_ray.rllib.runner.sample_budget import SampleBudget


def test_timesteps_that_are_on_their_way_are_not_asked_for_again() -> None:
    budget = SampleBudget(num_timesteps=10, num_episodes=None)

    budget.in_flight = 8
    assert budget.is_open
    budget.in_flight = 10
    assert not budget.is_open
    assert not budget.is_full


def test_nothing_is_on_its_way_when_the_timesteps_are_there() -> None:
    budget = SampleBudget(num_timesteps=10, num_episodes=None, timesteps=10, in_flight=1)

    assert not budget.is_full
    budget.in_flight = 0
    assert budget.is_full


def test_what_was_lost_on_its_way_is_asked_for_again() -> None:
    budget = SampleBudget(num_timesteps=10, num_episodes=None, timesteps=6, in_flight=4)

    budget.in_flight -= 4

    assert budget.is_open


def test_no_timesteps_are_no_work() -> None:
    budget = SampleBudget(num_timesteps=0, num_episodes=None)

    assert budget.is_full
    assert not budget.is_open


def test_episodes_are_asked_for_until_they_are_there() -> None:
    budget = SampleBudget(num_timesteps=None, num_episodes=2, episodes=1, in_flight=50)

    assert budget.is_open
    budget.episodes = 2
    assert budget.is_full
    assert not budget.is_open
