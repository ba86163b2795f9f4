"""Policies that are slow, for simulators and robots that have a pace of their own."""
