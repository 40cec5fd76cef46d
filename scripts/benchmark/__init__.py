"""The parts of scripts/bench. Each measures one thing and returns plain figures; report writes them down."""
