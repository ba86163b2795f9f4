"""Why each Protocol of the product stands: its implementations, or the layer that it keeps apart.

One with a single implementation, and no layer in between, leaves; so does its line here.
"""

OTHER_NAMES = {"PettingZoo", "RLlib", "RLlink"}
"""In reasons; the other capital words are classes of the product."""

ALLOWED_PROTOCOLS = {
    "BidiCall": "QueuedCall, SingleThreadedCall",
    "ClientSession": "keeps RLlink's server from its runner, which has SimulatorSession",
    "DialectService": "keeps the server from the dialect dm_env_rpc, which has EnvironmentService",
    "EndpointDirectory": "keeps evaluation from actors, which have FleetResolver",
    "EndpointFleet": "keeps evaluation from actors, which have EnvFleet and ModelFleet",
    "EndpointResolver": "FixedAddressResolver, FleetResolver",
    "EndpointSource": "AddressSource; keeps watch from actors, which have ClusterEndpoints",
    "EnvServerFrames": "the modules env: wire, released",
    "EnvSessionClient": "EnvClient, WorldClient",
    "EpisodeCounterSource": "keeps protocol from transport, which has EndpointSide",
    "ExportablePolicy": "TorchPolicy, RecurrentTorchPolicy, RllibPolicy",
    "FurtherPort": "keeps the server from the dialect openpi, which has OpenpiPort",
    "ModelServerDialect": "EditionModelServerDialect, ReleasedModelServerDialect",
    "MultiAgentEnv": "the environments of RLlib and of PettingZoo, which envs must not import",
    "Policy": "TorchPolicy, RllibPolicy and others, also those of users",
    "PoolRegistry": "keeps the server from actors, which have PoolActor",
    "ServedDialect": "EnvServerDialect, EditionModelServerDialect",
    "StepObserver": "keeps envs from recording, which has SessionObserver",
    "UpdatablePolicy": "TorchPolicy, RllibPolicy",
    "WeightSink": "ModelServer, ModelFleet",
}
