"""One module an engine, each a process of its own: ``python -m benchmark.peers.drivers.NAME SETTINGS``.

They run in the peers' environments, so beside the engine's own package they import ``benchmark.peers.wire`` alone.
"""
