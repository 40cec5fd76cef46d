"""The gRPC side of a front process: servers, servicers, validation, health, security."""
