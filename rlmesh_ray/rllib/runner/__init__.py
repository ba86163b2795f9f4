"""The EnvRunners: slots of sessions, the sampling loop, retries and recovery."""
