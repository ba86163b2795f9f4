"""How the cost of a vector step grows with lanes, endpoints and the size of observations."""
