"""The events of a server, for whoever wants to know what is cached: over ZeroMQ, over gRPC."""
