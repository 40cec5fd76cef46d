"""The rooms of a layer: mixers and feed-forwards, each made from its spec and its weights."""
