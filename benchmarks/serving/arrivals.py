"""When requests arrive that do not wait for one another."""

import random


def poisson(rate_per_s: float, seconds: float, rng: random.Random) -> list[float]:
    """Return the arrival times of a Poisson process in ``[0, seconds)``, ascending.

    Args:
        rate_per_s: Arrivals a second, on average; above 0.
        seconds: How long.
        rng: Where the gaps come from.
    """
    times = []
    now_s = rng.expovariate(rate_per_s)
    while now_s < seconds:
        times.append(now_s)
        now_s += rng.expovariate(rate_per_s)
    return times
