"""A live page of endpoints, sessions, trainings and recorded episodes (``rlmesh-ray watch``)."""
