"""Policies that are torch modules, TorchScript or exported programs."""
