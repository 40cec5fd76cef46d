"""The scheduler's parts, one idea each; `worker.scheduler` puts them together."""
